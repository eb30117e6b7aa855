"""What became of the last run's spans, and what earlier ones left behind."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from otel_dltrace.model.findings import FINE, NOTE, PROBLEM, Finding
from otel_dltrace.model.summary import summary_line, told_in
from otel_dltrace.record.ring_file import open_for_reading, writer_is_alive
from otel_dltrace.settings.config import Config

AREA = "last run"
_AT_WORK = "; the drain is at work, or was killed"
_UNITS = ((86_400, "day"), (3_600, "hour"), (60, "minute"), (1, "second"))


def check(config: Config) -> list[Finding]:
    """Return what the newest run directory says of its spans, and which rings wait for somebody to read them."""
    runs = sorted(Path(config.directory).glob("dltrace-*/hosts/*/drain.json"), key=lambda path: _begun(path.parents[2]))
    if not runs:
        found = [Finding(AREA, FINE, f"there is no run in {config.directory} yet")]
    else:
        newest = runs[-1].parents[2]
        of_newest = [path for path in runs if path.parents[2] == newest]
        ago = _ago(time.time() - max(path.stat().st_mtime for path in of_newest))
        found = [_host(newest, ago, path) for path in of_newest]
    return [*found, *_orphans(config.rings)]


def _begun(run: Path) -> float:
    """Return when *run* was made: a drain that lingers, or `recover`, writes its figures long after a later one's."""
    described = run / "run.json"
    return (described if described.exists() else run).stat().st_mtime


def _host(run: Path, ago: str, path: Path) -> Finding:
    typed = quote(str(run))
    try:
        told = told_in(path.read_text(errors="replace"))
    except OSError:
        told = None
    if told is None:
        return Finding(AREA, NOTE, f"{run.name}, {ago}: {path.name} cannot be read", f"otel-dltrace report {typed}")
    figures, is_over = told["summary"], told["ended"]
    otlp = figures.get("otlp", {})
    what = f"{run.name}, {ago}: {summary_line(figures, is_over=is_over)}{'' if is_over else _AT_WORK}"
    lost = any(figures.get(name) for name in figures if name.startswith(("lapped_", "unrecorded", "dropped_by")))
    if lost:
        return Finding(
            AREA,
            PROBLEM,
            what,
            "a larger OTEL_DLTRACE_RING_SIZE or OTEL_DLTRACE_QUOTA, or a coarser OTEL_DLTRACE_LEVEL",
        )
    if otlp.get("rejected") or otlp.get("dropped"):
        cure = f"fix the cause; every span is kept: otel-dltrace export {typed} --to otlp"
        return Finding(AREA, PROBLEM, what, cure)
    if otlp.get("waiting") or otlp.get("spilled"):
        return Finding(AREA, NOTE, what, f"send what waits: otel-dltrace recover {typed}")
    return Finding(AREA, FINE, what)


def _ago(seconds: float) -> str:
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= size), _UNITS[-1])
    count = max(0, int(seconds // size))
    return f"{count} {unit}{'s' * (count != 1)} ago"


def _orphans(rings: Path) -> Iterator[Finding]:
    """Yield a finding where rings are left that nobody writes."""
    left = [path for path in rings.glob("*.ring") if not _is_written(path)] if rings.is_dir() else []
    if left:
        which, lost = ("1 ring", "has lost its") if len(left) == 1 else (f"{len(left)} rings", "have lost their")
        what = f"{which} in {rings} {lost} writer: a drain is still reading, or was killed"
        yield Finding("left behind", NOTE, what, "otel-dltrace recover finishes what a killed drain left")


def _is_written(ring: Path) -> bool:
    try:
        fd = open_for_reading(ring)
    except OSError:
        return True  # gone meanwhile, or of somebody else
    try:
        return writer_is_alive(fd)
    finally:
        os.close(fd)

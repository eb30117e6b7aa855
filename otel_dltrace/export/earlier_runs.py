"""Earlier runs of a job on a host: a restart has a directory of its own and the same quota; their detail goes first."""

import os
from collections.abc import Collection
from pathlib import Path

from otel_dltrace.export.compaction import keep_within, spans_bytes
from otel_dltrace.export.drain_json import read_drain
from otel_dltrace.export.files import read_object, write_json
from otel_dltrace.export.host_folder import lock_folder
from otel_dltrace.export.metrics.segments import metrics_bytes


def earlier_folders(folder: Path) -> list[Path]:
    """Return the host's folders in those runs of the job that began before the one of *folder*, the oldest first."""
    root = folder.parents[1]
    job, began = read_object(root / "run.json").get("job"), _began(root)
    runs = sorted((_began(path.parent), path.parent) for path in root.parent.glob("dltrace-*/run.json"))
    before = [run for since, run in runs if since < began]
    hosts = [run / "hosts" / folder.name for run in before if read_object(run / "run.json").get("job") == job]
    return [host for host in hosts if host.is_dir()]


def bytes_in(folder: Path) -> int:
    """Return how many bytes the spans and metrics in *folder* fill."""
    return spans_bytes(folder) + metrics_bytes(folder)


def make_room(folders: Collection[Path], over: int, busy: Collection[Path]) -> None:
    """Drop detail in *folders*, but for those that are *busy*, from the first on until *over* bytes are free."""
    for folder in folders:
        if over > 0 and folder not in busy and (lock := lock_folder(folder)) is not None:
            before = bytes_in(folder)
            try:
                _shrink(folder, max(0, before - over))
            finally:
                os.close(lock)
            over -= before - bytes_in(folder)


def _began(root: Path) -> int:
    try:
        return (root / "run.json").stat().st_mtime_ns
    except OSError:
        return 0


def _shrink(folder: Path, size: int) -> None:
    """Drop the oldest detail in *folder* until it has *size* bytes, and count what went in its figures."""
    dropped = sum(keep_within(folder, size - metrics_bytes(folder)))
    if dropped and (told := read_drain(folder)):
        figures = told["summary"]
        figures["dropped_by_quota"] = figures.get("dropped_by_quota", 0) + dropped
        write_json(folder / "drain.json", {**told, "summary": figures})

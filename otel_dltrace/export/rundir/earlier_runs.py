"""Earlier runs of a job on a host: a restart has a directory of its own and the same quota; their detail goes first."""

import glob
import os
from pathlib import Path

from otel_dltrace.export.files import read_object, write_json
from otel_dltrace.export.metrics.segments import metrics_bytes
from otel_dltrace.export.rundir.compaction import compact, keep_within, spans_bytes
from otel_dltrace.export.rundir.drain_json import read_drain
from otel_dltrace.export.rundir.host_folder import lock_folder

_HASH = 8
"""Hex digits that end a run directory's name; what is before them is the job's name."""


def earlier_folders(folder: Path, job: str) -> list[Path]:
    """Return the host's folders in those runs of *job* that began before the one of *folder*, the oldest first."""
    root = folder.parents[1]
    began, alike = _began(root), root.parent.glob(f"{glob.escape(root.name[:-_HASH])}{_HASH * '?'}/run.json")
    runs = sorted((_began(path.parent), path.parent) for path in alike if path.is_file())
    before = [run for since, run in runs if since < began and read_object(run / "run.json").get("job") == job]
    return [host for run in before if (host := run / "hosts" / folder.name).is_dir()]


def bytes_in(folder: Path) -> int:
    """Return how many bytes the spans and metrics in *folder* fill; 0 while a drain of another process moves them."""
    try:
        return spans_bytes(folder) + metrics_bytes(folder)
    except OSError:
        return 0


def shrink(folder: Path, size: int) -> None:
    """Drop the oldest detail in *folder*, whose drain has ended, until it has *size* bytes, and count it there.

    Raises:
        OSError: It cannot be changed.
    """
    lock = lock_folder(folder)
    if lock is None:
        return
    dropped = 0
    try:
        compact(folder)  # of a drain that was killed
        for gone in keep_within(folder, size - metrics_bytes(folder)):
            dropped += gone
    finally:
        _count(folder, dropped)
        os.close(lock)


def _began(root: Path) -> int:
    try:
        return (root / "run.json").stat().st_mtime_ns
    except OSError:
        return 0


def _count(folder: Path, dropped: int) -> None:
    if dropped and (told := read_drain(folder)):
        figures = told["summary"]
        figures["dropped_by_quota"] = figures.get("dropped_by_quota", 0) + dropped
        write_json(folder / "drain.json", {**told, "summary": figures})

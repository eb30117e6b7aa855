"""The files of a host's folder that hold spans: segments, and the Parquets that replace them (contract 7)."""

from pathlib import Path

import pyarrow.parquet as pq

from otel_dltrace.export.files import UNREADABLE
from otel_dltrace.model.identity import NO_STEP

SEGMENTS = "spans-*.arrows"
PARQUETS = "steps-*.parquet"


def span_files(folder: Path) -> list[Path]:
    """Return the files that hold a host's spans, each span in one: a Parquet replaces its segments."""
    parquets = sorted(folder.glob(PARQUETS))
    covered = {name for path in parquets for name in replaced_segments(path)}
    return parquets + [path for path in sorted(folder.glob(SEGMENTS), key=segment_number) if path.name not in covered]


def last_step(path: Path) -> int:
    """Return the last step that *path* may hold, as its name says: only a Parquet's does."""
    digits = path.name.removeprefix("steps-").split(".")[0].rpartition("-")[2]
    return int(digits) if path.suffix == ".parquet" and digits.isdigit() else NO_STEP


def segment_number(path: Path) -> int:
    """Return the number in a segment's name, 0 if it has none."""
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0


def replaced_segments(parquet: Path) -> list[str]:
    """Return the names of the segments whose spans are in *parquet*."""
    try:
        metadata = pq.read_schema(parquet).metadata or {}
    except UNREADABLE:
        return []
    names = metadata.get(b"segments", b"").decode()
    return names.split(",") if names else []


def newest_segment(path: Path) -> int:
    """Return the number of the latest segment whose spans are in *path*."""
    names = replaced_segments(path) if path.suffix == ".parquet" else [path.name]
    return max((segment_number(Path(name)) for name in names), default=0)

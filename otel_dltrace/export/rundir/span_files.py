"""The files of a host's folder that hold spans: segments, and the Parquets that replace them (contract 7).

Beside them a file for each process that stands still: what it has open, which is in no other file yet.
"""

import re
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from otel_dltrace.export.rundir.arrow_files import UNREADABLE, arrow_name, stream_batches
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.plan import Window

SEGMENTS = "spans-*.arrows"
PARQUETS = "steps-*.parquet"
OPEN = "open-*.arrows"
NAMES = "descriptors.arrows"
"""What describes the spans in all of them."""
_NAME = re.compile(r"steps-([0-9]{1,10})-([0-9]{1,10})[.0-9]*\.parquet")


class SpanFile(NamedTuple):
    """A file of spans as it was listed; *held* keeps a segment that a drain may replace before it is read."""

    path: Path
    held: pa.NativeFile | None

    @property
    def source(self) -> Path:
        """Where to read it, any number of times, as long as this object is there."""
        opened = Path(f"/proc/self/fd/{self.held.fileno()}") if self.held is not None else self.path
        return opened if opened.exists() else self.path


def span_files(folder: Path) -> list[Path]:
    """Return the files that hold a host's spans, each span in one: a Parquet replaces its segments."""
    segments = sorted(folder.glob(SEGMENTS), key=segment_number)  # first: one that goes now is in a Parquet by then
    parquets = sorted(folder.glob(PARQUETS))
    covered = {name for path in parquets for name in replaced_segments(path)}
    return parquets + [path for path in segments if path.name not in covered]


def lasting_files(folder: Path) -> list[str]:
    """Return the names of those files of a host that never go again, but for a Parquet that names them.

    A segment without a row goes when the others become Parquet.
    """
    files = span_files(folder)
    return [path.name for path in files if path.suffix == ".parquet" or any(True for _ in stream_batches(path))]


def gone_files(folder: Path, left: list[str]) -> list[str]:
    """Return those names of *left*, once `lasting_files`, whose spans are not in *folder* any more."""
    try:
        there = {path.name for path in folder.iterdir()}  # first: a segment that goes now is in a Parquet by then
    except FileNotFoundError:
        return []  # somebody removes the run
    if missing := [name for name in left if name not in there]:
        there.update(name for path in folder.glob(PARQUETS) for name in replaced_segments(path))
    return [name for name in missing if name not in there]


def held_files(folder: Path) -> list[SpanFile]:
    """Return `span_files` for who reads beside a drain, which compacts: all that there was at one moment."""
    held = {path: _held(path) for path in folder.glob(SEGMENTS)}
    return [SpanFile(path, held.get(path)) for path in span_files(folder) if path in held or path.suffix == ".parquet"]


def _held(path: Path) -> pa.NativeFile | None:
    try:
        return pa.memory_map(arrow_name(path))  # an OSFile has no fileno() before pyarrow 25
    except OSError:
        return None


def last_step(path: Path) -> int:
    """Return the last step that *path* may hold, as its name says: only a Parquet's does."""
    named = _NAME.fullmatch(path.name)
    return int(named[2]) if named else NO_STEP


def may_hold(path: Path, steps: Window) -> bool:
    """Return whether *path* may hold spans of *steps*, as far as its name says."""
    named = _NAME.fullmatch(path.name)
    return named is None or steps.overlaps(int(named[1]), int(named[2]))


def segment_number(path: Path) -> int:
    """Return the number in a segment's name, 0 if it has none."""
    digits = path.stem.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0


def replaced_segments(parquet: Path) -> list[str]:
    """Return the names of the segments whose spans are in *parquet*."""
    try:
        with pa.OSFile(arrow_name(parquet)) as file:
            metadata = pq.read_schema(file).metadata or {}
        names = metadata.get(b"segments", b"").decode()
    except UNREADABLE:
        return []
    return names.split(",") if names else []


def newest_segment(path: Path) -> int:
    """Return the number of the latest segment whose spans are in *path*."""
    names = replaced_segments(path) if path.suffix == ".parquet" else [path.name]
    return max((segment_number(Path(name)) for name in names), default=0)

"""Which file a Chrome trace goes to: names, one writer each, the next when one is full, how many stay."""

import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

from otel_dltrace.export.chrome.arrows import Line
from otel_dltrace.export.chrome.live import LiveTrace, TakenError, live_trace

DEFAULT_FILE = "trace-{service}-{pid}.json"
DEFAULT_MAX_BYTES = 64 << 20
_DAY = 86_400_000_000_000
_TAIL = b"\n]}\n"
_SUFFIXES = (".json.gz", ".json", ".gz")
_logger = logging.getLogger(__name__)


def base_of(first: int) -> int:
    """Return the Unix ns to draw as 0 in a trace one of whose first spans begins at *first*: a midnight before it.

    It is a day or two earlier. So the files of several processes have the same zero, and a span that is a day
    older still comes after it.
    """
    return max(0, first // _DAY - 1) * _DAY


class Rotation:
    """The files of one exporter, one after the other.

    Args:
        file: The name of the first, with ``{service}`` and ``{pid}``.
        max_bytes: Bytes of JSON after which the next begins, 0 for never.
        max_files: How many stay, 0 for all.
        forked: Whether this process was forked from one that may write a file of that name.
    """

    def __init__(self, file: str, max_bytes: int, max_files: int, forked: bool) -> None:
        self.name = file
        self._file, self._max_bytes, self._max_files = file, max_bytes, max_files
        self._forked = forked
        self._base, self._service = 0, ""
        self._number = 0
        self._first: LiveTrace | None = None
        self._current: LiveTrace | None = None
        self._written: list[Path] = []
        self._named: set[tuple[int, int]] = set()

    def begin(self, base: int, service: str) -> None:
        """Say what the files are about."""
        self._base, self._service = base, service

    def make_room(self, size: int) -> bool:
        """Have a file open that takes *size* more bytes of events; return whether it is a new one.

        Raises:
            OSError: None can be made.
        """
        current = self._current
        if current is not None:
            if not self._max_bytes or not current.events or current.size + size <= self._max_bytes:
                return False
            self._end(current)
            self._number += 1
        self._current = self._opened()
        self._first = self._first or self._current
        self._remove_old(self._current.path)
        return True

    def lacks(self, pid: int, tid: int) -> bool:
        """Return whether the file has not yet the name of a lane (of a process: lane 0)."""
        return (pid, tid) not in self._named

    def append(self, lines: Sequence[Line]) -> None:
        """Write *lines*.

        Raises:
            OSError: There is no room; nothing was written.
        """
        assert self._current is not None
        self._current.append([line.text for line in lines])
        for pid, tid, _ in lines:
            self._named |= {(pid, 0), (pid, tid)}

    def close(self) -> None:
        """End the current file, and leave the name to others."""
        if self._current is not None:
            self._end(self._current)
        self.abandon()

    def abandon(self) -> None:
        """Let go of the files as they are: of those of the process that this one was forked from."""
        for trace in (self._first, self._current):
            if trace is not None:
                trace.abandon()

    def _end(self, current: LiveTrace) -> None:
        """End the current file. The lock of the first stays: who has it has the names of all that follow."""
        self._current = None
        self._named = set()
        current.finish()
        if current is not self._first:
            current.abandon()

    def _opened(self) -> LiveTrace:
        first = part_path(self._first.path, self._number) if self._first else self._path()
        for path in _others(first, self._forked and not self._first):
            self.name = str(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                trace = live_trace(path, self._head(), _TAIL)
            except TakenError:
                continue
            if path != first and not self._forked:
                _logger.warning("%s is being written by another exporter; the spans of this one go to %s", first, path)
            return trace
        raise AssertionError

    def _path(self) -> Path:
        """Return the name that the first file should have."""
        service = re.sub(r"[^\w.-]+", "_", self._service, flags=re.ASCII)[:100].strip(".") or "process"
        path = Path(self._file.replace("{service}", service).replace("{pid}", str(os.getpid())))
        # A link, for one of standard output's names, is not replaced itself.
        return Path(os.path.realpath(path))

    def _head(self) -> bytes:
        about = {
            "writer": "otel_dltrace",
            "base_unix_ns": str(self._base),
            "service": self._service,
            "part": self._number,
        }
        # "ns", since chrome://tracing nests slices to the us under "ms": what is shorter lands in its neighbour.
        text = f'{{"displayTimeUnit":"ns","otherData":{json.dumps(about)},"traceEvents":['
        return text.encode("utf-8", "replace")

    def _remove_old(self, path: Path) -> None:
        self._written.append(path)
        if self._max_files:
            for old in self._written[: -self._max_files]:
                old.unlink(missing_ok=True)
            del self._written[: -self._max_files]


def _others(path: Path, forked: bool) -> Iterator[Path]:
    """Yield *path*, and the names to take where others have it."""
    own = str(os.getpid())
    path_with_pid = path if own in path.name else _inserted(path, own)
    if not forked:
        yield path
    if forked or path_with_pid != path:
        yield path_with_pid
    for number in count(2):
        yield _inserted(path_with_pid, f"{number}", "-")


def part_path(path: Path, number: int) -> Path:
    """Return the name of file *number*, from 0, of the trace that begins in *path*: after t.json comes t.1.json."""
    return _inserted(path, str(number)) if number else path


def _inserted(path: Path, text: str, before: str = ".") -> Path:
    """Return *path* with *text* put before its suffix."""
    name = path.name
    known = next((suffix for suffix in _SUFFIXES if name.lower().endswith(suffix)), path.suffix)
    at = len(name) - len(known)
    return path.with_name(f"{name[:at]}{before}{text}{name[at:]}")

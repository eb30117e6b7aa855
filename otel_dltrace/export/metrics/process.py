"""What each rank's process uses, as ``/proc`` says.

psutil would open the same files for one value at a time, and knows no page faults: this takes a tenth of its time.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic

from otel_dltrace.export.metrics.rates import Shares
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv
from otel_dltrace.model.metric_batch import Point
from otel_dltrace.model.metrics import pairs_text

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# In /proc/<pid>/stat, counted from the field after the name (proc(5)).
_MINOR, _MAJOR, _USER, _SYSTEM, _THREADS, _PAGES = 7, 9, 11, 12, 17, 21
_MOST = 8192
_SWITCHES = {b"\nvoluntary_ctxt_switches:": "voluntary", b"\nnonvoluntary_ctxt_switches:": "involuntary"}
_BYTES = {b"\nread_bytes:": "read", b"\nwrite_bytes:": "write"}


class ProcessSource:
    """Samples one process until it is gone.

    Its files are opened with the first sample, by the thread that takes it and closes them. They stay open: that is
    quicker, and they are never another process's that gets the same pid.

    Args:
        pid: Its pid, in our namespace.
        rank: The rank that its points get.
        cpus: How many CPUs there are to use.
        role: What it is, where it is no worker: servers have ranks of their own.
        proc: Where ``/proc`` is.
    """

    def __init__(self, pid: int, rank: int, cpus: float, role: str = "worker", proc: Path = Path("/proc")) -> None:
        self.rank, self.role = rank, role
        self._cpus, self._folder = cpus, proc / str(pid)
        self._of = () if role == "worker" else ((semconv.DL_ROLE, role),)
        self._shares = Shares()
        self._files: dict[str, int] | None = None

    def sample(self) -> Iterator[Point]:
        """Yield the values of this moment; nothing once the process is gone."""
        if self._files is None:
            self._files = {name: _open(self._folder / name) for name in ("stat", "status", "io")}
        fields = self._read("stat").rpartition(b")")[2].split()
        if not fields or fields[0] == b"Z":
            return
        spent = {"user": int(fields[_USER]) / _TICK, "system": int(fields[_SYSTEM]) / _TICK}
        for mode, seconds in spent.items():
            yield self._point(m.PROCESS_CPU_TIME, seconds, (m.CPU_MODE, mode))
        for mode, share in self._shares.since_last(monotonic(), spent, self._cpus).items():
            yield self._point(m.PROCESS_CPU_UTILIZATION, share, (m.CPU_MODE, mode))
        yield self._point(m.PROCESS_MEMORY_USAGE, int(fields[_PAGES]) * _PAGE)
        yield self._point(m.PROCESS_THREAD_COUNT, int(fields[_THREADS]))
        yield self._point(m.PROCESS_PAGING_FAULTS, int(fields[_MINOR]), (m.FAULT_TYPE, "minor"))
        yield self._point(m.PROCESS_PAGING_FAULTS, int(fields[_MAJOR]), (m.FAULT_TYPE, "major"))
        for kind, value in _numbers(self._read("status"), _SWITCHES):
            yield self._point(m.PROCESS_CONTEXT_SWITCHES, value, (m.SWITCH_TYPE, kind))
        for direction, value in _numbers(self._read("io"), _BYTES):
            yield self._point(m.PROCESS_DISK_IO, value, (m.DISK_DIRECTION, direction))

    def _point(self, metric: str, value: float, *pairs: tuple[str, str]) -> Point:
        return Point(metric, value, pairs_text(*self._of, *pairs), self.rank)

    def _read(self, name: str) -> bytes:
        """Return what a file says now; nothing where it is missing, not for us, or the process gone."""
        file = self._files.get(name, -1) if self._files else -1
        try:
            return os.pread(file, _MOST, 0) if file >= 0 else b""
        except OSError:  # ``io`` may be opened by those who may not read it
            return b""

    def close(self) -> None:
        """Let go of its files, for good."""
        files, self._files = self._files or {}, {}
        for file in files.values():
            if file >= 0:
                os.close(file)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _numbers(text: bytes, names: Mapping[bytes, str]) -> Iterator[tuple[str, int]]:
    """Yield what each of the lines *names* stands for, and its number; lines that are not there are left out."""
    for name, meaning in names.items():
        begin = text.find(name)
        if begin >= 0:
            yield meaning, int(text[begin + len(name) : text.find(b"\n", begin + len(name))])

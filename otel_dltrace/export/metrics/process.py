"""What each rank's process uses, as ``/proc`` says.

psutil would read the same files one value at a time, and knows no page faults: three reads take a quarter of its time.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

from otel_dltrace.export.metrics.rates import Shares
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv
from otel_dltrace.model.metric_batch import Point
from otel_dltrace.model.metrics import attributes_text

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
# In /proc/<pid>/stat, counted from the field after the name (proc(5)).
_MINOR, _MAJOR, _USER, _SYSTEM, _THREADS, _STARTED, _PAGES = 7, 9, 11, 12, 17, 19, 21
_LINES = {"voluntary_ctxt_switches": "voluntary", "nonvoluntary_ctxt_switches": "involuntary"}


def pid_namespace() -> int:
    """Return the inode of our pid namespace: pids of another mean nothing here; 0 where nobody says."""
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0


class ProcessSource:
    """Samples one process until it is gone.

    Args:
        pid: Its pid, in our namespace.
        rank: The rank that its points get.
        cpus: How many CPUs there are to use.
        role: What it is, where it is no worker: servers have ranks of their own.
        proc: Where ``/proc`` is.
    """

    def __init__(self, pid: int, rank: int, cpus: float, role: str = "worker", proc: Path = Path("/proc")) -> None:
        self.rank = rank
        self._cpus, self._folder = cpus, proc / str(pid)
        self._of = {} if role == "worker" else {semconv.DL_ROLE: role}
        self._shares = Shares()
        self._started = ""
        self._texts: dict[tuple[str, str], str] = {}

    def sample(self) -> Iterator[Point]:
        """Yield the values of this moment; nothing once the process is gone, though another may have its pid."""
        try:
            fields = (self._folder / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return
        self._started = self._started or fields[_STARTED]
        if fields[_STARTED] != self._started or fields[0] == "Z":
            return
        spent = {"user": int(fields[_USER]) / _TICK, "system": int(fields[_SYSTEM]) / _TICK}
        for mode, seconds in spent.items():
            yield self._point(m.PROCESS_CPU_TIME, seconds, m.CPU_MODE, mode)
        for mode, share in self._shares.since_last(monotonic(), spent, self._cpus).items():
            yield self._point(m.PROCESS_CPU_UTILIZATION, share, m.CPU_MODE, mode)
        yield self._point(m.PROCESS_MEMORY_USAGE, int(fields[_PAGES]) * _PAGE)
        yield self._point(m.PROCESS_THREAD_COUNT, int(fields[_THREADS]))
        yield self._point(m.PROCESS_PAGING_FAULTS, int(fields[_MINOR]), m.FAULT_TYPE, "minor")
        yield self._point(m.PROCESS_PAGING_FAULTS, int(fields[_MAJOR]), m.FAULT_TYPE, "major")
        for name, value in _colons(self._folder / "status"):
            if name in _LINES:
                yield self._point(m.PROCESS_CONTEXT_SWITCHES, int(value), m.SWITCH_TYPE, _LINES[name])
        for name, value in _colons(self._folder / "io"):
            if name in ("read_bytes", "write_bytes"):
                yield self._point(m.PROCESS_DISK_IO, int(value), m.DISK_DIRECTION, name.removesuffix("_bytes"))

    def _point(self, metric: str, value: float, attribute: str = "", which: str = "") -> Point:
        text = self._texts.get((attribute, which))
        if text is None:
            text = self._texts[attribute, which] = attributes_text(self._of | ({attribute: which} if attribute else {}))
        return Point(metric, value, text, self.rank)


def _colons(file: Path) -> Iterator[tuple[str, str]]:
    """Yield names and values of lines ``name: value``; nothing where the file is missing or not for us."""
    try:
        text = file.read_text()
    except OSError:
        return
    for line in text.splitlines():
        name, _, value = line.partition(":")
        yield name, value.strip()

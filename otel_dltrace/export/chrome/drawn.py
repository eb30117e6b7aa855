"""The processes of a Chrome trace as they are drawn: names, numbers (pids), and the zeros of their times."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_dltrace.export.chrome.lanes import Lanes
from otel_dltrace.export.chrome.layout import Layout, lay_out
from otel_dltrace.export.chrome.marks import (
    FIRST_FREE_PID,
    UNKNOWN_ORDER,
    free_pid,
    lane_metadata,
    process_metadata,
    process_names,
    rank_pid,
)
from otel_dltrace.model import semconv as s
from otel_dltrace.model.attributes import Value, resource_attributes
from otel_dltrace.model.metric_batch import HOST
from otel_dltrace.model.spans import Process, SpanBatch

MARGIN = 86_400_000_000_000
"""The first batch begins a day after the trace's zero: another rank may be earlier, and Perfetto drops what is < 0."""
_EXACT = 1 << 53
"""ns after zero that a double still tells from each other: what is later would stick out of its parent."""
_EARLIEST = -(1 << 62)
"""ns: a start before it is damaged, and the others are not drawn from there on."""


@dataclass
class Drawn:
    """One process of the trace; its times are drawn as ns after *base* (Unix ns)."""

    pid: int
    base: int
    name: str = ""
    labels: tuple[str, ...] = ()
    metadata: Sequence[str] = ()
    lanes: Lanes = field(init=False)
    lane_names: dict[int, tuple[str, int]] = field(default_factory=dict)
    uncertainty: int = 0
    os_pid: int = 0
    rank: int = HOST
    wall: int = 0
    machine: tuple[str, str] = ("", "")
    """Boot and host: who has these in common shares a monotonic clock."""

    def __post_init__(self) -> None:
        """Begin with empty lanes."""
        self.lanes = Lanes(pid=self.pid)

    @property
    def shift(self) -> int:
        """What to add to its times (monotonic ns) for those of the trace."""
        return self.wall - self.base

    def learn(self, process: Process) -> bool:
        """Take over what is known of *process* by now; return whether it is to be named, or named anew."""
        self.rank = process.bind.rank if process.bind and process.bind.role == "worker" else HOST
        self.wall = process.anchor.offset
        self.machine = (process.boot_id, process.host)
        self.uncertainty = max(self.uncertainty, process.anchor.uncertainty)
        name, label, order = _names(process)
        if name == self.name and label in self.labels:
            return False
        # One process is in several generations where a process group is made anew.
        self.labels = (*self.labels, label) if name == self.name else (label,)
        self.name, self.os_pid = name, process.pid
        self.metadata = list(process_metadata(self.pid, name, ", ".join(self.labels), order))
        return True

    def lay_out(self, batch: SpanBatch) -> Layout:
        """Return where the rows of *batch* are drawn, on lanes whose names are known from then on."""
        before = self.lanes.counts()
        layout = lay_out(batch, self.lanes, self.base)
        self.lane_names.update({tid: (name, place) for tid, name, place in self.lanes.names(before)})
        return layout

    def names(self, tids: Sequence[int], named: Container[tuple[int, int]]) -> list[str]:
        """Return what names it and its lanes *tids*, but for those that are *named*."""
        new = [tid for tid in tids if (self.pid, tid) not in named]
        lines = list(self.metadata) if (self.pid, 0) not in named else []
        return lines + [line for tid in new for line in lane_metadata(self.pid, tid, *self.lane_names[tid])]

    def summary(self, base: int, spans: int) -> dict[str, Any]:
        """Return what is told of it; its own zero too, if that is not the *base* of the trace."""
        return {
            "pid": self.pid,
            "name": self.name,
            "process.pid": self.os_pid,
            "clock_uncertainty_ns": self.uncertainty,
            "spans": spans,
            **({"base_unix_ns": str(self.base)} if self.base != base else {}),
        }


class Processes:
    """The processes of one trace.

    Attributes:
        by_nonce: In the order in which they came.
        job: What is told of the job, once one of them knows it.
    """

    def __init__(self) -> None:
        self.by_nonce: dict[int, Drawn] = {}
        self.job: dict[str, Any] = {}
        self._pids: set[int] = set()
        self._bases: list[int] = []

    def of(self, batch: SpanBatch) -> Drawn:
        """Return the process of *batch*, which has a number and a zero, but no name when it is new."""
        process = batch.process
        if process.nonce not in self.by_nonce:
            rank = resource_attributes(process) if process.bind is not None else {}
            self.by_nonce[process.nonce] = Drawn(self._taken(rank_pid(rank, self._pids)), self._base_for(_first(batch)))
        if process.bind is not None and not self.job:
            bind = process.bind
            self.job = {"job": bind.job, "job_name": bind.job_name, "generation": bind.generation}
        return self.by_nonce[process.nonce]

    def on(self, machine: tuple[str, str]) -> list[Drawn]:
        """Return those that share the clock of *machine*."""
        return [drawn for drawn in self.by_nonce.values() if drawn.machine == machine]

    def free_pid(self) -> int:
        """Return a number for what is no process, taken from then on."""
        return self._taken(free_pid(FIRST_FREE_PID, self._pids))

    def _taken(self, pid: int) -> int:
        self._pids.add(pid)
        return pid

    @property
    def base(self) -> int:
        """The zero of the trace, in Unix ns; 0 while nothing is in it."""
        return self._bases[0] if self._bases else 0

    def base_from(self, first: int) -> int:
        """Return the zero of the trace, which begins at *first* (Unix ns) if nothing is in it yet."""
        return self._bases[0] if self._bases else self._base_for(first)

    def _base_for(self, first: int) -> int:
        """Return the zero of a process that begins at *first*, in Unix ns.

        That of one whose clock nobody knows, or of a run of another year, is not the trace's: viewers drop what is
        before 0, and what is too far behind it loses its ns.
        """
        known = [base for base in self._bases if 0 <= first - base < _EXACT]
        if not known:
            self._bases.append(first - MARGIN)
        return known[0] if known else self._bases[-1]


def _first(batch: SpanBatch) -> int:
    """Return when *batch* begins, in Unix ns."""
    starts = batch["start"].compress(batch["start"] > _EARLIEST)
    return batch.wall + (int(starts.min()) if len(starts) else 0)


def _names(process: Process) -> tuple[str, str, int]:
    """Return a process's name, the label beside it, and its place among the others."""
    bind = process.bind
    if bind is None:
        return f"pid {process.pid} ({process.host})", "rank not known", UNKNOWN_ORDER
    rank: dict[str, Value] = {s.DL_ROLE: bind.role, s.DL_RANK: bind.rank, s.DL_WORLD: bind.world}
    name, order = process_names(rank, process.host)
    return name, f"generation {bind.generation_number}", order

"""Write spans as a Chrome trace, which Perfetto and chrome://tracing show: a process per rank, lanes below."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from otel_dltrace.export.chrome.counters import track_chunks, tracks
from otel_dltrace.export.chrome.events import Chunk, counter_chunks, span_chunks, step_marks
from otel_dltrace.export.chrome.flows import Flows
from otel_dltrace.export.chrome.lanes import Lanes
from otel_dltrace.export.chrome.layout import lay_out
from otel_dltrace.export.chrome.marks import (
    FIRST_FREE_PID,
    HOST_ORDER,
    UNKNOWN_ORDER,
    free_pid,
    lane_metadata,
    process_metadata,
    process_names,
    rank_pid,
)
from otel_dltrace.export.chrome.notes import Note, note_lines
from otel_dltrace.export.files import open_whole
from otel_dltrace.model import semconv as s
from otel_dltrace.model.attributes import Value, resource_attributes
from otel_dltrace.model.metric_batch import HOST, MetricBatch
from otel_dltrace.model.spans import Process, SpanBatch

MARGIN = 86_400_000_000_000
"""The first batch begins a day after the trace's zero: another rank may be earlier, and Perfetto drops what is < 0."""


def write_chrome(
    batches: Iterable[SpanBatch],
    path: Path,
    progress: Callable[[int], None] | None = None,
    metrics: Iterable[MetricBatch] = (),
    notes: Sequence[Note] = (),
) -> int:
    """Write *batches* to *path* as Chrome trace JSON, gzipped if it ends in ``.gz``; return the number of events.

    Batches are drawn as they come, each forgotten before the next is asked for; those of one process
    come in the order of their steps. The file appears when it is complete, or not at all.

    Times are us, exact to the ns, after a base that ``otherData.base_unix_ns`` names: Unix time in us
    would leave a double, which is what viewers compute in, only a quarter of a us.

    Args:
        batches: The spans, each batch of one process.
        path: The file; its folder exists.
        progress: Called with the number of rows done since its last call.
        metrics: What to draw as counters, each batch of one host; asked for after the spans.
        notes: Remarks on some of these spans' processes.
    """
    with open_whole(path) as out, ExitStack() as files:
        trace = _Trace(out, Flows(files))
        for batch in batches:
            trace.add(batch, progress or _ignore)
        for metric_batch in metrics:
            trace.add_metrics(metric_batch, progress or _ignore)
        trace.add_notes(notes)
        trace.close()
    return trace.events


def _ignore(_: int) -> None:
    """Show no progress."""


@dataclass
class _Drawn:
    """One process of the trace."""

    pid: int
    name: str = ""
    lanes: Lanes = field(default_factory=Lanes)
    uncertainty: int = 0
    os_pid: int = 0
    spans: int = 0
    base: int | None = None
    rank: int = HOST
    wall: int = 0
    machine: tuple[str, str] = ("", "")
    """Boot and host: who has these in common shares a monotonic clock."""

    def summary(self, base: int | None) -> dict[str, Any]:
        """Return what is told of it; its own zero too, if that is not the *base* of the trace."""
        return {
            "pid": self.pid,
            "name": self.name,
            "process.pid": self.os_pid,
            "clock_uncertainty_ns": self.uncertainty,
            "spans": self.spans,
            **({"base_unix_ns": str(self.base)} if self.base != base else {}),
        }


class _Trace:
    """The file being written, and the little that must be remembered of what was drawn."""

    def __init__(self, out: BufferedIOBase, flows: Flows) -> None:
        self.out = out
        self.events = 0
        self._flows = flows
        self._base: int | None = None
        self._processes: dict[int, _Drawn] = {}
        self._hosts: set[int] = set()
        self._job: dict[str, Any] = {}
        # "ns", since chrome://tracing nests slices to the us under "ms": what is shorter lands in its neighbour.
        self.out.write(b'{"displayTimeUnit":"ns","traceEvents":[')

    def add(self, batch: SpanBatch, progress: Callable[[int], None]) -> None:
        """Write the events of one batch."""
        if not len(batch):
            return
        first = int(batch["start"].min()) + batch.wall
        if self._base is None:
            self._base = first - MARGIN
        drawn = self._process(batch.process)
        if drawn.base is None:
            # A process whose clock nobody knows would be far before 0, where viewers drop it.
            drawn.base = self._base if first >= self._base else first - MARGIN
        before = drawn.lanes.counts()
        layout = lay_out(batch, drawn.lanes, drawn.base)
        for lane in drawn.lanes.names(before):
            self._write_lines(lane_metadata(drawn.pid, *lane))
        for chunk in span_chunks(batch, layout, drawn.pid):
            self._write_chunk(chunk, progress)
            drawn.spans += chunk.events
        if drawn.lanes.further:
            marks = step_marks(batch, layout, drawn.pid)
            self._write(marks.text, marks.events)
        for chunk in counter_chunks(batch, drawn.base, drawn.pid):
            self._write_chunk(chunk, progress)

    def add_metrics(self, batch: MetricBatch, progress: Callable[[int], None]) -> None:
        """Write one host's metrics as counters, on the clocks of the spans of that host."""
        if not len(batch):
            return
        here = [one for one in self._processes.values() if one.machine == (batch.boot_id, batch.host)]
        wall = here[0].wall if here else batch.wall
        if self._base is None:
            self._base = int(batch.time.min()) + wall - MARGIN
        base = here[0].base if here and here[0].base is not None else self._base
        ranks = {one.rank: (one.pid, one.wall - (one.base or 0)) for one in here if one.rank != HOST}
        host: tuple[int, int] | None = None
        for track in tracks(batch):
            place = ranks.get(track.rank)
            if place is None:
                place = host = host or (self._host(batch.host), wall - base)
            pid, shift = place
            for chunk in track_chunks(track, shift, pid):
                self._write_chunk(chunk, progress)

    def add_notes(self, notes: Sequence[Note]) -> None:
        """Write remarks below the lanes of the processes that they are about."""
        for nonce, drawn in self._processes.items():
            mine = [note for note in notes if note.nonce == nonce]
            if mine:
                self._write_lines(note_lines(mine, drawn.wall - (drawn.base or 0), drawn.pid))

    def _host(self, name: str) -> int:
        """Return the process that stands for a host; name it."""
        pid = free_pid(FIRST_FREE_PID, {drawn.pid for drawn in self._processes.values()} | self._hosts)
        self._hosts.add(pid)
        self._write_lines(process_metadata(pid, f"host {name}", "metrics", HOST_ORDER))
        return pid

    def close(self) -> None:
        """Write what needs all ranks, and what describes the whole."""
        for text, events in self._flows.lines():
            self._write(text, events)
        about = {
            "writer": "otel_dltrace",
            **self._job,
            "base_unix_ns": str(self._base or 0),
            "processes": [drawn.summary(self._base) for drawn in self._processes.values()],
        }
        self.out.write(b'\n],"otherData":' + json.dumps(about).encode() + b"}\n")

    def _write_chunk(self, chunk: Chunk, progress: Callable[[int], None]) -> None:
        self._write(chunk.text, chunk.events)
        self._flows.add(chunk.flows)
        progress(chunk.events)

    def _write_lines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self._write(b",\n" + line.encode(), 1)

    def _write(self, text: bytes, events: int) -> None:
        """Write *text*, events that begin with a comma each; the first of all has none."""
        self.out.write(text if self.events else text[1:])
        self.events += events

    def _process(self, process: Process) -> _Drawn:
        """Return *process* as it is drawn; name it when it is new, and again when its rank became known."""
        drawn = self._processes.get(process.nonce)
        rank = resource_attributes(process) if process.bind is not None else {}
        if drawn is None:
            used = {drawn.pid for drawn in self._processes.values()}
            drawn = self._processes[process.nonce] = _Drawn(rank_pid(rank, used))
        name, label, order = _names(process)
        if name != drawn.name:
            drawn.name, drawn.os_pid = name, process.pid
            self._write_lines(process_metadata(drawn.pid, name, label, order))
        drawn.rank = process.bind.rank if process.bind and process.bind.role == "worker" else HOST
        drawn.wall = process.anchor.offset
        drawn.machine = (process.boot_id, process.host)
        drawn.uncertainty = max(drawn.uncertainty, process.anchor.uncertainty)
        if process.bind is not None and not self._job:
            bind = process.bind
            self._job = {"job": bind.job, "job_name": bind.job_name, "generation": bind.generation}
        return drawn


def _names(process: Process) -> tuple[str, str, int]:
    """Return a process's name, the label beside it, and its place among the others."""
    bind = process.bind
    if bind is None:
        return f"pid {process.pid} ({process.host})", "rank not known", UNKNOWN_ORDER
    rank: dict[str, Value] = {s.DL_ROLE: bind.role, s.DL_RANK: bind.rank, s.DL_WORLD: bind.world}
    name, order = process_names(rank, process.host)
    return name, f"generation {bind.generation_number}", order

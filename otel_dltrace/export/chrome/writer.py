"""Write spans as a Chrome trace, which Perfetto and chrome://tracing show: a process per rank, lanes below."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from otel_dltrace.export.chrome.counters import HostTracks, track_chunks
from otel_dltrace.export.chrome.events import WIDEST, Chunk, counter_chunks, span_chunks, step_marks
from otel_dltrace.export.chrome.lanes import Lanes
from otel_dltrace.export.chrome.layout import lay_out
from otel_dltrace.export.chrome.marks import (
    FIRST_FREE_PID,
    UNKNOWN_ORDER,
    free_pid,
    lane_metadata,
    process_metadata,
    process_names,
    rank_pid,
)
from otel_dltrace.export.chrome.notes import Note, note_lines
from otel_dltrace.export.chrome.rotation import part_path
from otel_dltrace.export.chrome.trace_file import TraceFile
from otel_dltrace.model import semconv as s
from otel_dltrace.model.attributes import Value, resource_attributes
from otel_dltrace.model.metric_batch import HOST, MetricBatch
from otel_dltrace.model.spans import Process, SpanBatch

MARGIN = 86_400_000_000_000
"""The first batch begins a day after the trace's zero: another rank may be earlier, and Perfetto drops what is < 0."""
_EXACT = 1 << 53
"""ns after zero that a double still tells from each other: what is later would stick out of its parent."""
_EARLIEST = -(1 << 62)
"""ns: a start before it is damaged, and the others are not drawn from there on."""
_FOREVER = np.iinfo(np.int64).max
_CHUNKS_A_FILE = 8
"""Into how many pieces at least the text of a file comes: it is not cut more finely."""
_SUMMARY_BYTES = 300
"""What the end of a file says of a process, about."""
_SAMPLE_BYTES = 160
"""The text of a counter's event, about; counters are written after the spans, so room is kept for them."""


def write_chrome(
    batches: Iterable[SpanBatch],
    path: Path,
    progress: Callable[[int], None] | None = None,
    metrics: Iterable[MetricBatch] = (),
    notes: Sequence[Note] = (),
    max_bytes: int = 0,
    wrote: Callable[[Path], None] | None = None,
) -> int:
    """Write *batches* to *path* as Chrome trace JSON, gzipped if it ends in ``.gz``; return the number of events.

    Batches are drawn as they come, each forgotten before the next is asked for; those of one process
    come in the order of their steps. A file appears when it is complete, or not at all.

    Times are us, exact to the ns, after a base that ``otherData.base_unix_ns`` names: Unix time in us
    would leave a double, which is what viewers compute in, only a quarter of a us.

    Args:
        batches: The spans, each batch of one process.
        path: The file; its folder exists.
        progress: Called with the number of rows done since its last call.
        metrics: What to draw as counters, each batch of one host; asked for after the spans, unless there is
            more than one file.
        notes: Remarks on some of these spans' processes.
        max_bytes: Bytes of JSON (before gzip) after which the next file begins, ``trace.1.json`` after
            ``trace.json``; 0 for never. Each has every span that it has whole, with all that it needs; an arrow
            joins slices of one file. Counters are in each file that has spans of their time.
        wrote: Called with each file once it has its name.
    """
    with ExitStack() as files:
        trace = _Trace(path, files, max_bytes, metrics, notes, wrote or _ignore)
        for batch in batches:
            trace.add(batch, progress or _ignore)
        trace.close(progress or _ignore)
    return trace.events


def _ignore(_: object) -> None:
    """Show no progress."""


@dataclass
class _Drawn:
    """One process of the trace."""

    pid: int
    name: str = ""
    labels: tuple[str, ...] = ()
    metadata: Sequence[str] = ()
    lanes: Lanes = field(default_factory=Lanes)
    lane_names: dict[int, tuple[str, int]] = field(default_factory=dict)
    uncertainty: int = 0
    os_pid: int = 0
    base: int | None = None
    rank: int = HOST
    wall: int = 0
    machine: tuple[str, str] = ("", "")
    """Boot and host: who has these in common shares a monotonic clock."""

    @property
    def shift(self) -> int:
        """What to add to its times (monotonic ns) for those of the trace."""
        return self.wall - (self.base or 0)

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


class _Trace:
    """The files being written, and the little that must be remembered of what was drawn."""

    def __init__(
        self,
        path: Path,
        files: ExitStack,
        max_bytes: int,
        metrics: Iterable[MetricBatch],
        notes: Sequence[Note],
        wrote: Callable[[Path], None],
    ) -> None:
        self.events = 0
        self._path, self._files, self._max_bytes, self._wrote = path, files, max_bytes, wrote
        self._metrics, self._notes = metrics, list(notes)
        self._widest = min(WIDEST, max_bytes // _CHUNKS_A_FILE) if max_bytes else WIDEST
        self._number = 0
        self._file = TraceFile(path, files)
        self._bases: list[int] = []
        self._processes: dict[int, _Drawn] = {}
        self._hosts: list[HostTracks] | None = None
        self._shown_until = 0
        self._job: dict[str, Any] = {}

    def add(self, batch: SpanBatch, progress: Callable[[int], None]) -> None:
        """Write the events of one batch."""
        if not len(batch):
            return
        starts = batch["start"].compress(batch["start"] > _EARLIEST)
        first = batch.wall + (int(starts.min()) if len(starts) else 0)
        drawn = self._process(batch.process)
        if drawn.base is None:
            drawn.base = self._base_for(first)
        before = drawn.lanes.counts()
        layout = lay_out(batch, drawn.lanes, drawn.base)
        drawn.lane_names.update({tid: (name, place) for tid, name, place in drawn.lanes.names(before)})
        for chunk in span_chunks(batch, layout, drawn.pid, self._widest):
            self._make_room(drawn, chunk, progress)
            self._file.write_spans(chunk, drawn.pid)
            progress(chunk.events)
        if drawn.lanes.further:
            marks = step_marks(batch, layout, drawn.pid)
            self._make_room(drawn, marks, progress)
            self._file.write(marks)
        for chunk in counter_chunks(batch, drawn.base, drawn.pid, self._widest):
            self._make_room(drawn, chunk, progress)
            self._file.write(chunk)
            progress(chunk.events)

    def _base_for(self, first: int) -> int:
        """Return the zero of a process that begins at *first*, in Unix ns.

        That of one whose clock nobody knows, or of a run of another year, is not the trace's: viewers drop what is
        before 0, and what is too far behind it loses its ns.
        """
        known = [base for base in self._bases if 0 <= first - base < _EXACT]
        if not known:
            self._bases.append(first - MARGIN)
        return known[0] if known else self._bases[-1]

    def close(self, progress: Callable[[int], None]) -> None:
        """Finish the last file."""
        self._finish(_FOREVER, progress)

    def _make_room(self, drawn: _Drawn, chunk: Chunk, progress: Callable[[int], None]) -> None:
        """Have a file open that takes *chunk* of *drawn*, with the names of its lanes."""
        names = self._names(drawn, chunk)
        if self._max_bytes and self._file.events:
            more = len(chunk.text) + sum(map(len, names)) + self._samples(chunk.last) * _SAMPLE_BYTES
            if self._file.size + more + len(self._processes) * _SUMMARY_BYTES > self._max_bytes:
                self._finish(max(self._shown_until, self._file.last + 1), progress)
                self._number += 1
                self._file = TraceFile(part_path(self._path, self._number), self._files)
                names = self._names(drawn, chunk)
        self._file.write_lines(names)
        self._file.named |= {(drawn.pid, 0), *((drawn.pid, tid) for tid in chunk.tids.tolist())}

    def _names(self, drawn: _Drawn, chunk: Chunk) -> list[str]:
        """Return what names *drawn* and the lanes that *chunk* is on, where the file does not yet."""
        named = self._file.named
        new = [tid for tid in chunk.tids.tolist() if (drawn.pid, tid) not in named]
        lines = list(drawn.metadata) if (drawn.pid, 0) not in named else []
        return lines + [line for tid in new for line in lane_metadata(drawn.pid, tid, *drawn.lane_names[tid])]

    def _finish(self, until: int, progress: Callable[[int], None]) -> None:
        """Write what belongs beside the spans of the file, *until* then (ns after zero), and what describes it."""
        since = self._since()
        for host in self._sampled():
            self._add_metrics(host, (since, until), progress)
        self._add_notes(until)
        self._shown_until = until
        about = {
            "writer": "otel_dltrace",
            **self._job,
            "base_unix_ns": str(self._bases[0] if self._bases else 0),
            **({"part": self._number} if self._max_bytes else {}),
            "processes": [
                drawn.summary(self._bases[0], self._file.spans[drawn.pid])
                for drawn in self._processes.values()
                if (drawn.pid, 0) in self._file.named
            ],
        }
        self._file.close(about)
        self.events += self._file.events
        self._wrote(self._file.path)

    def _since(self) -> int:
        """Return from when on the counters of this file are, ns after zero: none is between two files."""
        first = self._file.first
        return self._shown_until if first is None else min(self._shown_until, first)

    def _sampled(self) -> list[HostTracks]:
        if self._hosts is None:
            self._hosts = [HostTracks(batch) for batch in self._metrics if len(batch)]
        return self._hosts

    def _samples(self, last: int) -> int:
        """Return how many samples of metrics there are beside the spans of this file, if it goes on to *last*."""
        between = self._since(), max(self._shown_until, self._file.last + 1, last + 1)
        return sum(host.samples(between, self._shift(host)) for host in self._sampled())

    def _shift(self, host: HostTracks) -> int:
        """Return what to add to *host*'s times for those of the trace."""
        machine = (host.batch.boot_id, host.batch.host)
        here = next((one for one in self._processes.values() if one.machine == machine), None)
        wall = here.wall if here else host.batch.wall
        if not self._bases:
            self._base_for(int(host.batch.time.min()) + wall)
        return wall - (here.base if here and here.base is not None else self._bases[0])

    def _add_metrics(self, host: HostTracks, between: tuple[int, int], progress: Callable[[int], None]) -> None:
        """Write one host's metrics as counters, on the clocks of the spans of that host."""
        machine = (host.batch.boot_id, host.batch.host)
        ranks = {one.rank: one for one in self._processes.values() if one.machine == machine and one.rank != HOST}
        for track in host.tracks:
            mine = ranks.get(track.rank)
            pid, shift = (mine.pid, mine.shift) if mine else (self._host_pid(host), self._shift(host))
            for chunk in track_chunks(track, shift, pid, between):
                self._name(pid, mine.metadata if mine else host.metadata())
                self._file.write(chunk)
                progress(chunk.events)

    def _host_pid(self, host: HostTracks) -> int:
        """Return the process that stands for a host."""
        if not host.pid:
            host.pid = free_pid(FIRST_FREE_PID, self._used())
        return host.pid

    def _add_notes(self, until: int) -> None:
        """Write remarks that begin before *until*, below the lanes of the processes that they are about."""
        later = []
        of_process: dict[int, list[Note]] = {}
        for note in self._notes:
            drawn = self._processes.get(note.nonce)
            if drawn is not None and note.start + drawn.shift < until:
                of_process.setdefault(note.nonce, []).append(note)
            else:
                later.append(note)
        self._notes = later
        for nonce, notes in of_process.items():
            drawn = self._processes[nonce]
            self._name(drawn.pid, drawn.metadata)
            self._file.write_lines(note_lines(notes, drawn.shift, drawn.pid))

    def _name(self, pid: int, metadata: Iterable[str]) -> None:
        if (pid, 0) not in self._file.named:
            self._file.named.add((pid, 0))
            self._file.write_lines(metadata)

    def _used(self) -> set[int]:
        return {drawn.pid for drawn in self._processes.values()} | {host.pid for host in self._hosts or ()}

    def _process(self, process: Process) -> _Drawn:
        """Return *process* as it is drawn; it is named when it is new, and again when its rank became known."""
        drawn = self._processes.get(process.nonce)
        rank = resource_attributes(process) if process.bind is not None else {}
        if drawn is None:
            drawn = self._processes[process.nonce] = _Drawn(rank_pid(rank, self._used()))
        name, label, order = _names(process)
        if name != drawn.name or label not in drawn.labels:
            # One process is in several generations where a process group is made anew.
            drawn.labels = (*drawn.labels, label) if name == drawn.name else (label,)
            drawn.name, drawn.os_pid = name, process.pid
            drawn.metadata = list(process_metadata(drawn.pid, name, ", ".join(drawn.labels), order))
            self._file.named.discard((drawn.pid, 0))
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

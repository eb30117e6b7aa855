"""Write spans as a Chrome trace, which Perfetto and chrome://tracing show: a process per rank, lanes below."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from otel_dltrace.export.chrome.beside import Beside
from otel_dltrace.export.chrome.drawn import Drawn, Processes
from otel_dltrace.export.chrome.events import WIDEST, Chunk, counter_chunks, span_chunks, step_marks
from otel_dltrace.export.chrome.notes import Note
from otel_dltrace.export.chrome.rotation import part_path
from otel_dltrace.export.chrome.trace_file import TraceFile
from otel_dltrace.model.metric_batch import MetricBatch
from otel_dltrace.model.spans import SpanBatch

_FOREVER = np.iinfo(np.int64).max
_CHUNKS_A_FILE = 8
"""Into how many pieces at least the text of a file comes: it is not cut more finely."""
_SUMMARY_BYTES = 300
"""What the end of a file says of a process, and of the run, about."""


def _unheard(_: object) -> None:
    """Nobody asks what was written."""


def write_chrome(
    batches: Iterable[SpanBatch],
    path: Path,
    progress: Callable[[int], None] = _unheard,
    metrics: Iterable[MetricBatch] = (),
    notes: Sequence[Note] = (),
    max_bytes: int = 0,
    wrote: Callable[[Path], None] = _unheard,
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
        beside = Beside(Processes(), metrics, notes, progress)
        trace = _Trace(lambda number: TraceFile(part_path(path, number), files), max_bytes, beside, progress, wrote)
        for batch in batches:
            trace.add(batch)
        trace.finish()
    return trace.events


class _Trace:
    """The files being written, one after the other.

    Args:
        new_file: Opens the file of a number.
        max_bytes: Bytes of JSON in a file, 0 for any.
        beside: What goes to each file beside its spans, and the processes that it is about.
        progress: Called with the number of events done since its last call.
        wrote: Called with each file once it has its name.
    """

    def __init__(
        self,
        new_file: Callable[[int], TraceFile],
        max_bytes: int,
        beside: Beside,
        progress: Callable[[int], None],
        wrote: Callable[[Path], None],
    ) -> None:
        self.events = 0
        self._new_file, self._max_bytes, self._progress, self._wrote = new_file, max_bytes, progress, wrote
        self._beside, self._processes = beside, beside.processes
        self._widest = min(WIDEST, max_bytes // _CHUNKS_A_FILE) if max_bytes else WIDEST
        self._number = 0
        self._file = new_file(0)

    def add(self, batch: SpanBatch) -> None:
        """Write the events of one batch."""
        if not len(batch):
            return
        drawn = self._processes.of(batch)
        if drawn.learn(batch.process):
            self._file.named.discard((drawn.pid, 0))
        layout = drawn.lay_out(batch)
        for chunk in span_chunks(batch, layout, drawn.pid, self._widest):
            self._make_room(drawn, chunk)
            self._file.write_spans(chunk, drawn.pid)
            self._progress(chunk.events)
        if drawn.lanes.further:
            self._write(drawn, step_marks(batch, layout, drawn.pid))
        for chunk in counter_chunks(batch, drawn.base, drawn.pid, self._widest):
            self._write(drawn, chunk)
            self._progress(chunk.events)

    def _write(self, drawn: Drawn, chunk: Chunk) -> None:
        self._make_room(drawn, chunk)
        self._file.write(chunk)

    def finish(self, until: int = _FOREVER) -> None:
        """End the file with what belongs beside its spans, *until* then (ns after zero), and what describes it."""
        self._beside.write(self._file, until)
        self._file.close(self._about())
        self.events += self._file.events
        self._wrote(self._file.path)

    def _about(self) -> dict[str, Any]:
        base, named, spans = self._processes.base, self._file.named, self._file.spans
        drawn = [one for one in self._processes.by_nonce.values() if (one.pid, 0) in named]
        return {
            "writer": "otel_dltrace",
            **self._processes.job,
            "base_unix_ns": str(base),
            **({"part": self._number} if self._max_bytes else {}),
            "processes": [one.summary(base, spans[one.pid]) for one in drawn],
        }

    def _make_room(self, drawn: Drawn, chunk: Chunk) -> None:
        """Have a file open that takes *chunk* of *drawn*, with the names of its lanes."""
        tids = chunk.tids.tolist()
        names = drawn.names(tids, self._file.named)
        if self._max_bytes and self._file.events and self._size_with(chunk, names) > self._max_bytes:
            self.finish(self._file.last + 1)
            self._number += 1
            self._file = self._new_file(self._number)
            names = drawn.names(tids, self._file.named)
        self._file.write_lines(names)
        self._file.named |= {(drawn.pid, 0), *((drawn.pid, tid) for tid in tids)}

    def _size_with(self, chunk: Chunk, names: Sequence[str]) -> int:
        """Return how many bytes of JSON the file will have, about, if it takes *chunk* and *names*."""
        more = len(chunk.text) + sum(map(len, names)) + self._beside.size(self._file, chunk.last)
        return self._file.size + more + (1 + len(self._processes.by_nonce)) * _SUMMARY_BYTES

"""One process in one generation, as the drain serves it: its rows go to the run directory and to OTLP."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from otel_dltrace.export import columns
from otel_dltrace.export.gate import Outgoing, StepGate
from otel_dltrace.export.ring_source import RingSource
from otel_dltrace.export.run_reader import read_table, span_files
from otel_dltrace.export.rundir import RunWriter, segment_number
from otel_dltrace.model import semconv
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.plan import Window
from otel_dltrace.model.spans import Column, Process, SpanBatch, empty_rows, fill_ids
from otel_dltrace.model.time import Anchor


class Member:
    """The spans of *source* while it is bound as *bind*.

    Args:
        source: The ring.
        bind: Who its writer is.
        process: The same with host and clock.
        writer: The run directory of the generation.
        window: The steps that go out in full.
        budget: Spans per trace.
    """

    def __init__(
        self, source: RingSource, bind: Bind, process: Process, writer: RunWriter, window: Window, budget: int
    ) -> None:
        self.source, self.bind, self.process, self.writer = source, bind, process, writer
        self.gate = StepGate(bind, window, budget, self.rows_of)
        self._written_before: set[int] = set()
        self.written = 0
        self.truncated = 0
        self.left_out = 0

    @property
    def run(self) -> tuple[str, str, str]:
        """Job, generation and world."""
        return self.bind.job, self.bind.generation, self.bind.world

    def take(self, rows: Column, now: float) -> None:
        """Write *rows* to the run directory and hold them for OTLP; what was written before is not again."""
        rows = rows.copy()
        fill_ids(rows, self.source.names.descriptors, self.process)
        if self._written_before:
            rows = rows[~np.isin(rows["span_id"], np.fromiter(self._written_before, np.uint64))]
        if not len(rows):
            return
        self.writer.append(self.process.nonce, rows, self.source.names.descriptors, self.source.errors)
        self.written += len(rows)
        self.truncated += int(((rows["flags"] & np.uint16(semconv.Flag.TRUNCATED)) > 0).sum())
        self._hold(rows, now)

    def _hold(self, rows: Column, now: float) -> None:
        batch = self.batch(rows)
        self.gate.add(rows, batch.is_kind(semconv.STEP), now)

    def batch(self, rows: Column, anchor: Anchor | None = None) -> SpanBatch:
        """Return *rows* with this process's descriptors, errors and clock."""
        process = replace(self.process, anchor=anchor) if anchor else self.process
        return SpanBatch(rows, self.source.names.descriptors, process, self.source.errors)

    def go_on(self, segment: int, rows: int, undelivered: int, loose: bool, now: float) -> None:
        """Take up the work of a drain that ended in the middle.

        Spans after *rows* rows of *segment* are in the run directory though the cursor does not
        say so (all of them, where *segment* is 0); those of steps from *undelivered* on are sent again.
        """
        paths = span_files(self.writer.folder)
        if segment:
            paths = [path for path in paths if path.suffix != ".parquet" and segment_number(path) >= segment]
        for path in paths:
            table = read_table(path)
            if table is not None:
                skip = rows if segment and segment_number(path) == segment else 0
                table = table.slice(skip)
                ids = table.filter(columns.of_process(table, self.process.nonce)).column("span_id")
                self._written_before.update(ids.to_pylist())
        unsent = self._stored(lambda table: pc.greater_equal(table.column("step"), undelivered))
        unsent = unsent[(unsent["step"] != NO_STEP) | loose]
        if len(unsent):
            self._hold(unsent, now)

    def _stored(self, wanted: Callable[[pa.Table], pa.ChunkedArray]) -> Column:
        """Return this process's rows in the run directory that *wanted* selects."""
        parts = [empty_rows()]
        for path in span_files(self.writer.folder):
            table = read_table(path)
            if table is None:
                continue
            rows, errors = columns.from_arrow(
                table.filter(pc.and_(columns.of_process(table, self.process.nonce), wanted(table)))
            )
            rows["error"] = np.where(rows["error"] > 0, rows["error"] + len(self.source.errors) - 1, 0)
            self.source.errors.extend(errors[1:])
            parts.append(rows)
        return np.concatenate(parts)

    def rows_of(self, step: int) -> Column:
        """Return the rows of *step* from the run directory."""
        return self._stored(lambda table: pc.equal(table.column("step"), step))

    def outgoing(self, now: float, final: bool) -> list[Outgoing]:
        """Return what is decided by *now*."""
        out = self.gate.due(now, final)
        self.left_out += sum(o.left_out for o in out)
        return out

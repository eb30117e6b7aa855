"""One process in one generation, as the drain serves it: its rows go to the run directory and to OTLP."""

from collections.abc import Collection
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from otel_dltrace.export.metrics.run import RankMetrics
from otel_dltrace.export.outgoing.gate import Outgoing, StepGate
from otel_dltrace.export.outgoing.outside_budget import OutsideBudget
from otel_dltrace.export.outgoing.served import SlowHere
from otel_dltrace.export.outgoing.step_ends import StepEnds
from otel_dltrace.export.rings.cursor import DOUBT_S, Cursor, Place
from otel_dltrace.export.rings.source import RingSource
from otel_dltrace.export.rings.still_open import StillOpen
from otel_dltrace.export.rundir import columns
from otel_dltrace.export.rundir.span_files import last_step, newest_segment, span_files
from otel_dltrace.export.rundir.span_tables import read_table
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.export.serving import Serving
from otel_dltrace.model import semconv
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.spans import Process, SpanBatch, empty_rows, fill_ids, stack_rows
from otel_dltrace.model.time import Anchor
from otel_dltrace.record.guard import guarded

MOST_ENDED = 1000
"""Spans outside any step that are remembered, for what is below them and ends later."""


class Member:
    """The spans of *source* while it is bound as *bind*.

    Args:
        source: The ring.
        bind: Who its writer is.
        process: The same with host and clock.
        writer: The run directory of the generation.
        serving: What goes out in full, and how long a step waits for what may still come of it.
        slow_here: What a server knows of others' steps.
        goes_out: Whether spans go anywhere but to the run directory.
    """

    def __init__(
        self,
        source: RingSource,
        bind: Bind,
        process: Process,
        writer: RunWriter,
        serving: Serving,
        slow_here: SlowHere,
        *,
        goes_out: bool,
    ) -> None:
        self.source, self.bind, self.process, self.writer = source, bind, process, writer
        self._goes_out = goes_out
        self.gate: StepGate | StepEnds = StepEnds()
        if goes_out:
            self.gate = StepGate(bind, serving.window, serving.budget, self.rows_of, serving.settle, slow_here)
        self._outside = OutsideBudget(bind, serving.budget)
        self._written_before = np.zeros(0, np.uint64)
        self._ended_outside = empty_rows()
        self._doubt_ends = 0.0
        self._owes_loose = False
        self.written = 0
        self.truncated = 0
        self.left_out = 0
        self.dropped = 0
        self.metrics: RankMetrics | None = None
        self._open = StillOpen(process.nonce)

    @property
    def run(self) -> tuple[str, str, str]:
        """Job, generation and world."""
        return self.bind.job, self.bind.generation, self.bind.world

    def take(self, rows: Column, now: float) -> None:
        """Write *rows* to the run directory and hold them for OTLP; what was written before is not again.

        Their ids are filled in, in place.
        """
        is_step = fill_ids(rows, self.source.descriptors, self.process)
        if len(self._written_before):
            is_new = ~np.isin(rows["span_id"], self._written_before)
            rows, is_step = rows.compress(is_new), is_step.compress(is_new)
        if now > self._doubt_ends:
            self._written_before = np.zeros(0, np.uint64)
        if not len(rows):
            return
        self.writer.append(self.process.nonce, rows, self.source.descriptors, self.source.errors)
        self.written += len(rows)
        self.truncated += _cut_off(rows)
        self._hold(rows, is_step, now)
        if self.metrics is not None:
            guarded(self.metrics.take)(rows, self.source.descriptors)

    def show_open(self, rows: Column, now: float) -> None:
        """Have *rows* stand in the run directory as what is open."""
        fill_ids(rows, self.source.descriptors, self.process)
        self._open.show(self.writer, rows, self.source.descriptors, self.source.errors, now)

    def take_counters(self, records: Column) -> None:
        """Give COUNTER *records* to the metrics."""
        if self.metrics is not None:
            guarded(self.metrics.take_records)(records, self.source.descriptors)

    def _hold(self, rows: Column, is_step: Column, now: float) -> None:
        outside = rows.compress(rows["step"] == NO_STEP) if self._goes_out else empty_rows()
        if len(outside):
            self._owes_loose = True
            self._ended_outside = stack_rows([self._ended_outside, outside])[-MOST_ENDED:]
        self.gate.add(rows, is_step, now)

    def batch(self, rows: Column, anchor: Anchor | None = None) -> SpanBatch:
        """Return *rows* with this process's descriptors, errors and clock."""
        process = replace(self.process, anchor=anchor) if anchor else self.process
        return SpanBatch(rows, self.source.descriptors, process, self.source.errors, self._above())

    def _above(self) -> Column:
        """Return what rows outside any step may hang under: what is open there, and what ended last."""
        begun = self.source.open.outside()
        if not len(begun):
            return self._ended_outside
        fill_ids(begun, self.source.descriptors, self.process)
        return stack_rows([begun, self._ended_outside])

    def go_on(self, cursor: Cursor, now: float, *, holds: bool) -> None:
        """Take up the work of a drain that ended in the middle.

        Spans after *cursor* are in the run directory though it does not say so (all of them, where
        it does not know the folder); they, and those that it knows undelivered, are sent again by who *holds* them.
        """
        place = cursor.places.get(str(self.writer.folder))
        if place is None and not self.writer.has(self.process.nonce):
            return
        known = place or Place()
        self.truncated = known.truncated
        before, unsent = [self._written_before], [empty_rows()]
        for path in span_files(self.writer.folder):
            newest = newest_segment(path)
            if not (newest >= known.segment or known.loose or last_step(path) >= known.undelivered):
                continue
            known_rows: float = 0
            if newest < known.segment:
                known_rows = inf
            elif newest == known.segment and path.suffix != ".parquet":
                known_rows = known.rows  # compaction sorts them, so in a Parquet all of the segment may come later
            rows, is_new = self._stored(path, known_rows)
            before.append(rows["span_id"][is_new])
            self.truncated += _cut_off(rows.compress(is_new))
            is_loose = rows["step"] == NO_STEP
            unsent.append(rows.compress(is_new | np.where(is_loose, known.loose, rows["step"] >= known.undelivered)))
        self._know_written(before, now)
        self.written = known.written + len(self._written_before)
        rows = stack_rows(unsent)
        if holds and len(rows):
            self._hold(rows, self.source.descriptors.is_kind(rows, semconv.STEP), now)

    def place(self, unsettled: Collection[int]) -> Place:
        """Return what is safe in the run directory, while what was sent of *unsettled* steps is not yet elsewhere."""
        self._owes_loose = self.gate.has_loose or (self._owes_loose and NO_STEP in unsettled)
        undelivered = min([self.gate.undecided_from(), *unsettled])
        numbers = self.writer.number, self.writer.rows, self.written
        return Place(*numbers, undelivered, self._owes_loose, self.truncated)

    def _know_written(self, ids: list[Column], now: float) -> None:
        """Remember what may be read once more: within *DOUBT_S* all that the ring holds now has been."""
        self._written_before = np.concatenate(ids)
        self._doubt_ends = now + DOUBT_S

    def _stored(self, path: Path, known_rows: float = 0, step: int | None = None) -> tuple[Column, Column]:
        """Return this process's rows in *path* (only those of *step*), and which of them come after *known_rows*."""
        table = read_table(path)
        if table is None:
            return empty_rows(), np.zeros(0, bool)
        mine = columns.of_process(table, self.process.nonce)
        if step is not None:
            mine = pc.and_(mine, columns.equal(table.column("step"), step))
        is_new = np.arange(table.num_rows) >= known_rows
        rows, errors = columns.from_arrow(table.filter(mine))
        self.source.renumber_errors(rows, errors)
        return rows, is_new[columns.numbers_of(pc.cast(mine, "uint8")).view(bool)]

    def rows_of(self, step: int) -> Column:
        """Return the rows of *step* from the run directory."""
        paths = [path for path in span_files(self.writer.folder) if last_step(path) >= step]
        return stack_rows(self._stored(path, step=step)[0] for path in paths)

    def all_rows(self) -> Column:
        """Return every row of this process in the run directory."""
        return stack_rows(self._stored(path)[0] for path in span_files(self.writer.folder))

    def outgoing(self, now: float, final: bool) -> list[Outgoing]:
        """Return what is decided by *now*."""
        out = [
            self._outside.within(one, self.batch(one.rows)) if one.step == NO_STEP else one
            for one in self.gate.due(now, final)
        ]
        self.left_out += sum(o.left_out for o in out)
        return out


def _cut_off(rows: Column) -> int:
    return int(np.count_nonzero(rows["flags"] & np.uint16(semconv.Flag.TRUNCATED)))

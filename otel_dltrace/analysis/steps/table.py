"""The steps of one rank as columns: how long each took, and each of its stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from otel_dltrace.analysis.intervals import covered, merged
from otel_dltrace.analysis.once import once
from otel_dltrace.analysis.steps.parts import is_done, joined, parts_of
from otel_dltrace.analysis.steps.pieces import piece_at
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.spans import SpanBatch

RESIDUAL = "residual"
BETWEEN = "between steps"
_FAR = 1 << 60
"""Longer than any extent, ns."""
NEVER_BEGUN, NEVER_ENDED = np.iinfo(np.int64).max, np.iinfo(np.int64).min
"""When a stage that is not there begins and ends; not 0, before which all is that a rank did on another host, before
the one whose clock counts had booted.
"""


@dataclass(frozen=True)
class StepTable:
    """One rank's n steps that it has done, ascending, and S stages; times in ns of the host's monotonic clock.

    *total*, *pieces*, *first*, *last* and *device* have the shape (n, S); a stage that did not happen has 0
    pieces, `NEVER_BEGUN` and `NEVER_ENDED`, and what a *device* was at has its times, which may be in a later step of
    the host's. *part* says which of the rank's processes, that went on one after the other, closed the step.
    """

    batch: SpanBatch
    steps: Column
    part: Column
    start: Column
    end: Column
    samples: Column
    seq: Column
    stages: tuple[str, ...]
    total: Column
    pieces: Column
    first: Column
    last: Column
    device: Column

    @property
    def rank(self) -> int:
        """The rank that wrote the steps."""
        return self.batch.rank

    @property
    def duration(self) -> Column:
        """How long each step took, shape (n,)."""
        length: Column = self.end - self.start
        return length

    @property
    def processes(self) -> int:
        """How many processes closed the steps."""
        return len(np.unique(self.part))

    @property
    @once
    def outside(self) -> Column:
        """Mask (n, S) of stages that were over before their step began, as evaluation is."""
        before: Column = (self.pieces > 0) & (self.last <= self.start[:, None])
        return before

    @property
    @once
    def between(self) -> Column:
        """Time from the end of the process's step before, less the stages in it; 0 where that step is not here."""
        gap = np.zeros(len(self.steps), np.int64)
        follows = np.flatnonzero((np.diff(self.steps) == 1) & (np.diff(self.part) == 0)) + 1
        gap[follows] = self.start[follows] - self.end[follows - 1]
        rest: Column = np.maximum(gap - self.total.sum(axis=1, where=self.outside), 0)
        return rest

    @property
    @once
    def residual(self) -> Column:
        """The part of each step that no stage covers, shape (n,).

        Stages of one piece cover the union of their extents. The extent of a stage of several
        pieces (accumulation) holds the others' pieces too, so it covers its total; all together
        never more than the union of all extents, or than all totals, which leave out what is inside. Where
        a device has times of its own the extents of all steps count.
        """
        if self.device.any():
            known = self._covered_by_any()
        else:
            totals = self.total.sum(axis=1, where=self._inside)
            known = np.minimum(np.minimum(self._covered_one_by_one(), self._union(self._inside)), totals)
        rest: Column = self.duration - known
        return rest

    @property
    @once
    def gaps(self) -> Column:
        """The time between the pieces of stages of several, in which no other stage was either, shape (n,)."""
        uncovered: Column = np.maximum(self._union(self._inside) - self._covered_one_by_one(), 0)
        return uncovered

    @property
    def _inside(self) -> Column:
        """Mask (n, S) of stages that happened in their step."""
        inside: Column = (self.pieces > 0) & ~self.outside
        return inside

    def _covered_one_by_one(self) -> Column:
        """Return the union of each step's stages of one piece, and the totals of those of several."""
        several = self._inside & (self.pieces > 1)
        covered: Column = self._union(self._inside & ~several) + self.total.sum(axis=1, where=several)
        return covered

    def _covered_by_any(self) -> Column:
        """Return for how long a stage of any step ran in each step: a device may be at one when the host is beyond."""
        there = self.pieces > 0
        return covered(merged(self.first[there], self.last[there]), self.start, self.end)

    def _union(self, which: Column) -> Column:
        """Return the length of the union of the extents that *which* (n, S) picks, cut to their steps."""
        low = np.maximum(self.first, self.start[:, None])
        high = np.where(which, np.minimum(self.last, self.end[:, None]), low)
        order = np.argsort(low, axis=1, kind="stable")
        low, high = np.take_along_axis(low, order, 1), np.take_along_axis(high, order, 1)
        reached = np.maximum.accumulate(np.hstack((self.start[:, None], high)), axis=1)
        covered = np.diff(reached, axis=1) - np.maximum(low - reached[:, :-1], 0)
        length: Column = np.maximum(covered, 0).sum(axis=1)
        return length

    def stage_at(self, row: Column, at: Column) -> Column:
        """Return which stage of each *row* holds the time *at*, S where none does: the innermost of those of one piece.

        Else, or where stages of several pieces have most of that one, one of these, as `piece_at` tells.
        """
        column, least = np.full(len(at), len(self.stages)), np.full(len(at), _FAR)
        for stage in range(len(self.stages)):
            first, last = self.first[row, stage], self.last[row, stage]
            better = (self.pieces[row, stage] == 1) & (first <= at) & (at < last) & (last - first < least)
            column, least = np.where(better, stage, column), np.where(better, last - first, least)
        left = (column == len(self.stages)) & (self.pieces.max(axis=1, initial=0) > 1)[row]
        left |= np.column_stack((self._is_interrupted, np.zeros(len(self.steps), bool)))[row, column]
        extents = (c[row[left]] for c in (self.first, self.last, self.total, self.pieces))
        likely = piece_at(at[left], *extents)
        column[left] = np.where(likely < len(self.stages), likely, column[left])
        return column

    @property
    @once
    def _is_interrupted(self) -> Column:
        """Mask (n, S) of stages of one piece of whose extent stages of several have more than they have themselves."""
        single = (self.pieces == 1) & ~self.device
        own = np.where(single, self.total, 0)
        inner = np.zeros_like(own)
        for stage in range(len(self.stages)):
            first, last = self.first[:, [stage]], self.last[:, [stage]]
            inside = single & (first <= self.first) & (self.last <= last)
            inner[:, stage] = np.where(inside, self.total, 0).sum(axis=1)
        others = np.where(single, self.last - self.first, 0) - inner
        return others > own

    def rows_of(self, steps: Column) -> Column:
        """Return a mask, shape (n,), of the rows of *steps*."""
        rows: Column = np.isin(self.steps, steps)
        return rows


def step_tables(batches: Sequence[SpanBatch]) -> tuple[StepTable, ...]:
    """Return one table per worker rank, by rank, all with the same stages in the order in which they happen.

    Several processes of one rank that closed different steps (a timeline in several files) make one table; of those
    that closed the same (a forked child) the one with the most steps speaks.
    """
    names = _stage_names(batches)
    of_ranks: dict[int, list[SpanBatch]] = {}
    for batch in worker_batches(batches):
        of_ranks.setdefault(batch.rank, []).append(batch)
    tables = [_table(parts_of(of_ranks[rank]), names) for rank in sorted(of_ranks)]
    order = _order(tables, names)
    return tuple(_reordered(table, order) for table in tables)


def worker_batches(batches: Sequence[SpanBatch]) -> list[SpanBatch]:
    """Return the batches of training processes; servers have no steps of their own."""
    return [b for b in batches if b.process.bind is None or b.process.bind.role == "worker"]


def common_steps(tables: Sequence[StepTable]) -> Column:
    """Return the steps that every rank has done, ascending."""
    if not tables:
        return np.zeros(0, np.int64)
    return reduce(np.intersect1d, (table.steps for table in tables))


def _table(parts: Sequence[SpanBatch], names: tuple[str, ...]) -> StepTable:
    batch = joined(parts)
    rows = batch.rows
    is_step = is_done(batch)
    steps, where = np.unique(rows["step"][is_step].astype(np.int64), return_index=True)
    own, part = rows[is_step][where], np.repeat(np.arange(len(parts)), list(map(len, parts)))[is_step][where]
    start, end, samples, seq = (own[c].astype(np.int64) for c in ("start", "end", "a", "seq"))

    closed = rows["flags"] & s.Flag.TRUNCATED == 0
    piece = batch.take(batch.is_kind(s.STAGE) & closed & np.isin(rows["step"], steps))
    stage = piece.lookup(lambda d: names.index(d.name) if d.kind == s.STAGE else 0, np.int64)
    cell = (np.searchsorted(steps, piece["step"]), stage)
    shape = (len(steps), len(names))
    total, pieces = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    first, last = np.full(shape, NEVER_BEGUN), np.full(shape, NEVER_ENDED)
    np.add.at(total, cell, piece["size"].astype(np.int64))
    np.add.at(pieces, cell, np.maximum(piece["a"], 1).astype(np.int64))
    np.minimum.at(first, cell, piece["start"])
    np.maximum.at(last, cell, piece["end"])
    device = np.zeros(shape, bool)
    np.logical_or.at(device, cell, piece["source"] == s.Source.DEVICE)
    return StepTable(batch, steps, part, start, end, samples, seq, names, total, pieces, first, last, device)


def _stage_names(batches: Sequence[SpanBatch]) -> tuple[str, ...]:
    found = {d.name for batch in worker_batches(batches) for d in batch.descriptors if d.kind == s.STAGE}
    usual = [name for name in s.STAGES if name in found]
    return (*usual, *sorted(found.difference(usual)))


def _order(tables: Sequence[StepTable], names: tuple[str, ...]) -> list[int]:
    """Return the stages that happened, by the median of when they begin in their step."""
    begins = {}
    for column in range(len(names)):
        offsets = np.concatenate([(t.first[:, column] - t.start)[t.pieces[:, column] > 0] for t in tables])
        if len(offsets):
            begins[column] = float(np.median(offsets))
    return sorted(begins, key=lambda column: (begins[column], column))


def _reordered(t: StepTable, order: list[int]) -> StepTable:
    names = tuple(t.stages[i] for i in order)
    wide = (column[:, order] for column in (t.total, t.pieces, t.first, t.last, t.device))
    return StepTable(t.batch, t.steps, t.part, t.start, t.end, t.samples, t.seq, names, *wide)

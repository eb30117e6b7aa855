"""What a rank itself does in a step: own = stage - the stages inside it - the time it is blocked by others.

Blocked is the time in ``wait`` phases and in blocking operations, and, in the stage from which DDP
launches its buckets, the time after the last launch: launch times are exact, and from there on
the stage only waits for the slowest rank's buckets (their ends are bounds and are not used).
"""

import numpy as np

from otel_dltrace.analysis.intervals import Intervals, merged
from otel_dltrace.analysis.table import BETWEEN, RESIDUAL, StepTable
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.operation import Descriptor

_FAR = np.iinfo(np.int64).max // 4


def columns(stages: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the columns of `spent` and `own`: what happens from one step's end to the next."""
    return (BETWEEN, *stages, RESIDUAL)


def spent(t: StepTable) -> Column:
    """Return the time that each step spends in each column, (n, S + 2), summing to its length and the gap before it.

    Where a device has times of its own they are beside the host's, and may sum to more.
    """
    stages = _exclusive(t)
    between = t.between
    gap_and_step = between + np.where(t.outside, stages, 0).sum(axis=1) + t.duration
    rest = gap_and_step - between - stages.sum(axis=1)
    rest = np.where(t.device.any(axis=1), np.maximum(rest, 0), rest)
    return np.column_stack((between, stages, rest))


def own(t: StepTable) -> Column:
    """Return the rank's own time in each column, (n, S + 2)."""
    own_time: Column = np.maximum(spent(t) - blocked(t), 0)
    return own_time


def blocked(t: StepTable) -> Column:
    """Return the time for which the rank is blocked in communication in each column, (n, S + 2)."""
    launches = _rows(t, _launched(t))
    row, column, inside = _place(t, launches[0])
    last = np.zeros(t.total.shape, np.int64)
    np.maximum.at(last, (row[inside], column[inside]), launches[0][inside])
    cells = np.nonzero(last)
    begin, end = _rows(t, _blocking(t))
    begin, end = merged(np.append(begin, last[cells]), np.append(end, t.last[cells]))
    row, column, inside = _place(t, begin)
    time = np.zeros((len(t.steps), len(t.stages) + 2), np.int64)
    known = column >= -1
    np.add.at(time, (row[known], column[known] + 1), (end - begin)[known])
    return time


def steps_with_operations(t: StepTable) -> Column:
    """Return a mask of the steps in which operations were seen, with waits: else nobody knows where a rank waits."""
    seen: Column = np.isin(t.steps, t.batch["step"][t.batch.is_kind(s.COLLECTIVE, s.P2P)])
    return seen if tells_waits(t) else np.zeros_like(seen)


def tells_waits(t: StepTable) -> bool:
    """Return whether it is known for how long the rank was blocked; by Horovod it is not at level `collective`."""
    has_handle = t.batch["flags"] & s.Flag.ASYNC != 0
    has_handle &= t.batch.lookup(lambda d: d.kind == s.COLLECTIVE and d.backend == h.BACKEND, bool)
    return not has_handle.any() or bool(t.batch.lookup(_is_wait, bool).any())


def _exclusive(t: StepTable) -> Column:
    """Return the stages' totals without those of stages inside them, as a copy to the device in ``prepare_batch``.

    The live recording leaves them out itself; other sources tell of extents alone.
    """
    inside = np.zeros_like(t.total)
    for outer in range(len(t.stages)):
        for inner in range(len(t.stages)):
            if inner == outer:
                continue
            holds = (t.first[:, outer] <= t.first[:, inner]) & (t.last[:, inner] <= t.last[:, outer])
            longer = (t.total[:, outer] > t.total[:, inner]) | (
                (t.total[:, outer] == t.total[:, inner]) & (outer < inner)
            )
            both = (t.pieces[:, outer] == 1) & (t.pieces[:, inner] > 0)
            both &= t.device[:, outer] == t.device[:, inner]  # the host goes on while the device is at it
            inside[:, outer] += np.where(holds & longer & both, t.total[:, inner], 0)
    extent = np.where(t.pieces == 1, t.last - t.first, t.total)
    exclusive: Column = np.maximum(np.minimum(t.total, extent - inside), 0)
    return exclusive


def _launched(t: StepTable) -> Column:
    """Return a mask of DDP's buckets: for what a program launches itself it waits itself, in ``wait``."""
    batch = t.batch
    bound = batch["source"] == s.Source.BOUND
    asynchronous = batch["flags"] & s.Flag.ASYNC != 0
    launched: Column = batch.lookup(lambda d: d.is_bucket, bool) & (bound | asynchronous)
    return launched


def _blocking(t: StepTable) -> Column:
    batch = t.batch
    waits = batch.lookup(_is_wait, bool)
    calls = batch.is_kind(s.COLLECTIVE, s.P2P) & (batch["flags"] & s.Flag.ASYNC == 0)
    returned = (batch["source"] == s.Source.HOST_DONE) | (batch["source"] == s.Source.HOST_ISSUE)
    blocking: Column = waits | (calls & returned)
    return blocking


def _is_wait(d: Descriptor) -> bool:
    return d.kind == s.PHASE and d.name == s.WAIT


def _rows(t: StepTable, which: Column) -> Intervals:
    return t.batch["start"][which], t.batch["end"][which]


def _place(t: StepTable, at: Column) -> tuple[Column, Column, Column]:
    """Return (row, column, whether in a stage) of each time: which step, and which of its stages.

    The innermost stage that holds it, preferably one of a single piece; else column S, the residual, or -1,
    the time before the step; -2 where there is no such step.
    """
    if not len(t.steps):
        return np.zeros(len(at), np.int64), np.full(len(at), -2), np.zeros(len(at), bool)
    row = np.searchsorted(t.start, at, "right") - 1
    after = (row < 0) | (at >= t.end[row])
    row = np.where(after, row + 1, row)
    there = row < len(t.steps)
    row = np.minimum(row, len(t.steps) - 1)
    column = np.where(after, -1, len(t.stages))
    inside = np.zeros(len(at), bool)
    best = np.full(len(at), 2 * _FAR)
    for stage in range(len(t.stages)):
        pieces, first, last = t.pieces[row, stage], t.first[row, stage], t.last[row, stage]
        holds = there & (pieces > 0) & (first <= at) & (at < last)
        extent = np.where(holds, last - first, 0) + np.where(pieces > 1, _FAR, 0)
        better = holds & (extent < best)
        column, best, inside = np.where(better, stage, column), np.where(better, extent, best), inside | better
    return row, np.where(there, column, -2), inside

"""For how long a rank is blocked by others in each stage of a step, and in which stages nobody can know.

Blocked is the time in ``wait`` phases and in blocking operations, and, in the stage from which DDP
launches its buckets, the time after the last launch: launch times are exact, and from there on
the stage only waits for the slowest rank's buckets (their ends are bounds and are not used).
A device comes to a bucket long after the host has launched it: without the device's times of it no wait is known.
"""

import re

import numpy as np

from otel_dltrace.analysis.intervals import Intervals, merged
from otel_dltrace.analysis.table import StepTable
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.operation import Descriptor

SHARE_OF_STEPS = 0.5
_WAITED_IN = frozenset((s.BACKWARD, s.OPTIMIZER))
"""DDP waits for the others inside backward, Horovod and push_pull inside the optimizer's step."""
_IN_FORWARD = re.compile("_?(all_?gather|reduce_?scatter|all_?to_?all|broadcast_coalesced)", re.IGNORECASE)
"""What models communicate in their forward: sharded ones, experts, and DDP its buffers."""
_FAR = np.iinfo(np.int64).max // 4


def blocked(t: StepTable) -> Column:
    """Return the time for which the rank is blocked in communication in each column, (n, S + 2)."""
    time = np.zeros((len(t.steps), len(t.stages) + 2), np.int64)
    row, stage, last = _last_launches(t)
    until, on_device = t.last[row, stage], t.device[row, stage]
    begin, end = _rows(t, _blocking(t))
    begin, end = merged(np.append(begin, last[~on_device]), np.append(end, until[~on_device]))
    at, column = _place(t, begin)
    known = column >= -1
    np.add.at(time, (at[known], column[known] + 1), (end - begin)[known])
    # A device may be at it when the host is steps beyond: its time is not the host's.
    time[row[on_device], stage[on_device] + 1] += (until - last)[on_device]
    return time


def untold(t: StepTable, steps: Column) -> frozenset[str]:
    """Return the stages in which the rank may have waited in *steps*, and for how long nobody recorded.

    So it is in any stage with a device's own times that communicates aside: one stream waits for another in silence.
    """
    if _goes_aside(t, steps):
        return _WAITED_IN | {s.FORWARD}
    return frozenset() if _share_that_tells(t, steps) > SHARE_OF_STEPS else _WAITED_IN


def lacking(t: StepTable, steps: Column) -> str:
    """Return what would have told the waits that are `untold` in *steps*, with the setting that records it, if any."""
    if _goes_aside(t, steps):
        return "the waits between its streams"
    if (_is_bucket(t) & _is_issued(t)).any():
        return "its device's times of the buckets (TORCH_NCCL_ENABLE_TIMING=1)"
    if not tells_waits(t):
        return "its waits (OTEL_DLTRACE_LEVEL=phase)"
    if t.batch.is_kind(s.COLLECTIVE, s.P2P).any():
        return "its operations in more of the steps"
    return "its operations (OTEL_DLTRACE_LEVEL=collective)"


def steps_with_operations(t: StepTable) -> Column:
    """Return a mask of the steps in which operations were seen, with waits: else nobody knows where a rank waits."""
    batch, issued = t.batch, _is_issued(t)
    seen: Column = np.isin(t.steps, batch["step"][batch.is_kind(s.COLLECTIVE, s.P2P) & ~issued])
    seen &= ~np.isin(t.steps, batch["step"][issued & _is_bucket(t)])
    return seen if tells_waits(t) else np.zeros_like(seen)


def tells_waits(t: StepTable) -> bool:
    """Return whether it is known for how long the rank was blocked.

    By Horovod it is not at level `collective`, nor by buckets that are all on a device of which no times are known.
    """
    buckets = _is_bucket(t)
    if buckets.any() and _is_issued(t)[buckets].all():
        return False
    has_handle = t.batch["flags"] & s.Flag.ASYNC != 0
    has_handle &= t.batch.lookup(lambda d: d.kind == s.COLLECTIVE and d.backend == h.BACKEND, bool)
    return not has_handle.any() or bool(t.batch.lookup(_is_wait, bool).any())


def _share_that_tells(t: StepTable, steps: Column) -> float:
    """Return the share of *steps* between the first and the last with operations.

    One without any between them waits for nobody, as where weights are averaged every few steps; before and after
    them operations are not recorded, or no longer kept.
    """
    seen = np.flatnonzero(steps_with_operations(t)[t.rows_of(steps)])
    return float(np.ptp(seen) + 1) / len(steps) if len(seen) else 0.0


def _goes_aside(t: StepTable, steps: Column) -> bool:
    """Return whether the model communicates on its device while it computes in most *steps*, as a sharded one does.

    One operation between two steps is none of a model's; nor is what DDP tells the ranks before the first.
    """
    if not t.device.any():
        return False
    by_host = np.isin(t.batch["source"], (s.Source.HOST_DONE, s.Source.BOUND))
    aside = t.batch.lookup(lambda d: _IN_FORWARD.match(d.name) is not None, bool) & ~by_host
    return float(np.isin(steps, t.batch["step"][aside]).mean()) > SHARE_OF_STEPS if len(steps) else False


def _is_issued(t: StepTable) -> Column:
    """Return a mask of what is only known to have been issued: the device comes to it when it does."""
    issued: Column = t.batch["source"] == s.Source.HOST_ISSUE
    return issued


def _is_bucket(t: StepTable) -> Column:
    return t.batch.lookup(lambda d: d.is_bucket, bool)


def _last_launches(t: StepTable) -> tuple[Column, Column, Column]:
    """Return (row, stage, when) of the last launch of DDP's buckets in each step's stage.

    For what a program launches itself it waits itself, in ``wait``.
    """
    batch = t.batch
    starts_aside = (batch["source"] == s.Source.BOUND) | (batch["flags"] & s.Flag.ASYNC != 0)
    launched = _is_bucket(t) & starts_aside & ~_is_issued(t)
    launched &= np.isin(batch["step"], t.steps)
    row, at = np.searchsorted(t.steps, batch["step"][launched]), batch["start"][launched]
    stage = _stage_at(t, row, at)
    inside = stage < len(t.stages)
    last = np.zeros(t.total.shape, np.int64)
    np.maximum.at(last, (row[inside], stage[inside]), at[inside])
    rows, stages = np.nonzero(last)
    return rows, stages, last[rows, stages]


def _blocking(t: StepTable) -> Column:
    batch = t.batch
    waits = batch.lookup(_is_wait, bool)
    calls = batch.is_kind(s.COLLECTIVE, s.P2P) & (batch["flags"] & s.Flag.ASYNC == 0)
    returned = (batch["source"] == s.Source.HOST_DONE) | _is_issued(t)
    blocking: Column = waits | (calls & returned)
    return blocking


def _is_wait(d: Descriptor) -> bool:
    return d.kind == s.PHASE and d.name == s.WAIT


def _rows(t: StepTable, which: Column) -> Intervals:
    return t.batch["start"][which], t.batch["end"][which]


def _place(t: StepTable, at: Column) -> tuple[Column, Column]:
    """Return (row, column) of each time: which step, and which of its stages.

    Column S is the residual, -1 the time before the step; -2 where there is no such step.
    """
    if not len(t.steps):
        return np.zeros(len(at), np.int64), np.full(len(at), -2)
    row = np.searchsorted(t.start, at, "right") - 1
    after = (row < 0) | (at >= t.end[row])
    row = np.where(after, row + 1, row)
    there = row < len(t.steps)
    row = np.minimum(row, len(t.steps) - 1)
    stage = _stage_at(t, row, at)
    column = np.where(after & (stage == len(t.stages)), -1, stage)
    return row, np.where(there, column, -2)


def _stage_at(t: StepTable, row: Column, at: Column) -> Column:
    """Return which stage of each *row* holds the time, S where none does: the innermost, rather one of one piece."""
    column = np.full(len(at), len(t.stages))
    best = np.full(len(at), 2 * _FAR)
    for stage in range(len(t.stages)):
        pieces, first, last = t.pieces[row, stage], t.first[row, stage], t.last[row, stage]
        holds = (pieces > 0) & (first <= at) & (at < last)
        extent = np.where(holds, last - first, 0) + np.where(pieces > 1, _FAR, 0)
        better = holds & (extent < best)
        column, best = np.where(better, stage, column), np.where(better, extent, best)
    return column

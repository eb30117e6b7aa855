"""How long each part of a step takes on each rank: the stages, and three parts that are made of them.

``train_batch`` is the whole batch: from when it was fetched, and the device was done with the one before, to the end
of the optimizer, without the fetches of the further batches of an accumulation; ``grad_sync`` is the exposed
communication, for which a rank is blocked in the backward, in the optimizer or outside any stage; ``residual`` is what
neither a stage nor such communication covers. The first two lie over other rows, so they add nothing to the sum of a
step; all else adds up to it, unless stages nest. What comes after the last step, an evaluation and the checkpoint
behind it, is the beginning of a step that never begins: it counts, and is in no step's time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.steps.blocked import blocked
from otel_dltrace.analysis.steps.breakdown import outside_stages, stands_out
from otel_dltrace.analysis.steps.table import NEVER_BEGUN, NEVER_ENDED, RESIDUAL, StepTable
from otel_dltrace.analysis.steps.untold import steps_with_operations
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP

TRAIN_BATCH = "train_batch"
GRAD_SYNC = "grad_sync"
OVERLAPPING = (TRAIN_BATCH, GRAD_SYNC)
_BATCH_STAGES = (s.TO_DEVICE, s.PREPARE_BATCH, s.FORWARD, s.BACKWARD, s.OPTIMIZER)
_SYNC_STAGES = (s.BACKWARD, s.OPTIMIZER)
Times = tuple[Column, Column]
"""Of each step: the ns, and how many pieces there were, or whether there was one."""


@dataclass(frozen=True, slots=True)
class Timing:
    """One part on one rank, in ns over the *steps* steps in which it happened, in *pieces* pieces.

    *share* is its part of all the rank's steps, the ones without it too; what came after the last is not in it.
    """

    rank: int
    steps: int
    pieces: int
    total: int
    mean: int
    p50: int
    p99: int
    share: float


@dataclass(frozen=True, slots=True)
class StageTimings:
    """One part of the step on the *ranks* that have it; *overlaps* says that its time is in other parts too.

    *slowest* is the rank that spends most on it, by *excess* ns per step above the median of the others
    (steps and ranks without it count as 0); None for a single rank. *stands_out*: that is more than noise.
    """

    name: str
    overlaps: bool
    ranks: tuple[Timing, ...]
    slowest: int | None
    excess: int
    stands_out: bool


@dataclass(frozen=True, slots=True)
class Timings:
    """All parts in the order in which they happen, the residual last, over the steps from *warm_up* on."""

    warm_up: int
    stages: tuple[StageTimings, ...]


def timings(tables: Sequence[StepTable], warm_up: int = 0) -> Timings:
    """Return the timings of each rank of *tables* in the steps from *warm_up* on."""
    after = [_after_the_last(t) for t in tables]
    names = _names(tables, after)
    recorded = [(name, [_recorded(name, *both) for both in zip(tables, after, strict=True)]) for name in names]
    made = [
        (TRAIN_BATCH, [(time, time > 0) for time in map(train_batch, tables)]),
        (GRAD_SYNC, [(grad_sync(t), steps_with_operations(t)) for t in tables]),
        (RESIDUAL, [(t.residual - outside_stages(t), t.steps >= 0) for t in tables]),
    ]
    parts = (_part(name, tables, times, warm_up) for name, times in (*recorded, *made))
    return Timings(warm_up, tuple(part for part in parts if part.ranks))


def train_batch(t: StepTable) -> Column:
    """Return how long the batches of each step were worked on, shape (n,)."""
    columns = [t.stages.index(name) for name in _BATCH_STAGES if name in t.stages]
    there = t.pieces[:, columns] > 0
    first = t.first[:, columns].min(axis=1, initial=NEVER_BEGUN)
    last = t.last[:, columns].max(axis=1, initial=NEVER_ENDED)
    further = np.zeros(len(t.steps), np.int64)
    if s.DATALOADER_NEXT in t.stages:
        fetch = t.stages.index(s.DATALOADER_NEXT)
        pieces = np.maximum(t.pieces[:, fetch], 1)
        further = t.total[:, fetch] * (pieces - 1) // pieces
    # While the device is behind, the host fetches beside it.
    free = _device_is_free(t)
    behind = np.where(free > first, free - first, 0)
    time: Column = np.maximum(last - first - np.maximum(further, behind), 0)
    return np.where(there.any(axis=1), time, 0)


def _device_is_free(t: StepTable) -> Column:
    """Return when the device was done with the step before each, shape (n,); `NEVER_ENDED` if it has told neither's."""
    done: Column = np.where(t.device, t.last, NEVER_ENDED).max(axis=1, initial=NEVER_ENDED)
    free: Column = np.full_like(done, NEVER_ENDED)
    follows = np.flatnonzero((np.diff(t.steps) == 1) & (np.diff(t.part) == 0) & (done[1:] > NEVER_ENDED)) + 1
    free[follows] = done[follows - 1]
    return free


def grad_sync(t: StepTable) -> Column:
    """Return the exposed communication of each step, shape (n,)."""
    columns = [1 + t.stages.index(name) for name in _SYNC_STAGES if name in t.stages]
    time: Column = blocked(t)[:, columns].sum(axis=1) + outside_stages(t)
    return time


def _after_the_last(t: StepTable) -> dict[str, Times]:
    """Return by name the stages of the step that would have followed the last one, shape (k,)."""
    batch = t.batch
    begun = batch["step"][batch.is_kind(s.STEP)]
    later = (batch["step"] > t.steps.max(initial=-1)) & (batch["step"] != NO_STEP)
    left = batch.take(batch.is_kind(s.STAGE) & later & ~np.isin(batch["step"], begun))
    names = left.lookup(lambda d: d.name, object)
    parts = {name: left.take(names == name) for name in dict.fromkeys(names.tolist())}
    return {name: (part["size"].astype(np.int64), np.maximum(part["a"], 1)) for name, part in parts.items()}


def _names(tables: Sequence[StepTable], after: Sequence[Mapping[str, Times]]) -> list[str]:
    """Return the stages in their order, those that only came after the last step behind the others."""
    return [*dict.fromkeys([*(tables[0].stages if tables else ()), *(name for left in after for name in left)])]


def _recorded(name: str, t: StepTable, left: Mapping[str, Times]) -> Times:
    """Return the times of a stage, shape (n + k,): those of its steps, and what is *left* after the last."""
    time = pieces = np.zeros(len(t.steps), np.int64)
    if name in t.stages:
        column = t.stages.index(name)
        time, pieces = t.total[:, column], t.pieces[:, column]
    late, more = left.get(name, (time[:0], pieces[:0]))
    return np.append(time, late), np.append(pieces, more)


def _part(name: str, tables: Sequence[StepTable], times: Sequence[Times], warm_up: int) -> StageTimings:
    steady = [t.steps >= warm_up for t in tables]
    found = [_timing(t, rows, *both) for t, rows, both in zip(tables, steady, times, strict=True)]
    ranks = tuple(timing for timing in found if timing is not None)
    # Nobody is slower than a rank without steps.
    compared = [one for one in zip(tables, steady, found, strict=True) if one[1].any()]
    if len(compared) < 2:
        return StageTimings(name, name in OVERLAPPING, ranks, None, 0, False)
    means = [timing.total / int(rows.sum()) if timing else 0.0 for _, rows, timing in compared]
    worst = int(np.argmax(means))
    others = float(np.median(np.delete(means, worst)))
    slowest, rows, _ = compared[worst]
    marked = stands_out(means[worst], others, float(slowest.duration[rows].mean()))
    return StageTimings(name, name in OVERLAPPING, ranks, slowest.rank, round(means[worst] - others), marked)


def _timing(t: StepTable, steady: Column, time: Column, pieces: Column) -> Timing | None:
    """Return one part on one rank in its *steady* steps and, where *time* (n + k,) goes on, after the last."""
    after = np.ones(len(time) - len(steady), bool)
    there = np.append(steady, after) & (pieces > 0)
    times = time[there]
    if not len(times):
        return None
    total, whole = int(times.sum()), int(t.duration[steady].sum())
    p50, p99 = np.percentile(times, (50, 99))
    mean = round(total / len(times))
    share = int(time[: len(steady)][steady].sum()) / whole if whole else 0.0
    return Timing(
        t.rank, len(times), int(pieces[there].sum()), total, mean, round(float(p50)), round(float(p99)), share
    )

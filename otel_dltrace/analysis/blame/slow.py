"""Which stages were slow, on which rank, and when: against the other ranks, or against the rank's other steps.

Own times are compared, without waiting for others (`own`), so that a rank which only waits is not called slow.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from otel_dltrace.analysis.blame.evidence import elsewhere
from otel_dltrace.analysis.blame.excess import beside_the_rest, others_median, stands_out
from otel_dltrace.analysis.blame.stragglers import MIN_STEPS, excess_threshold
from otel_dltrace.analysis.spread import median
from otel_dltrace.analysis.steps.own import columns, comparable, mixed, own
from otel_dltrace.analysis.steps.table import StepTable, common_steps
from otel_dltrace.analysis.steps.untold import lacks_waits, untold
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column

OUTLIER_SHARE = 0.2
"""A step's stage is an outlier if it exceeds the rank's median by more than this share of the median step ..."""
OUTLIER_LEAST = 5_000_000
"""... and by more than this many ns."""
IN_TURN = 0.4
"""From this share of outliers beside the others on a stage is slow: of two slow in turn no median tells anything."""
Against = Literal["others", "usual"]


@dataclass(frozen=True, slots=True)
class SlowStage:
    """A *stage* that was slow on *rank* in *steps*, of *of* steady steps; ns, medians over the slow steps.

    *own* is its own time, *usual* that of the others in the same steps (*against* the ``others``) or of the
    rank in its median step (*against* the ``usual``). *most* is the excess of the *worst* of the steps, *total* that
    of all of them.
    """

    rank: int
    stage: str
    against: Against
    own: int
    usual: int
    excess: int
    steps: tuple[int, ...]
    of: int
    most: int
    worst: int
    total: int


@dataclass(frozen=True)
class Slow:
    """A slow stage, and the intervals in which it ran, shape (k, 2), in ns of the host's monotonic clock."""

    stage: SlowStage
    windows: Column


@dataclass(frozen=True)
class SlowStages:
    """The slow stages, the most time first, and the ns above which one is: against the others, against its median."""

    stages: tuple[Slow, ...]
    excess: int
    outlier: int


def slow_stages(tables: Sequence[StepTable], warm_up: int) -> SlowStages:
    """Return the slow stages in the steps from *warm_up* on that all ranks closed.

    A stage is slow against the others if it exceeds their median in as many of the steps as
    a straggler does, and by as much, or in two fifths of them by what makes an outlier: its own median may lie between
    its slow steps and the others then, or be a slow one.
    Else it is slow in those steps in which it is an outlier on its own rank.
    """
    steps = common_steps(tables)
    steps = steps[steps >= warm_up]
    excess = excess_threshold(tables, steps)
    if not len(steps):
        return SlowStages((), excess, OUTLIER_LEAST)
    step = median(np.concatenate([t.duration[t.rows_of(steps)] for t in tables]))
    outlier = max(round(OUTLIER_SHARE * step), OUTLIER_LEAST)
    found = _found(tables, steps, excess, outlier)
    return SlowStages(tuple(sorted(found, key=lambda slow: -slow.stage.total)), excess, outlier)


def _found(tables: Sequence[StepTable], steps: Column, excess: int, outlier: int) -> Iterator[Slow]:
    times = np.stack([own(t)[t.rows_of(steps)] for t in tables]).astype(np.float64)
    of_all = comparable(times, mixed(tables, steps))
    others = others_median(of_all) if len(tables) > 1 else times
    usual = np.broadcast_to(np.median(times, axis=1, keepdims=True), times.shape)
    longer = of_all - others
    if any(map(lacks_waits, tables)):  # who was in messages for half as long may have waited for them there
        longer[2 * np.stack([elsewhere(t.batch, steps) for t in tables])[:, :, None] > longer] = 0
    often, outliers = stands_out(longer, excess), times - usual > outlier
    over_others = np.where(often[:, None], longer > excess, longer > outlier)
    often |= (over_others.sum(axis=1) >= IN_TURN * len(steps)) & (len(steps) >= MIN_STEPS)
    others = beside_the_rest(of_all, often) if len(tables) > 1 else times
    for r, t in enumerate(tables):
        hidden = untold(t, steps) if len(tables) > 1 else frozenset()
        for c, name in enumerate(columns(t.stages)):
            if name in hidden:
                continue
            against: Against = "others" if often[r, c] else "usual"
            base = others if often[r, c] else usual
            unseen = (steps == 1) & (name == s.FORWARD and _may_have_buckets(t, len(tables) > 1))
            which = over_others[r, :, c] if often[r, c] else outliers[r, :, c] & ~unseen
            if which.any():
                stage = _stage(t.rank, name, against, times[r, which, c], base[r, which, c], steps[which], len(steps))
                yield Slow(stage, _windows(t, c - 1, steps[which]))


def _stage(rank: int, name: str, against: Against, mine: Column, theirs: Column, steps: Column, of: int) -> SlowStage:
    longer = mine - theirs
    figures, worst = (median(mine), median(theirs), median(longer)), int(longer.argmax())
    total = round(float(longer.sum()))
    most = round(float(longer[worst]))
    return SlowStage(rank, name, against, *figures, tuple(steps.tolist()), of, most, int(steps[worst]), total)


def _may_have_buckets(t: StepTable, beside_others: bool) -> bool:
    """Return whether the rank's gradients are reduced in buckets, as DDP does, as far as is known.

    DDP agrees on how it has rebuilt its buckets in the forward that follows the first step's backward: there ranks wait
    for each other, and nobody records for how long.
    """
    nothing_told = beside_others and not t.batch.is_kind(s.COLLECTIVE, s.P2P).any()
    return nothing_told or bool(t.batch.is_bucket.any())


def _windows(t: StepTable, column: int, steps: Column) -> Column:
    """Return when stage *column* ran in *steps*, sorted; of the residual the whole steps, -1: the time before them."""
    rows = np.flatnonzero(t.rows_of(steps))
    if column < 0:
        windows = np.stack((t.end[np.maximum(rows - 1, 0)], t.start[rows]), axis=1)
    elif column == len(t.stages):
        windows = np.stack((t.start[rows], t.end[rows]), axis=1)
    else:
        windows = np.stack((t.first[rows, column], t.last[rows, column]), axis=1)
    return windows[windows[:, 1] > windows[:, 0]]

"""Where a step's time goes: residual = step - union(stages, operations), warm-up apart.

The rows of one rank add up in the mean: stages + operations + residual = step, unless stages nest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.spread import Spread, spread
from otel_dltrace.analysis.steps.blocked import blocked
from otel_dltrace.analysis.steps.table import BETWEEN, RESIDUAL, StepTable
from otel_dltrace.analysis.steps.throughput import rank_throughput
from otel_dltrace.model.arrays import Column

OPERATIONS = "operations"
"""Communication outside any stage: gradients that the program itself averages, barriers."""
WARM_UP_SLOW = 1.5
"""A leading step that took more than this times the median step belongs to the warm-up."""
WARM_UP_MOST = 10
STANDS_OUT = 1.05
"""A rank's mean is marked as the slowest of its column if it is more than this times the others' median."""
WORTH_A_MARK = 0.01
"""... and by more than this share of its step."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage on one rank; *time* is ns per step, 0 in steps without it, over *pieces* pieces in all."""

    name: str
    pieces: int
    time: Spread


@dataclass(frozen=True, slots=True)
class RankBreakdown:
    """One rank's steps; *between* is the time from a step's end to the next one's begin.

    *operations* is the time blocked in communication outside any stage (None: there is none), *residual* what
    is left of the step.
    Throughput counts the time between steps too; samples are known where every step told its batch size.
    """

    rank: int
    step: Spread
    stages: tuple[StageTime, ...]
    residual: Spread
    between: Spread
    steps_per_second: float
    samples_per_second: float | None
    operations: Spread | None = None


@dataclass(frozen=True, slots=True)
class Breakdown:
    """All ranks: *first* holds the steps below *warm_up*, *steady* the others.

    *slowest* names (column, rank) where one rank stands out; columns are stages, ``step`` and the three rests.
    """

    warm_up: int
    stages: tuple[str, ...]
    steady: tuple[RankBreakdown, ...]
    first: tuple[RankBreakdown, ...]
    slowest: tuple[tuple[str, int], ...]


def breakdown(tables: Sequence[StepTable]) -> Breakdown:
    """Return where the steps of each rank go, the first ones apart from the steady ones."""
    warm_up = num_warm_up_steps(tables)
    steady = tuple(_rank(t, t.steps >= warm_up) for t in tables)
    first = tuple(_rank(t, t.steps < warm_up) for t in tables) if warm_up else ()
    return Breakdown(warm_up, tables[0].stages if tables else (), steady, first, _slowest(steady))


def num_warm_up_steps(tables: Sequence[StepTable]) -> int:
    """Return k: steps 0..k-1 are warm-up.

    Step 0 always (buckets are rebuilt, caches filled), then as long as the slowest rank's step
    stays slower than 1.5 times the median, up to 10 and up to half of the run. 0 where the run
    has less than 3 steps, or begins later.
    """
    steps = np.concatenate([t.steps for t in tables]) if tables else np.zeros(0, np.int64)
    durations = np.concatenate([t.duration for t in tables]) if tables else steps
    ordinals, place = np.unique(steps, return_inverse=True)
    if len(ordinals) < 3 or ordinals[0] != 0:
        return 0
    worst = np.zeros(len(ordinals), np.int64)
    np.maximum.at(worst, place, durations)
    limit = WARM_UP_SLOW * float(np.median(worst))
    k = 1
    while k < min(WARM_UP_MOST, len(ordinals) // 2) and ordinals[k] == k and worst[k] > limit:
        k += 1
    return k


def _rank(t: StepTable, which: Column) -> RankBreakdown:
    operations = outside_stages(t)
    stages = tuple(
        StageTime(name, int(t.pieces[which, column].sum()), spread(t.total[which, column]))
        for column, name in enumerate(t.stages)
    )
    rates = rank_throughput(t, which).rates
    return RankBreakdown(
        t.rank,
        spread(t.duration[which]),
        stages,
        spread((t.residual - operations)[which]),
        spread(t.between[which]),
        rates.steps_per_second,
        rates.samples_per_second,
        spread(operations[which]) if operations[which].any() else None,
    )


def outside_stages(t: StepTable) -> Column:
    """Return the time blocked in communication outside any stage of each step, shape (n,)."""
    time: Column = np.minimum(blocked(t)[:, -1], t.residual)
    return time


def _slowest(ranks: Sequence[RankBreakdown]) -> tuple[tuple[str, int], ...]:
    ranks = [r for r in ranks if r.step.count]  # nobody is slower than a rank without steps
    if len(ranks) < 2:
        return ()
    columns = {stage.name: [r.stages[i].time.mean for r in ranks] for i, stage in enumerate(ranks[0].stages)}
    columns |= {OPERATIONS: [r.operations.mean if r.operations else 0 for r in ranks]}
    columns |= {RESIDUAL: [r.residual.mean for r in ranks], BETWEEN: [r.between.mean for r in ranks]}
    columns["step"] = [r.step.mean for r in ranks]
    found = []
    for name, means in columns.items():
        worst = int(np.argmax(means))
        others = float(np.median([mean for i, mean in enumerate(means) if i != worst]))
        if stands_out(means[worst], others, ranks[worst].step.mean):
            found.append((name, ranks[worst].rank))
    return tuple(found)


def stands_out(worst: float, others: float, step: float) -> bool:
    """Return whether a rank's mean differs from the *others*' median by more than noise, given its mean *step*."""
    return worst > max(STANDS_OUT * others, others + WORTH_A_MARK * step)

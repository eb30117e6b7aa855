"""Which stage holds all ranks up: F_s = max_r sum_{k<=s} d_{r,k}, exposed_s = F_s - F_{s-1}.

This is StageFrontier. The leader of a stage is the rank of the maximum. In each step the exposed times sum to the
slowest rank's exactly, and no two clocks are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.blame.excess import beyond_chance
from otel_dltrace.model.arrays import Column

CLEAR_LEAD, CLEAR_IN_FEW = 0.01, 0.05
"""A lead of less than this share of the step is none; chance makes larger ones where fewer than `FEW` steps had it."""
FEW = 5


@dataclass(frozen=True, slots=True)
class FrontierStage:
    """One stage: *exposed* ns per step in the mean, and who led most often, in *led* of the steps that had it.

    It is *ambiguous* who leads where ranks are about as far (`CLEAR_LEAD`, `CLEAR_IN_FEW`, in the median), as they are
    after a stage in which they wait for each other, or where no rank leads in most of those steps, by more than chance.
    """

    name: str
    exposed: int
    leader: int
    led: int
    ambiguous: bool = False


def frontier(names: Sequence[str], ranks: Sequence[int], durations: Column) -> tuple[FrontierStage, ...]:
    """Return the frontier of *durations*, (ranks, steps, stages) in ns."""
    if not durations.shape[0] or not durations.shape[1]:
        return ()
    sums = np.cumsum(durations, axis=2)
    front = sums.max(axis=0)
    exposed = np.diff(front, axis=1, prepend=0).mean(axis=0)
    leaders = sums.argmax(axis=0)
    lead = _lead(sums)
    had: Column = durations.max(axis=0) > 0
    out = []
    for i, name in enumerate(names):
        # Who led at a checkpoint is told by the steps that had one: in others the stage before it says who is ahead.
        steps = had[:, i] if had[:, i].any() else np.ones(len(front), bool)
        times = np.bincount(leaders[steps, i], minlength=len(ranks))
        led = int(times.max())
        number = int(np.count_nonzero(steps))
        least = (CLEAR_LEAD if number >= FEW else CLEAR_IN_FEW) * np.median(front[steps, -1])
        seldom = led <= min(beyond_chance(number), number - 1)  # of two ranks one always leads in half of the steps
        ambiguous = len(ranks) > 1 and bool(np.median(lead[steps, i]) < least or seldom)
        out.append(FrontierStage(name, round(float(exposed[i])), ranks[int(times.argmax())], led, ambiguous))
    return tuple(out)


def _lead(sums: Column) -> Column:
    """Return by how much the first rank is ahead of the second in each step after each stage."""
    ordered = np.sort(sums, axis=0)
    before = ordered[-2] if len(ordered) > 1 else np.zeros_like(ordered[-1])
    lead: Column = ordered[-1] - before
    return lead

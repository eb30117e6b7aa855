"""What a rank itself does in a step: own = stage - the stages inside it - the time it is blocked by others."""

from collections.abc import Sequence
from itertools import permutations

import numpy as np

from otel_dltrace.analysis.once import once
from otel_dltrace.analysis.steps.blocked import blocked
from otel_dltrace.analysis.steps.table import BETWEEN, RESIDUAL, StepTable
from otel_dltrace.model.arrays import Column

IN_WORDS = {BETWEEN: "time between steps", RESIDUAL: "time outside any stage"}
"""What people call the columns that are no stages."""


def columns(stages: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the columns of `spent` and `own`: what happens from one step's end to the next."""
    return (BETWEEN, *stages, RESIDUAL)


@once
def spent(t: StepTable) -> Column:
    """Return the time that each step spends in each column, (n, S + 2), summing to its length and the gap before it.

    Where a device has times of its own they are beside the host's, and may sum to more.
    """
    stages = _exclusive(t)
    rest = t.duration - stages.sum(axis=1, where=~t.outside)
    rest = np.where(t.device.any(axis=1), np.maximum(rest, 0), rest)
    return np.column_stack((t.between, stages, rest))


@once
def own(t: StepTable) -> Column:
    """Return the rank's own time in each column, (n, S + 2)."""
    own_time: Column = np.maximum(spent(t) - blocked(t), 0)
    return own_time


def mixed(tables: Sequence[StepTable], steps: Column) -> Column:
    """Return a mask (n, S + 2) of what has its device's times on some ranks in *steps*, and the host's on others.

    There it is how long it took to ask the device, which says nothing beside how long that was at it.
    """
    device = np.array([t.device[t.rows_of(steps)] for t in tables])
    there = np.array([t.pieces[t.rows_of(steps)] > 0 for t in tables])
    stages = device.any(axis=0) & (there & ~device).any(axis=0)
    return np.column_stack((np.zeros(len(steps), bool), stages, stages.any(axis=1)))


def comparable(times: Column, of_mixed: Column) -> Column:
    """Return *times* (R, n, S + 2) of which what is *mixed* is alike on all ranks: nobody stands out by it."""
    return np.where(of_mixed, times.min(axis=0), times)


def _exclusive(t: StepTable) -> Column:
    """Return the stages' totals without those of stages inside them, as a copy to the device in ``prepare_batch``.

    The live recording leaves them out itself; other sources tell of extents alone.
    """
    inside = np.zeros_like(t.total)
    for outer, inner in permutations(range(len(t.stages)), 2):
        holds = (t.first[:, outer] <= t.first[:, inner]) & (t.last[:, inner] <= t.last[:, outer])
        longer = (t.total[:, outer] > t.total[:, inner]) | ((t.total[:, outer] == t.total[:, inner]) & (outer < inner))
        both = (t.pieces[:, outer] == 1) & (t.pieces[:, inner] > 0)
        both &= t.device[:, outer] == t.device[:, inner]  # the host goes on while the device is at it
        inside[:, outer] += np.where(holds & longer & both, t.total[:, inner], 0)
    extent = np.where(t.pieces == 1, t.last - t.first, t.total)
    exclusive: Column = np.maximum(np.minimum(t.total, extent - inside), 0)
    return exclusive

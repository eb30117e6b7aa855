"""What speaks for and against each rank: its own time against the others', and who comes last to the collectives."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.collectives import Joined
from otel_dltrace.analysis.own import columns, own, steps_with_operations
from otel_dltrace.analysis.table import StepTable
from otel_dltrace.analysis.waits import arrivals
from otel_dltrace.model.spans import Column

SHARE_OF_STEPS = 0.5


@dataclass(frozen=True)
class Evidence:
    """Arrays over R ranks, n steps and C columns; *last* (n,) is the index of the rank that came last, -1: nobody."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    own: Column
    others: Column
    threshold: int
    opaque: frozenset[int]
    last: Column
    margin: Column
    arrived: int

    @property
    def excess(self) -> Column:
        """By how much each rank's own time exceeds the others', (R, n, C)."""
        excess: Column = self.own - self.others
        return excess

    @property
    def late(self) -> Column:
        """In how many steps each rank's column is over the threshold, (R, C)."""
        steps: Column = (self.excess > self.threshold).sum(axis=1)
        return steps


def evidence(tables: Sequence[StepTable], steps: Column, joined: Joined, threshold: int) -> Evidence:
    """Return what the *steps* that all ranks of *tables* closed say, at a *threshold* in ns."""
    # Own times are found in the whole table, since blocked time before a step needs the step before.
    times = np.stack([own(t)[t.rows_of(steps)] for t in tables]).astype(np.float64)
    names = columns(tables[0].stages)
    ranks = tuple(t.rank for t in tables)
    seen = min(steps_with_operations(t)[t.rows_of(steps)].mean() for t in tables)
    # Backward waits inside C++; where no operation was recorded that wait looks like computing.
    opaque = frozenset(i for i, name in enumerate(names) if name == "backward" and seen <= SHARE_OF_STEPS)
    last, margin, arrived = _last_to_come(joined, ranks, steps)
    return Evidence(ranks, names, times, others_median(times), threshold, opaque, last, margin, arrived)


def _last_to_come(joined: Joined, ranks: tuple[int, ...], steps: Column) -> tuple[Column, Column, int]:
    """Return who came last in each step and by how much (its largest margin), and how many steps have collectives."""
    late = arrivals(joined)
    row = np.searchsorted(steps, joined["step"])
    known = np.isin(joined["step"], steps)
    place = (np.searchsorted(ranks, joined["rank"][known]), row[known])
    sums, most = np.zeros((2, len(ranks), len(steps)), np.int64)
    np.add.at(sums, place, late[known])
    np.maximum.at(most, place, late[known])
    last = np.where(sums.max(axis=0) > 0, sums.argmax(axis=0), -1)
    return last, most[np.maximum(last, 0), np.arange(len(steps))], len(np.unique(row[known]))


def others_median(values: Column) -> Column:
    """Return, for each entry along the first axis, the median of all the others; same shape as *values*."""
    order = np.argsort(values, axis=0, kind="stable")
    place = np.argsort(order, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, 0)
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    below = np.take_along_axis(ordered, low + (place <= low), 0)
    above = np.take_along_axis(ordered, high + (place <= high), 0)
    middle: Column = (below + above) / 2
    return middle

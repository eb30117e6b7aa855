"""Who came last, how often and how late: of the ranks that push one key, or of all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from otel_dltrace.analysis.spread import median
from otel_dltrace.model.arrays import Column

T = TypeVar("T")
_MORE = 2
"""A rank that is, all in all, so many times as late as the one that is last most often is named as well."""


@dataclass(frozen=True, slots=True)
class Last:
    """The rank that came last most often: *times* of *arrivals*, *late* (ns, p50) after the one before it.

    *late_total* and *late_max* (ns) are over all the times that it came last.
    """

    rank: int
    times: int
    arrivals: int
    late: int
    late_total: int
    late_max: int


def of_rank(rank: int, ranks: Column, late: Column) -> Last | None:
    """Return how often and how late *rank* was, given *ranks* and by how much each came *late* (ns, 0 for not last)."""
    mine = late[ranks == rank]
    last = mine[mine > 0]
    figures = median(last), int(last.sum()), int(last.max(initial=0))
    return Last(rank, len(last), len(mine), *figures) if len(mine) else None


def last_of(ranks: Column, late: Column) -> Last | None:
    """Return who of *ranks* came last most often, given by how much each came *late*, 0 for not last."""
    all_of_them = (of_rank(rank, ranks, late) for rank in np.unique(ranks[late > 0]).tolist())
    return max((one for one in all_of_them if one), key=lambda one: (one.times, one.late), default=None)


def later_by_far(ranks: Sequence[T], most: T, total: Callable[[T], int]) -> T | None:
    """Return who of *ranks* was far later in *total* than *most*, the one that is last most often, at least once."""
    latest = max(ranks, key=total)
    return latest if total(latest) >= _MORE * total(most) else None

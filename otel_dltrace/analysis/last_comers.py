"""Who came last, how often and how late: of the ranks that push one key, or of all."""

from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.spread import median
from otel_dltrace.model.arrays import Column


@dataclass(frozen=True, slots=True)
class Last:
    """The rank that came last most often: *times* of *arrivals*, *late* (ns, p50) after the one before it."""

    rank: int
    times: int
    arrivals: int
    late: int


def of_rank(rank: int, ranks: Column, late: Column) -> Last | None:
    """Return how often and how late *rank* was, given *ranks* and by how much each came *late* (ns, 0 for not last)."""
    mine = late[ranks == rank]
    return Last(rank, int((mine > 0).sum()), len(mine), median(mine[mine > 0])) if len(mine) else None


def last_of(ranks: Column, late: Column) -> Last | None:
    """Return who of *ranks* came last most often, given by how much each came *late*, 0 for not last."""
    all_of_them = (of_rank(rank, ranks, late) for rank in np.unique(ranks[late > 0]).tolist())
    return max((one for one in all_of_them if one), key=lambda one: (one.times, one.late), default=None)

"""Who makes the others wait in a run without steps: the rank that comes last to its collectives, time and again.

It is named if its coming last is most of what ranks wait for each other, and costs them a part of the time that
counts, if it was not itself waiting for a message meanwhile, and if no other host's clock says so alone.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from otel_dltrace.analysis.collectives.aligned import is_aligned, telling
from otel_dltrace.analysis.collectives.joined import Joined, lateness_unknown
from otel_dltrace.analysis.collectives.waits import RankWaits, arrivals, waits
from otel_dltrace.analysis.intervals import union
from otel_dltrace.analysis.spread import median, spread
from otel_dltrace.analysis.steps.table import StepTable
from otel_dltrace.model.arrays import Column

MOST_OF_IT = 0.75
SHARE_OF_TIME = 0.05
LEAST_TIMES = 5
_NEVER = np.iinfo(np.int64).min


def last_comer(tables: Sequence[StepTable], joined: Joined) -> RankWaits | None:
    """Return the rank that alone has the others wait in *joined*; None if there is none, or none can be told.

    Where it is far behind in some of them only, these alone count as those to which it came last.
    """
    joined = telling(joined)
    if not len(joined):
        return None
    ranks = waits(joined).ranks
    worst = max(ranks, key=lambda r: r.late.total)
    alone = worst.late.total > MOST_OF_IT * sum(r.late.total for r in ranks)
    again = _again(arrivals(joined)[joined["rank"] == worst.rank])
    named = alone and len(again) > 0 and _costs_time(joined, worst.rank) and _by_its_own_host(joined, worst)
    if not named or 2 * _elsewhere(tables, worst.rank) > worst.late.total:
        return None
    return replace(worst, last=len(again), late=spread(again))


def _again(late: Column) -> Column:
    """Return of the times by which a rank comes *late* those that it does time and again, and that make most of it.

    All of them, or those above the mean one, as where each tenth turn takes long; none where it is by a stall or two.
    """
    late = late[late > 0]
    if not len(late):
        return late
    for some in (late, late[late > late.mean()]):
        if len(some) >= LEAST_TIMES and median(some) * len(some) > late.sum() / 2:
            return some
    return late[:0]


def _costs_time(joined: Joined, rank: int) -> bool:
    """Return whether the others waited for *rank* in a part of the time that counts, be it in several at once."""
    late = np.where(joined["rank"] == rank, arrivals(joined), 0)
    came = joined["start"][late > 0]
    whole = int(joined["end"].max() - joined["start"].min())
    return union(came - late[late > 0], came) > SHARE_OF_TIME * whole


def _by_its_own_host(joined: Joined, worst: RankWaits) -> bool:
    """Return whether ranks of its own host came before it as well: hosts' clocks that differ would look alike."""
    hosts, starts = joined["host"], joined["start"]
    if (hosts == hosts[0]).all() or is_aligned(joined).all():
        return True
    mine = (joined["rank"] == worst.rank) & (arrivals(joined) > 0)
    beside = (hosts == hosts[mine][0]) & (joined["rank"] != worst.rank)
    before = joined.to_rows(joined.reduce(np.maximum, np.where(beside, starts, _NEVER)))[mine]
    ahead = (starts[mine] - before)[before > _NEVER]
    return len(ahead) > 0 and 2 * median(ahead) > worst.late.p50


def _elsewhere(tables: Sequence[StepTable], rank: int) -> int:
    """Return for how many ns *rank* was in messages, and in collectives of which nobody knows who came late to them."""
    of_rank = [t.batch for t in tables if t.rank == rank]
    return sum(int((batch["end"] - batch["start"])[lateness_unknown(batch)].sum()) for batch in of_rank)

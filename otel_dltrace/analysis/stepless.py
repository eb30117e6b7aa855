"""Who makes the others wait in a run without steps: the rank that comes last to its collectives, time and again.

It is named if its coming last is most of what ranks wait for each other, and costs them a part of the time that
counts, if it was not itself waiting for a message meanwhile, and if no other host's clock says so alone.
"""

from collections.abc import Sequence

import numpy as np

from otel_dltrace.analysis.aligned import is_aligned, telling
from otel_dltrace.analysis.collectives import Joined, lateness_unknown
from otel_dltrace.analysis.shares import union
from otel_dltrace.analysis.spread import median
from otel_dltrace.analysis.table import StepTable
from otel_dltrace.analysis.waits import RankWaits, arrivals, waits

MOST_OF_IT = 0.75
SHARE_OF_TIME = 0.05
LEAST_TIMES = 5
_NEVER = np.iinfo(np.int64).min


def last_comer(tables: Sequence[StepTable], joined: Joined) -> RankWaits | None:
    """Return the rank that alone has the others wait in *joined*; None if there is none, or none can be told."""
    joined = telling(joined)
    if not len(joined):
        return None
    ranks = waits(joined).ranks
    worst = max(ranks, key=lambda r: r.late.total)
    alone = worst.late.total > MOST_OF_IT * sum(r.late.total for r in ranks)
    again = worst.last >= LEAST_TIMES and worst.late.p50 * worst.last > worst.late.total / 2
    named = alone and again and _costs_time(joined, worst.rank) and _by_its_own_host(joined, worst)
    return worst if named and 2 * _elsewhere(tables, worst.rank) <= worst.late.total else None


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

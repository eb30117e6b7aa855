"""Who waits for whom in a collective (spec: analyses A; Scalasca's Wait at N x N, Patterns_gen.cpp).

With b_r, e_r the begin and end on rank r, L = max b_r and E = min e_r:
L'_r = min(L, e_r), E'_r = max(E, L'_r), wait_r = max(0, L'_r - b_r), completion_r = max(0, e_r - E'_r),
core_r = the rest, so that wait + core + completion = duration.
"""

import re
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.collectives import Joined
from otel_dltrace.analysis.spread import Spread, spread
from otel_dltrace.model import semconv as s
from otel_dltrace.model.spans import Column

_SYNCHRONISING = re.compile(
    r"_?(mpi_?)?i?(monitored_?)?(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier|push_?pull)(?!.*[vw]$)",
    re.IGNORECASE,
)
"""Operations in which no rank is done before all have come; an all-to-all with sizes may send nothing."""


@dataclass(frozen=True, slots=True)
class RankWaits:
    """One rank, ns over all its analysed collectives; *blocked* is the wait in calls that block the program.

    The three parts are None where they say less than the clocks: the mean wait is below the uncertainty.
    *last* is how often the rank came last, *late* by how much: after the one before it.
    """

    rank: int
    collectives: int
    duration: int
    wait: int | None
    core: int | None
    completion: int | None
    blocked: int | None
    arrivals: int
    last: int
    late: Spread


@dataclass(frozen=True, slots=True)
class Waits:
    """All ranks.

    *analysed* collectives have the end of the work on all ranks (``host_done``) and synchronise; of all
    *joined* ones the begins are compared, for a begin is exact whatever its end means. *violations*
    counts ranks that were done before the last one came, *violation* by how much at most: then clocks
    disagree by at least that much, and it counts as uncertainty.
    """

    joined: int
    analysed: int
    incomplete: int
    other_ends: int
    violations: int
    violation: int
    uncertainty: int
    ranks: tuple[RankWaits, ...]


def waits(joined: Joined) -> Waits:
    """Return who waits, and who comes last, in the collectives that all ranks of a group took part in."""
    synchronising = joined.take(np.array([is_synchronising(d.name) for d in joined.descriptors], bool))
    known = synchronising.reduce(np.minimum, _end_is_known(synchronising).astype(np.int64)) == 1
    analysed = synchronising.take(known)
    latest = analysed.to_rows(analysed.reduce(np.maximum, analysed["start"]))
    early = np.maximum(latest - analysed["end"], 0)
    # On one host a rank that is done too early says that the operation did not synchronise, not that clocks differ.
    across = analysed.to_rows(analysed.uncertainty) > 0
    violation = int(early[across].max(initial=0))
    uncertainty = max(int(joined.uncertainty.max(initial=0)), violation)
    late = arrivals(joined, violation)
    return Waits(
        len(joined),
        len(analysed),
        joined.incomplete,
        int((~known).sum()),
        int((early > 0).sum()),
        violation,
        uncertainty,
        tuple(_rank(rank, analysed, joined, late, violation) for rank in np.unique(joined["rank"]).tolist()),
    )


def is_synchronising(operation: str) -> bool:
    """Return whether no rank can end *operation* before all have begun it (N x N)."""
    return _SYNCHRONISING.match(operation) is not None


def split(begin: Column, end: Column, latest: Column, earliest_end: Column) -> tuple[Column, Column, Column]:
    """Return (wait, core, completion) of each row; *latest* is L, *earliest_end* is E of its collective."""
    reached = np.minimum(latest, end)
    left = np.maximum(earliest_end, reached)
    wait = np.maximum(0, reached - begin)
    completion = np.maximum(0, end - left)
    return wait, end - begin - wait - completion, completion


def arrivals(joined: Joined, violation: int = 0) -> Column:
    """Return by how much each row came after all others of its collective, shape (n,).

    0 where it was not the last, or the last by no more than the clocks' uncertainty.
    """
    starts = joined["start"]
    last = starts == joined.to_rows(joined.reduce(np.maximum, starts))
    second = joined.reduce(np.maximum, np.where(last, np.iinfo(np.int64).min, starts))
    alone = joined.reduce(np.add, last.astype(np.int64)) == 1
    margin = np.where(last & joined.to_rows(alone), starts - joined.to_rows(np.where(alone, second, 0)), 0)
    return np.where(margin > _limit(joined, violation), margin, 0)


def _end_is_known(joined: Joined) -> Column:
    return (joined["source"] == s.Source.HOST_DONE) & (joined["flags"] & (s.Flag.TRUNCATED | s.Flag.ERROR) == 0)


def _limit(joined: Joined, violation: int) -> Column:
    """Return what two begins of each row's collective must differ by to be told apart, shape (n,)."""
    return joined.to_rows(np.where(joined.uncertainty > 0, np.maximum(joined.uncertainty, violation), 0))


def _rank(rank: int, analysed: Joined, joined: Joined, late: Column, violation: int) -> RankWaits:
    mine = analysed["rank"] == rank
    begin, end = analysed["start"], analysed["end"]
    latest = analysed.to_rows(analysed.reduce(np.maximum, begin))
    earliest = analysed.to_rows(analysed.reduce(np.minimum, end))
    wait, core, completion = (part[mine] for part in split(begin, end, latest, earliest))
    blocking = analysed["flags"][mine] & s.Flag.ASYNC == 0
    figures = [int(part.sum()) for part in (wait, core, completion, wait[blocking])]
    resolved = figures[0] >= int(_limit(analysed, violation)[mine].sum())
    own = late[joined["rank"] == rank]
    return RankWaits(
        rank,
        len(wait),
        int((end - begin)[mine].sum()),
        *(figures if resolved else (None, None, None, None)),
        len(own),
        int((own > 0).sum()),
        spread(own[own > 0]),
    )

"""Who waits for whom in a collective (Scalasca's Wait at N x N, Patterns_gen.cpp).

With b_r, e_r the begin and end on rank r, L = max b_r and E = min e_r:
L'_r = min(L, e_r), E'_r = max(E, L'_r), wait_r = max(0, L'_r - b_r), completion_r = max(0, e_r - E'_r),
core_r = the rest, so that wait + core + completion = duration.
"""

from dataclasses import dataclass, replace

import numpy as np

from otel_dltrace.analysis.collectives.aligned import aligned, by_devices
from otel_dltrace.analysis.collectives.joined import Joined
from otel_dltrace.analysis.spread import Spread, spread
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column


@dataclass(frozen=True, slots=True)
class RankWaits:
    """One rank, ns over all its analysed collectives; *blocked* is the wait in calls, ``wait`` too, that block it.

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

    *analysed* collectives have the end of the work on all ranks (``host_done``, or devices' times) and synchronise; of
    all *joined* ones the begins are compared, for a begin is exact whatever its end means. *violations*
    counts ranks that were done before the last one came, *violation* (ns) by how much at most: if they are on
    different hosts, their clocks disagree by at least that much, and by how much at most counts as uncertainty (ns),
    which is the mean one where it differs.
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
    joined = widen(joined)
    analysed = with_known_ends(joined)
    early = _early(analysed)
    late, parts = arrivals(joined), _parts(analysed)
    return Waits(
        len(joined),
        len(analysed),
        joined.incomplete,
        int(joined.synchronises.sum()) - len(analysed),
        int((early > 0).sum()),
        int(early.max(initial=0)),
        _usual(analysed.uncertainty if len(analysed) else joined.uncertainty),
        tuple(_rank(rank, analysed, parts, joined, late) for rank in np.unique(joined["rank"]).tolist()),
    )


def _usual(uncertainty: Column) -> int:
    """Return the mean of those that are unsure at all."""
    unsure = uncertainty[uncertainty > 0]
    return round(float(unsure.mean())) if len(unsure) else 0


def widen(joined: Joined) -> Joined:
    """Return *joined* with the uncertainty across hosts raised to what clocks that are seen to be off may be off by.

    They are where a rank is done before the last one came. As all are done at about the same time, they are off by
    what the ends lie apart, and by no more than it took the last one besides.
    On one host a rank that is done too early says that the operation did not synchronise, not that clocks differ.
    What devices were at is `aligned` instead.
    """
    wrong = disagreeing(joined)
    if not len(wrong):
        return aligned(joined)
    apart = wrong.reduce(np.maximum, wrong["end"]) - wrong.reduce(np.minimum, wrong["end"])
    is_last = wrong["start"] == wrong.to_rows(wrong.reduce(np.maximum, wrong["start"]))
    core = wrong.reduce(np.maximum, np.where(is_last, wrong["end"] - wrong["start"], 0))
    off = max(int(np.median(apart + core)), int(_early(wrong).max()))
    is_unsure = joined.apart & (joined.uncertainty > 0)
    return aligned(
        replace(joined, uncertainty=np.where(is_unsure, np.maximum(joined.uncertainty, off), joined.uncertainty))
    )


def disagreeing(joined: Joined) -> Joined:
    """Return those on several hosts in which a rank was done before the last one came, by clocks that must be off."""
    analysed = with_known_ends(joined)
    early = analysed.reduce(np.maximum, _early(analysed))
    return analysed.take(analysed.apart & (analysed.uncertainty > 0) & (early > 0))


def with_known_ends(joined: Joined) -> Joined:
    """Return those that synchronise, and whose end is that of the work on all ranks: the host's, or the device's."""
    whole = joined.reduce(np.logical_and, joined["flags"] & (s.Flag.TRUNCATED | s.Flag.ERROR) == 0)
    by_hosts = joined.reduce(np.logical_and, joined["source"] == s.Source.HOST_DONE)
    return joined.take(joined.synchronises & whole & (by_hosts | by_devices(joined)))


def _early(joined: Joined) -> Column:
    """Return by how much each row was done before the last rank had come, which cannot be, shape (n,).

    What a device does is known in time as well as its clock is tied, which says nothing of the hosts'.
    """
    latest = joined.to_rows(joined.reduce(np.maximum, joined["start"]))
    early: Column = np.maximum(latest - joined["end"], 0)
    return np.where(joined.to_rows(by_devices(joined)), 0, early)


def split(begin: Column, end: Column, latest: Column, earliest_end: Column) -> tuple[Column, Column, Column]:
    """Return (wait, core, completion) of each row; *latest* is L, *earliest_end* is E of its collective."""
    reached = np.minimum(latest, end)
    left = np.maximum(earliest_end, reached)
    wait = np.maximum(0, reached - begin)
    completion = np.maximum(0, end - left)
    return wait, end - begin - wait - completion, completion


def arrivals(joined: Joined) -> Column:
    """Return by how much each row came after all others of its collective, shape (n,).

    0 where it was not the last, or the last by no more than the clocks' uncertainty.
    """
    starts = joined["start"]
    last = starts == joined.to_rows(joined.reduce(np.maximum, starts))
    second = joined.reduce(np.maximum, np.where(last, np.iinfo(np.int64).min, starts))
    alone = joined.reduce(np.add, last.astype(np.int64)) == 1
    margin = np.where(joined.to_rows(alone), starts - joined.to_rows(np.where(alone, second, 0)), 0)
    late: Column = np.where(margin > joined.to_rows(joined.uncertainty), margin, 0)
    return late


def _parts(analysed: Joined) -> Column:
    """Return (wait, core, completion, blocked wait) of each row, shape (4, n)."""
    begin, end = analysed["start"], analysed["end"]
    latest = analysed.to_rows(analysed.reduce(np.maximum, begin))
    earliest = analysed.to_rows(analysed.reduce(np.minimum, end))
    blocked = np.maximum(np.minimum(latest, end) - np.maximum(begin, analysed["blocked"]), 0)
    return np.stack((*split(begin, end, latest, earliest), blocked))


def _rank(rank: int, analysed: Joined, parts: Column, joined: Joined, late: Column) -> RankWaits:
    mine = analysed["rank"] == rank
    wait, core, completion, blocked = parts[:, mine]
    resolved = int(wait.sum()) >= int(analysed.to_rows(analysed.uncertainty)[mine].sum())
    own = late[joined["rank"] == rank]
    whole = RankWaits(
        rank,
        len(wait),
        int((wait + core + completion).sum()),
        int(wait.sum()),
        int(core.sum()),
        int(completion.sum()),
        int(blocked.sum()),
        len(own),
        int((own > 0).sum()),
        spread(own[own > 0]),
    )
    return whole if resolved else replace(whole, wait=None, core=None, completion=None, blocked=None)

"""Who is to blame, given what speaks for and against each rank; or why that cannot be told.

Where collectives are joined their begins, which are exact, must agree: the accused comes late to them. Else, of ranks
whose excess is about the same, the one where it shows earliest is to blame, since a wait that nobody recorded comes
after its cause.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from otel_dltrace.analysis.blame.evidence import Evidence, beside_who_waits, most_by_any_clock
from otel_dltrace.analysis.blame.excess import beyond_chance, stands_out
from otel_dltrace.analysis.spread import median
from otel_dltrace.analysis.steps.own import IN_WORDS
from otel_dltrace.analysis.steps.table import RESIDUAL
from otel_dltrace.model.arrays import Column

ABOUT_THE_SAME = 0.75
NEARLY_ALWAYS = 0.75
_OUTSIDE = "the part of the step outside any stage"
Verdict = Literal["straggler", "none", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that makes the others wait; medians in ns per step.

    *own* is its own time in *stage* ("" if no stage of its own stands out), *others* the median of the
    others', *excess* the median difference, over the threshold in *slow* of the steps. In *late* of the
    *arrivals* steps with joined collectives that tell it came late to them, by *lateness* against the others' median.
    *of_phase* of the excess is in *phase*, which the program marks, if that is most of it.
    In a run without steps *arrivals* are collectives: to *late* of them it came last.
    """

    rank: int
    stage: str
    own: int
    others: int
    excess: int
    slow: int
    late: int
    arrivals: int
    lateness: int
    phase: str = ""
    of_phase: int = 0


Judgement = tuple[Verdict, str, tuple[Straggler, ...]]


def cannot_tell(reason: str) -> Judgement:
    """Return that it cannot be told, and why."""
    return "cannot tell", reason, ()


def judge(e: Evidence) -> Judgement:
    """Return the verdict on *e*, why it cannot be told, and who the stragglers are, the worst one first."""
    longer = np.where(stands_out(e.excess, e.threshold), np.median(e.excess, axis=1), 0)
    excess = longer.copy()
    excess[:, list(e.opaque)] = 0
    if e.blind:  # who was in messages for half as long may have waited for them there
        excess[2 * np.median(e.elsewhere, axis=1)[:, None] > excess] = 0
    scores = excess.sum(axis=1)
    late = e.came_late.sum(axis=1)
    enough = min(beyond_chance(e.arrived), e.arrived - 1)  # all of them do, also where there is but one
    confirmed = (scores > 0) & (late > enough) & e.told
    if confirmed.any():
        return _named(e, excess, sorted(np.flatnonzero(confirmed).tolist(), key=lambda r: -scores[r]))
    last = _always_late(e, late)
    if last is not None and longer[last].any() and not _may_be_the_clocks(e, last):
        return "straggler", "", (_straggler(e, last, int(longer[last].argmax())),)
    if scores.max() > 0:
        rank = _earliest(scores, excess)
        column = int(excess[rank].argmax())
        if e.arrived and e.all[rank]:
            return cannot_tell(_contradiction(e, rank, column, int(late[rank])))
        if other := _may_wait_for(e, rank, column, longer):
            return cannot_tell(f"{_longer(e, *other)}, {_unseen(e)}")
        return _named(e, excess, [rank])
    return _without_a_stage(e, last, longer)


def _named(e: Evidence, excess: Column, ranks: Sequence[int]) -> Judgement:
    """Return that *ranks* are the stragglers, where their *excess* is most, told beside those that have none there."""
    e = beside_who_waits(e, excess > 0, ranks)
    return "straggler", "", tuple(_straggler(e, r, int(excess[r].argmax())) for r in ranks)


def _always_late(e: Evidence, late: Column) -> int | None:
    """Return who came *late* in so many steps, and by so much, that its arrivals alone tell; None if nobody did.

    Who was in messages for half as long as it came late may have waited itself, as the first of a pipeline does, and so
    has who was done with the collective before as much later, unless what it computes in all is longer by half of that.

    Who waits for a rank in one group comes late with it to those of another: of several it is one that computes for
    longer, else the one that comes later in all.
    """
    if not late.any():
        return None
    always = e.told & (late > beyond_chance(e.arrived, NEARLY_ALWAYS)) & _later_than_chance(e)
    if not always.any():
        return None
    computing = np.delete(e.excess, list(e.opaque), axis=2).sum(axis=2)
    if e.blind:
        computing[:] = 0
    figures = (e.most, np.maximum(e.elsewhere, e.released), computing, e.summed)
    found: list[tuple[bool, int, int]] = []
    for rank in np.flatnonzero(always).tolist():
        lateness, waited, computes, summed = (median(of[rank, e.came_late[rank]]) for of in figures)
        computes_longer = 2 * computes >= lateness
        if lateness > e.threshold and (computes_longer or 2 * waited <= lateness):
            found.append((computes_longer, summed, -rank))
    return -max(found)[2] if found else None


def _later_than_chance(e: Evidence) -> Column:
    """Return a mask (R,) of the ranks that come later than one of so many does by chance, where anybody is late."""
    late = e.summed[:, e.summed.any(axis=0)]
    return stands_out(late[:, :, None], 0)[:, 0]


def _earliest(scores: Column, excess: Column) -> int:
    """Return the rank with the most excess; of those with about as much the one where it shows earliest."""
    best: list[int] = np.flatnonzero(scores >= ABOUT_THE_SAME * scores.max()).tolist()
    # The time between steps comes before a step, but what a rank waits for there began in the step before.
    when = [*range(1, excess.shape[1]), 0]
    return min(best, key=lambda r: (min(when.index(c) for c in np.flatnonzero(excess[r]).tolist()), -scores[r]))


def _may_wait_for(e: Evidence, rank: int, column: int, longer: Column) -> tuple[int, int] | None:
    """Return whom *rank* may wait for in *column*, and in which that one computes meanwhile; None if nobody is known.

    Where no operation is recorded, or no wait, ranks may wait anywhere. But who waits for *rank* is done with that when
    *rank* is.
    """
    if not e.blind:
        return None
    for other, stage in np.argwhere(longer >= ABOUT_THE_SAME * longer[rank, column]).tolist():
        apart = np.median(np.abs(e.until[other, :, stage] - e.until[rank, :, stage]))
        if other != rank and apart > longer[other, stage] / 2:
            return other, stage
    return None


def _without_a_stage(e: Evidence, last: int | None, longer: Column) -> Judgement:
    """Judge by who always comes *last*, without a stage that tells why; or say what cannot be told from waiting."""
    if last is not None:
        if _may_be_the_clocks(e, last):
            lateness = median(e.most[last][e.came_late[last]]) / 1e6
            return cannot_tell(
                f"rank {e.ranks[last]} seems to come {lateness:.1f} ms late to the collectives, but no stage of "
                "its own stands out, and the clocks of the hosts may be that far apart"
            )
        return "straggler", "", (_straggler(e, last, -1),)
    if longer.any():
        suspect, column = divmod(int(longer.argmax()), longer.shape[1])
        return cannot_tell(f"{_longer(e, suspect, column)}, {_unseen(e)}")
    may_hide = e.opaque | {e.names.index(RESIDUAL)} if e.blind else e.opaque  # of MPI programs all waits are there
    hiding = [column for column in sorted(may_hide) if np.median(e.own[:, :, column], axis=1).max() > e.threshold]
    if hiding and not e.arrived:
        stages = " and ".join(_OUTSIDE if e.names[column] == RESIDUAL else e.names[column] for column in hiding)
        return cannot_tell(f"no rank takes longer than the others by itself, {_unseen(e)} in {stages}")
    return "none", "", ()


def _may_be_the_clocks(e: Evidence, rank: int) -> bool:
    """Return whether hosts' clocks that differ would look alike: the other ranks of its host come as late.

    In all steps, for clocks that are off hide those of them in which the rank did not come late.
    """
    if len(set(e.hosts)) < 2:
        return False
    most = most_by_any_clock(e)
    beside = [r for r, host in enumerate(e.hosts) if host == e.hosts[rank] and r != rank]
    ahead = (most[rank] - most[beside].max(axis=0))[most.any(axis=0)] if beside else np.zeros(0)
    return median(ahead) <= e.threshold


def _unseen(e: Evidence) -> str:
    return f"but without {e.lacking} waiting cannot be told from computing"


def _longer(e: Evidence, rank: int, column: int) -> str:
    longer = np.median(e.excess[rank, :, column]) / 1e6
    name = IN_WORDS.get(e.names[column], e.names[column])
    return f"rank {e.ranks[rank]}'s {name} takes {longer:.1f} ms longer than the others'"


def _contradiction(e: Evidence, rank: int, column: int, late: int) -> str:
    return f"{_longer(e, rank, column)}, but it came late to the collectives in only {late} of {e.arrived} steps"


def _straggler(e: Evidence, rank: int, column: int) -> Straggler:
    late = e.came_late[rank] & e.told[rank]
    arrived = int(late.sum()), e.arrived if e.told[rank] else 0, median(e.most[rank][late])
    if column < 0:
        return Straggler(e.ranks[rank], "", 0, 0, 0, 0, *arrived)
    own, others = median(e.own[rank, :, column]), median(e.others[rank, :, column])
    excess, slow = median(e.excess[rank, :, column]), int(e.late[rank, column])
    return Straggler(e.ranks[rank], e.names[column], own, others, excess, slow, *arrived)

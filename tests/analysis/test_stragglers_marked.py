"""Stragglers by the phases that a program marks, and what is said of them beside collectives and messages."""

from dataclasses import replace

import pytest

from otel_dltrace.analysis.blame.marked import PhaseRow, RankPhase
from otel_dltrace.analysis.compose import analyse
from otel_dltrace.analysis.spread import Spread
from otel_dltrace.model.operation import OTHER, Descriptor
from otel_dltrace.model.semconv import GC, P2P, PHASE, Flag
from otel_dltrace.model.spans import SpanBatch
from tests.support.runs import MS, Rank, rendered


def marking(where: str, world: int = 2) -> list[SpanBatch]:
    """Return ranks that mark phases: ``rollout`` is 20 ms longer on all but the first, in forward or *where* else."""
    ranks = [Rank(r, world) for r in range(world)]
    for n in range(12):
        for r, rank in enumerate(ranks):
            begin, took = 100 * n, 22 if r else 2
            forward = (begin + 1, begin + 2 + took) if where == "forward" else (begin + 24, begin + 25)
            rank.step(n, begin, begin + 50).stage(n, "forward", *forward)
            rank.add(Descriptor(PHASE, "whole"), n, begin, begin + 49)
            rank.add(Descriptor(PHASE, "rollout"), n, begin + 1, begin + 1 + took)
            rank.collective(n, begin + (46 if r else 26), begin + 49, n + 1)
    return [rank.batch() for rank in ranks]


def test_a_phase_in_which_ranks_wait_for_each_other_is_named_by_what_they_do_in_it():
    """It ends everywhere at the same time: beside rank 0, which waits in it for 20 ms, rank 1 computes in it."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(12):
        for r, rank in enumerate(ranks):
            begin = 100 * n
            rank.step(n, begin, begin + 50).stage(n, "prepare_batch", begin, begin + 35)
            rank.add(Descriptor(PHASE, "whole"), n, begin, begin + 34)
            rank.add(Descriptor(PHASE, "rollout"), n, begin + 1, begin + 33)
            rank.collective(n, begin + 10 + 20 * r, begin + 33, n + 1)
    (found,) = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert (found.rank, found.stage, found.phase, found.of_phase) == (1, "prepare_batch", "rollout", 20 * MS)


@pytest.mark.parametrize("where", ["forward", "residual"])
def test_a_phase_that_the_program_marks_is_named_where_it_makes_a_rank_slow(where):
    """Of those in the stage that stands out; what is as long on all ranks is not."""
    report = analyse(marking(where))
    (found,) = report.stragglers.found
    assert (found.rank, found.stage, found.phase, found.of_phase) == (1, where, "rollout", 20 * MS)
    whole, rollout = report.phases
    assert (whole.name, whole.time.mean, rollout.count) == ("whole", 49 * MS, (12, 12))
    assert [(one.rank, one.per_step) for one in rollout.ranks] == [(0, 2 * MS), (1, 22 * MS)]
    text = rendered(report)
    assert "20.0 ms of it in its phase rollout" in " ".join(text.split())
    (row,) = (line.split() for line in text.splitlines() if line.startswith("rollout "))
    assert row == ["rollout", "12", "12.0", "22.0", "2.00..22.0", "1"]


@pytest.mark.parametrize(("longer", "told"), [(8, ("", 0)), (12, ("part", 12 * MS)), (25, ("part", 20 * MS))])
def test_a_phase_is_behind_as_much_of_a_slow_stage_as_it_is_longer(longer, told):
    """Half of it at least, and no more than all: what else is in the stage may be shorter."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(12):
        for r, rank in enumerate(ranks):
            begin = 100 * n
            rank.step(n, begin, begin + 60).stage(n, "forward", begin, begin + 30 + 20 * r)
            rank.add(Descriptor(PHASE, "part"), n, begin, begin + 2 + longer * r)
            rank.collective(n, begin + 30 + 20 * r, begin + 55, n + 1)
    (found,) = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert (found.rank, found.stage, found.excess, (found.phase, found.of_phase)) == (1, "forward", 20 * MS, told)


def test_a_phase_that_makes_two_of_three_slow_is_told_beside_the_third():
    """As the stage is in which it is."""
    found = analyse(marking("forward", 3)).stragglers.found
    assert [(one.rank, one.excess, one.of_phase) for one in found] == [(1, 20 * MS, 20 * MS), (2, 20 * MS, 20 * MS)]


def test_phases_are_those_that_the_program_marks_and_that_ended():
    """Waits, collections and ends are ours, and of what was cut off nobody knows how long it would have been."""
    rank = Rank().step(0, 0, 10).wait(0, 1, 2).add(Descriptor(PHASE, GC), 0, 2, 3)
    rank.add(Descriptor(PHASE, "mine"), 0, 3, 5).add(Descriptor(PHASE, "mine"), 0, 6, 10, flags=Flag.TRUNCATED)
    time = Spread(1, 2 * MS, 2 * MS, 2 * MS, 2 * MS, 2 * MS)
    assert analyse([rank.batch()]).phases == (PhaseRow("mine", (1, 1), time, (RankPhase(0, 1, 2 * MS),)),)


def test_what_found_no_room_among_the_names_is_told():
    """A program that makes names up gets `other` for what is new, whatever it is: the report says how much it is."""
    rank = Rank().step(0, 0, 50)
    rank.add(Descriptor(PHASE, "rollout"), 0, 1, 3).add(OTHER, 0, 3, 10).add(OTHER, 0, 10, 20)
    batch = rank.batch()
    nameless = replace(batch, descriptors=batch.descriptors[:2])
    told = [[(row.name, row.count) for row in analyse([one]).phases] for one in (batch, nameless)]
    assert told == [[("other", (2, 2)), ("rollout", (1, 1))]] * 2


@pytest.mark.parametrize("unknown", ["", "collective", "message"])
def test_collectives_contradict_only_if_they_are_all_that_ranks_wait_in(unknown):
    """A rank that is slow, and comes in time to those that tell, may be late to those that do not."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            begin = 100 * n
            rank.step(n, begin, begin + 40).stage(n, "forward", begin, begin + (31 if r else 11))
            rank.collective(n, begin + 1, begin + 1, n + 1)
            if unknown == "collective":
                rank.collective(n, begin + (31 if r else 11), begin + 32, 0, tensor="bucket 0")
            if unknown == "message":
                message = Descriptor(P2P, "send" if r else "recv", backend="gloo", group="0")
                rank.add(message, n, begin + (31 if r else 11), begin + 32, seq=n + 1, a=1 - r)
    found = analyse([rank.batch() for rank in ranks]).stragglers
    assert found.verdict == ("straggler" if unknown else "cannot tell")
    assert [(one.rank, one.stage, one.late, one.arrivals) for one in found.found] == [(1, "forward", 0, 9)] * bool(
        unknown
    )


def test_messages_of_others_leave_a_contradiction_as_it_is():
    """Whoever rank 1 does not write to cannot be who waits for it."""
    ranks = [Rank(r, 4) for r in range(4)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            begin = 100 * n
            rank.step(n, begin, begin + 40).stage(n, "forward", begin, begin + (31 if r == 1 else 11))
            rank.collective(n, begin + 1, begin + 1, n + 1)
            if r >= 2:
                message = Descriptor(P2P, "send" if r == 2 else "recv", backend="gloo", group="0")
                rank.add(message, n, begin + 12, begin + 12.1, seq=n + 1, a=5 - r)
    assert analyse([rank.batch() for rank in ranks]).stragglers.verdict == "cannot tell"

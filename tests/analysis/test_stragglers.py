"""Stragglers: a planted one is named with its stage and its figures, and where nobody is slow nobody is."""

import numpy as np
import pytest

from otel_dltrace.analysis.blame.excess import others_median
from otel_dltrace.analysis.blame.judgement import Straggler
from otel_dltrace.analysis.collectives.joined import join
from otel_dltrace.analysis.collectives.lateness import lateness
from otel_dltrace.analysis.compose import analyse
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.semconv import Flag, Level, Source
from otel_dltrace.model.time import Anchor
from tests.support.runs import MS, Rank, ddp


@pytest.mark.parametrize(
    ("skew", "slow", "came_last"),
    [
        pytest.param(6, 0, 0, id="ahead, nobody is late"),
        pytest.param(-6, 0, 0, id="behind, nobody is late"),
        pytest.param(-6, 5, 0, id="behind, late by less"),
        pytest.param(6, 20, 10, id="ahead, late by more"),
        pytest.param(-6, 20, 10, id="behind, late by more"),
    ],
)
def test_clocks_that_are_seen_to_be_wrong_accuse_and_acquit_nobody(skew, slow, came_last):
    """The wall clock of the second host is off by more than an all-reduce takes, and that much nobody can tell."""
    batches = []
    for rank in range(2):
        anchor = Anchor(0, round(skew * MS) * rank, 1000)
        one = Rank(rank, 2, f"node-{rank}", anchor=anchor)
        for n in range(10):
            begin, called = 60.0 * n, 60.0 * n + 5 + slow * rank
            one.step(n, begin, begin + 40, seq=n + 1).stage(n, "forward", begin, called)
            one.collective(n, called, begin + 5 + slow + 0.5, n + 1)
        batches.append(one.batch())
    report = analyse(batches)
    told = [(s.rank, s.stage, s.excess, s.arrivals) for s in report.stragglers.found]
    assert told == [(1, "forward", slow * MS, came_last and 9)] * (slow > 0)  # the first step does not count
    assert report.stragglers.verdict == ("straggler" if slow else "none")
    assert [rank.last for rank in report.waits.ranks] == [0, came_last]
    if skew == 6:  # seen to be wrong
        off = [abs(s.lateness - slow * MS) <= report.stragglers.uncertainty for s in report.stragglers.found if s.late]
        assert off == [True] * (came_last > 0)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("buckets", "stage"),
    [
        *[(True, stage) for stage in ("between steps", "dataloader_next", "forward", "optimizer", "residual")],
        *[(False, stage) for stage in ("between steps", "dataloader_next", "forward", "residual")],
    ],
)
def test_a_planted_straggler_is_found(ranks, buckets, stage):
    """Rank 1 is 20 ms slower in one stage, in every step: rank, stage and figures are those that were planted."""
    found = analyse(ddp(ranks, slow={(1, stage): 20.0}, jitter=0.5, buckets=buckets)).stragglers

    assert (found.verdict, found.reason) == ("straggler", "")
    (culprit,) = found.found
    assert (culprit.rank, culprit.stage, culprit.slow) == (1, stage, 19)
    assert culprit.excess / MS == pytest.approx(20.0, abs=0.5)
    if buckets:
        assert culprit.late == culprit.arrivals == 19
        assert culprit.lateness / MS == pytest.approx(20.0, abs=0.5)


def test_the_straggler_of_a_run_without_noise_is_told_exactly():
    """The whole finding, to the nanosecond."""
    found = analyse(ddp(3, slow={(2, "forward"): 20.0})).stragglers
    assert found.found == (Straggler(2, "forward", 24 * MS, 4 * MS, 20 * MS, 19, 19, 19, 20 * MS),)
    # The threshold is 5 % of the median step: rank 2's 36 ms, as the others wait for it.
    assert (found.steps, found.threshold) == (19, 1_800_000)


def test_a_slow_backward_is_told_by_its_bucket_launches():
    """All ranks' backward ends together, so its length says nothing; the launches say who computes longer."""
    found = analyse(ddp(3, slow={(1, "backward"): 20.0})).stragglers
    assert found.found == (Straggler(1, "backward", 28 * MS, 8 * MS, 20 * MS, 19, 19, 19, 20 * MS),)


@pytest.mark.parametrize("source", [Source.BOUND, Source.HOST_DONE])
def test_a_slow_communication_hook_is_told_by_its_first_call(source):
    """What the hook computes before it calls is the rank's own, in the backward; the others wait in their hooks."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        done = 100 * n + 36
        for r, rank in enumerate(ranks):
            at = 100 * n
            rank.step(n, at, at + 40).stage(n, "forward", at, at + 5).stage(n, "backward", at + 5, done)
            for number, launch, call in ((0, at + 8, at + 9), (1, at + 10, at + 14 + 20 * r)):
                hook = {"tensor": f"bucket {number}", "source": source, "flags": Flag.ASYNC}
                rank.collective(n, launch, done, 0, "comm_hook", **hook)
                rank.collective(n, call, done, 2 * n + number + 1, dtype="float16", flags=Flag.ASYNC)
    batches = [rank.batch() for rank in ranks]
    report = analyse(batches)

    assert report.stragglers.found == (Straggler(1, "backward", 29 * MS, 9 * MS, 20 * MS, 9, 9, 9, 20 * MS),)
    (grad_sync,) = (stage for stage in report.timings.stages if stage.name == "grad_sync")
    assert [timing.mean for timing in grad_sync.ranks] == [22 * MS, 2 * MS]


def test_a_slow_backward_without_buckets_accuses_and_acquits_nobody():
    """At level step the victims' backward is as long as the culprit's, and a wait in it looks like computing."""
    found = analyse(ddp(2, slow={(1, "backward"): 20.0}, buckets=False)).stragglers
    assert (found.verdict, found.reason) == (
        "cannot tell",
        "no rank takes longer than the others by itself, but without its operations (OTEL_DLTRACE_LEVEL=collective) "
        "waiting cannot be told from computing in backward",
    )


def test_a_stage_is_named_though_waits_in_it_are_not_known_if_its_rank_always_comes_late():
    """Gradients that the program itself reduces, at level `collective`: rank 0 waits, and is never late."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            begin, ready = 100 * n, 100 * n + 20 + 20 * r
            rank.step(n, begin, begin + 50).stage(n, "backward", begin, ready)
            rank.collective(n, ready, begin + 42, n + 1, flags=Flag.ASYNC, level=Level.COLLECTIVE)
    found = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert found == (Straggler(1, "backward", 40 * MS, 20 * MS, 20 * MS, 9, 9, 9, 20 * MS),)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("jitter", [0.0, 3.0])
def test_where_nobody_is_slow_nobody_is_accused(ranks, jitter):
    """Noise that favours nobody makes no straggler."""
    found = analyse(ddp(ranks, steps=40, jitter=jitter, first=200.0)).stragglers
    assert (found.verdict, found.found) == ("none", ())


def test_a_rank_that_is_slow_in_few_steps_is_no_straggler():
    """A checkpoint every tenth step is not what makes the others wait in every step."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(30):
        for r, rank in enumerate(ranks):
            extra = 50 if r == 0 and n % 10 == 0 else 0
            rank.step(n, 100 * n, 100 * n + 20 + extra).stage(n, "forward", 100 * n, 100 * n + 20 + extra)
    assert analyse([rank.batch() for rank in ranks]).stragglers.verdict == "none"


@pytest.mark.parametrize(
    ("slow", "steps", "verdict"),
    [(4, 6, "none"), (5, 6, "straggler"), (20, 39, "none"), (55, 100, "none"), (56, 100, "straggler")],
)
def test_a_straggler_is_slow_in_more_steps_than_chance_makes(slow, steps, verdict):
    """Of few steps more than half are soon noise; of two ranks slow in turn one is slow in more."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(steps + 1):  # the first one does not count
        is_slow = slow * n // steps > slow * (n - 1) // steps
        for r, rank in enumerate(ranks):
            end = 100 * n + 20 + 5 * (r == is_slow)
            rank.step(n, 100 * n, end).stage(n, "forward", 100 * n, end)
    found = analyse([rank.batch() for rank in ranks])
    assert found.stragglers.verdict == verdict
    assert (slow > found.stragglers.share * steps) == (verdict == "straggler")
    named = [(slow.slow.rank, slow.slow.stage) for slow in found.saturation.stages]
    assert ((1, "forward") in named) == (verdict == "straggler")


def test_of_many_ranks_with_uneven_batches_nobody_is_slow_in_few_steps():
    """Nobody is slower than the others; in twenty steps that differ this much, some of 64 ranks seem to be."""
    chance, ranks = np.random.default_rng(7), [Rank(r, 64) for r in range(64)]
    for n in range(21):
        took = np.maximum(chance.normal(100, 40, 64), 1)
        for rank, forward in zip(ranks, took, strict=True):
            rank.step(n, 1000 * n, 1000 * n + 150 + took.max()).stage(n, "forward", 1000 * n, 1000 * n + forward)
    found = analyse([rank.batch() for rank in ranks])
    assert found.stragglers.found == ()
    assert not [slow for slow in found.saturation.stages if slow.slow.against == "others"]


def test_two_slow_ranks_are_both_named():
    """A slow host has several ranks: neither comes alone, both come late."""
    found = analyse(ddp(8, slow={(3, "forward"): 20.0, (6, "forward"): 21.0, (6, "optimizer"): 0.5})).stragglers
    assert found.found == (
        Straggler(6, "forward", 25 * MS, 4 * MS, 21 * MS, 19, 19, 19, 21_500_000),
        Straggler(3, "forward", 24 * MS, 4 * MS, 20 * MS, 19, 19, 19, 20 * MS),
    )


@pytest.mark.parametrize("buckets", [True, False])
def test_two_slow_ranks_of_three_are_told_beside_the_third(buckets):
    """Beside the middle of that one and of the other slow one each seemed longer by half of what it is.

    Where nothing tells who comes late one of them may wait for the other: one is named.
    """
    report = analyse(ddp(3, slow={(1, "forward"): 20.0, (2, "forward"): 20.0}, buckets=buckets))
    late = (19, 19, 20 * MS) if buckets else (0, 0, 0)
    both = tuple(Straggler(rank, "forward", 24 * MS, 4 * MS, 20 * MS, 19, *late) for rank in (1, 2))
    assert report.stragglers.found == (both if buckets else both[:1])
    assert [(one.slow.rank, one.slow.excess) for one in report.saturation.stages] == [(1, 20 * MS), (2, 20 * MS)]


def test_who_waits_for_a_rank_of_its_group_is_not_named_for_coming_late_with_it_to_another():
    """Rank 3 is 3 ms slower in either of two stages, too little for each; rank 2 meets it behind both, and waits."""
    ranks = [Rank(r, 4) for r in range(4)]
    for n in range(12):
        for r, rank in enumerate(ranks):
            begin, slower, met = 200 * n, 3 * (r == 3), 200 * n + 3 * (r >= 2)
            pair = {"group": f"pair {r // 2}", "group_size": 2}
            rank.stage(n, "forward", begin, begin + 40 + slower).collective(
                n, begin + 40 + slower, met + 41, n + 1, **pair
            )
            rank.stage(n, "backward", met + 41, met + 81 + slower)
            met += 3 * (r >= 2)
            rank.collective(n, 200 * n + 81 + (r >= 2) * 3 + slower, met + 82, n + 50, **pair)
            for number in (1, 2):
                across = {"group": f"across {r % 2}", "group_size": 2, "flags": Flag.ASYNC}
                rank.collective(n, met + 82, begin + 95, 2 * n + number, **across)
            rank.wait(n, met + 82, begin + 95).step(n, begin, begin + 96)
    (found,) = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert found == Straggler(3, "", 0, 0, 0, 0, 11, 11, 6 * MS)


def test_of_many_ranks_with_uneven_batches_nobody_comes_late_in_few_steps():
    """One of sixteen is late in five steps of five soon."""
    named = []
    for seed in (0, 5, 20, 25, 31):
        chance, ranks = np.random.default_rng(seed), [Rank(r, 16) for r in range(16)]
        for n in range(6):
            took = np.maximum(chance.normal(60, 15, 16), 1)
            for rank, forward in zip(ranks, took, strict=True):
                begin, end = 1000 * n, 1000 * n + took.max() + 1
                rank.step(n, begin, end).stage(n, "forward", begin, begin + forward)
                rank.collective(n, begin + forward, end, n + 1)
        named += [one.rank for one in analyse([rank.batch() for rank in ranks]).stragglers.found]
    assert named == []


@pytest.mark.parametrize(("staged", "what"), [(True, "forward"), (False, "time outside any stage")])
def test_arrivals_that_disagree_acquit(staged, what):
    """Rank 1's forward is long, but it begins earlier and never comes late: nobody waits for it."""
    ranks = [Rank(r, 4) for r in range(4)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            at = 100 * n - 20 * (r == 1)
            rank.step(n, at, 100 * n + 60).stage(n, "forward", at, 100 * n + 20 if staged else at + 5)
            rank.collective(n, 100 * n + 30 + 4 * (n % 4 == r), 100 * n + 40, n + 1, flags=Flag.ASYNC)
    found = analyse([rank.batch() for rank in ranks]).stragglers
    assert (found.verdict, found.reason) == (
        "cannot tell",
        f"rank 1's {what} takes 20.0 ms longer than the others', "
        "but it came late to the collectives in only 3 of 9 steps",
    )


@pytest.mark.parametrize(
    ("late", "verdict"),
    [
        pytest.param({2, 3}, "cannot tell", id="all of one host"),
        pytest.param({3}, "straggler", id="one of them"),
    ],
)
def test_clocks_that_differ_accuse_nobody(late, verdict):
    """Ranks of the second host come 5 ms late by wall clocks: certain is only who comes later than one of its host."""
    anchors = {r: (f"node-{r // 2}", Anchor(0, 0, 30)) for r in range(4)}
    ranks = [Rank(r, 4, host, anchor=anchor) for r, (host, anchor) in anchors.items()]
    for n in range(10):
        for r, rank in enumerate(ranks):
            at = 100 * n + 5 * (r in late)
            rank.step(n, at, at + 60).stage(n, "forward", at, at + 20)
            rank.collective(n, at + 30, 100 * n + 50, n + 1, source=Source.BOUND, flags=Flag.ASYNC)
    found = analyse([rank.batch() for rank in ranks]).stragglers

    assert (found.verdict, [one.rank for one in found.found]) == (verdict, [3] if verdict == "straggler" else [])
    assert ("the clocks of the hosts may be that far apart" in found.reason) == (verdict == "cannot tell")


@pytest.mark.parametrize(("every", "verdict"), [(2, "cannot tell"), (1, "straggler")], ids=["in some steps", "in all"])
def test_steps_of_which_clocks_that_are_off_tell_alone_accuse_nobody(every, verdict):
    """Clocks are 3 s apart, and hide all but the steps in which rank 3 comes 8 ms later than rank 2 of its host."""
    anchors = {r: (f"node-{r // 2}", Anchor(0, r // 2 * 3_000 * MS, 30)) for r in range(4)}
    ranks = [Rank(r, 4, host, anchor=anchor) for r, (host, anchor) in anchors.items()]
    for n in range(20):
        last = 8 if n % every == 0 else 0
        for r, rank in enumerate(ranks):
            late = last if r == 3 else 0
            rank.step(n, 100 * n + late, 100 * n + 60)
            rank.collective(n, 100 * n + 30 + late, 100 * n + 35 + last, n + 1)
    found = analyse([rank.batch() for rank in ranks]).stragglers

    assert (found.verdict, [one.rank for one in found.found]) == (verdict, [3] * (verdict == "straggler"))


@pytest.mark.parametrize(
    ("stage", "every", "times"),
    [pytest.param("backward", 5, 8, id="each fifth step"), pytest.param("forward", 40, 1, id="one step")],
)
def test_a_stage_of_its_own_is_named_where_ranks_meet_only_every_few_steps(stage, every, times):
    """Local SGD: rank 1 is slow in every step, and late where weights are averaged, be it once."""
    ranks = [Rank(r, 2) for r in range(2)]
    now = [0, 0]
    for n in range(41):
        averages = n % every == every - 1
        done = [now[r] + 10 + 20 * r for r in range(2)]
        ends = [max(done) + 2] * 2 if averages else done
        for r, rank in enumerate(ranks):
            rank.step(n, now[r], ends[r]).stage(n, stage, now[r], done[r])
            if averages:
                rank.collective(n, done[r], ends[r], n + 1)
        now = ends
    (found,) = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert found == Straggler(1, stage, 30 * MS, 10 * MS, 20 * MS, 40, times, times, 20 * every * MS)


def test_a_hidden_wait_is_not_taken_for_its_cause():
    """Rank 0 waits in code that nobody recorded, as long as rank 1 loads data: the earlier stage is to blame."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            rank.step(n, 50 * n, 50 * n + 49).stage(n, "dataloader_next", 50 * n, 50 * n + 5 + 20 * r)
            rank.stage(n, "optimizer", 50 * n + 46, 50 * n + 49)
    (culprit,) = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert (culprit.rank, culprit.stage, culprit.arrivals) == (1, "dataloader_next", 0)


@pytest.mark.parametrize(("late", "is_told"), [(5, True), (2.5, False)], ids=["over the threshold", "below it"])
def test_who_comes_last_is_told_even_if_no_stage_shows_why(late, is_told):
    """All stages are alike, yet rank 1 comes later: it is named, its stage is not; 5 % of a step is too little."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            begin = 100 * n + late * r
            rank.step(n, begin, begin + 60).stage(n, "forward", begin, begin + 20)
            rank.collective(n, begin + 30, 100 * n + 40, n + 1, flags=Flag.ASYNC)
    found = analyse([rank.batch() for rank in ranks]).stragglers
    assert (found.verdict, found.threshold) == ("straggler" if is_told else "none", 3 * MS)
    assert found.found == (Straggler(1, "", 0, 0, 0, 0, 9, 9, late * MS),) * is_told


@pytest.mark.parametrize(
    ("batches", "reason"),
    [
        pytest.param(list, "no rank has done a step", id="nothing"),
        pytest.param(lambda: ddp(1), "the run has one rank, and nobody waits for it", id="one rank"),
        pytest.param(lambda: ddp(4)[:3], "1 of 4 ranks have no step in the part looked at: 3", id="missing rank"),
        pytest.param(
            lambda: [*ddp(2)[:1], ddp(2)[1].take(~ddp(2)[1].is_rank_step)],
            "1 of 2 ranks have no step in the part looked at: 1",
            id="rank without steps",
        ),
        pytest.param(
            lambda: [*ddp(2), Rank(5, 1 << 31).batch()],
            "2147483646 of 2147483648 ranks have no step in the part looked at: 2-2147483647",
            id="a world that nobody has",
        ),
        pytest.param(
            lambda: [Rank(r, 1 << 31).collective(NO_STEP, r, 9, 1, group_size=2).batch() for r in (0, 3)],
            "no rank has done a step, and 2147483646 of 2147483648 ranks are not here: 1-2, 4-2147483647",
            id="a world that nobody has, without steps",
        ),
        pytest.param(
            lambda: [Rank(r, 4).collective(NO_STEP, r, 9, 1, group_size=4).batch() for r in (0, 2)],
            "no rank has done a step, and 2 of 4 ranks are not here: 1, 3",
            id="ranks of another host, without steps",
        ),
        pytest.param(
            lambda: ddp(2, steps=1), "only 1 steady step was done by all ranks, and this needs 5", id="one step"
        ),
        pytest.param(
            lambda: ddp(2, steps=5), "only 4 steady steps were done by all ranks, and this needs 5", id="too few steps"
        ),
        pytest.param(
            lambda: [ddp(2)[0], ddp(2, steps=30)[1].take(slice(6, None))],
            "",
            id="other steps",
        ),
    ],
)
def test_what_cannot_be_told_is_not_told(batches, reason):
    """Without all ranks, or enough steps, there is a reason instead of a verdict."""
    found = analyse(batches()).stragglers
    assert (found.verdict == "cannot tell", found.reason) == (bool(reason), reason)


def test_the_others_median_leaves_oneself_out():
    """For odd and even worlds, equal values and several columns."""
    rng = np.random.default_rng(1)
    for ranks in (2, 3, 4, 7):
        values = rng.integers(0, 5, (ranks, 6, 3)).astype(float)
        wanted = np.stack([np.median(np.delete(values, r, 0), axis=0) for r in range(ranks)])
        assert (others_median(values) == wanted).all()


@pytest.mark.parametrize("slow", [(), (1, 2)])
def test_lateness_is_against_the_median_of_the_others(slow):
    """In groups of different sizes, and at wall times that floats could not tell apart; slow ones are no measure."""
    rng = np.random.default_rng(2)
    begins = rng.integers(0, 30, (5, 4)).tolist()
    ranks = [Rank(r, 4, anchor=Anchor(0, 10**18, 0)) for r in range(4)]
    for seq, times in enumerate(begins, 1):
        for rank, begin in list(zip(ranks, times, strict=True))[: 2 + seq % 3]:
            rank.collective(0, begin, 99, seq, group=f"g{2 + seq % 3}", group_size=2 + seq % 3)
    joined = join([rank.batch() for rank in ranks])

    wanted = {}
    for seq, times in enumerate(begins, 1):
        some = np.array(times[: 2 + seq % 3]) * float(MS)
        for rank in range(len(some)):
            others = [some[other] for other in range(len(some)) if other not in (*slow, rank)]
            wanted[seq, rank] = some[rank] - np.median(others) if others else 0
    groups = [tuple(sorted(values)) for values in np.split(lateness(joined, slow), joined.begins[1:-1])]
    assert sorted(groups) == sorted(tuple(sorted(v for (s, _), v in wanted.items() if s == seq)) for seq in range(1, 6))

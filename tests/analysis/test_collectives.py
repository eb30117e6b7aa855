"""Collectives on all ranks: joined by their ids, on clocks that differ, and who waited for whom in them."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_dltrace.analysis.collectives.clocks import Clocks, clocks
from otel_dltrace.analysis.collectives.joined import is_synchronising, join
from otel_dltrace.analysis.collectives.waits import RankWaits, Waits, split, waits, widen
from otel_dltrace.analysis.spread import Spread
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import PHASE, Flag, Source
from otel_dltrace.model.time import Anchor
from tests.support.runs import MS, Rank


def test_collectives_join_by_their_id():
    """Sub-groups join among themselves; what a rank lacks, or has twice, is left out and counted.

    What a rank does with itself has the same id on all, and nobody to join.
    """
    ranks = [Rank(r, 3) for r in range(3)]
    for rank in ranks:
        rank.collective(0, 0, 1, 1)
    for rank in ranks[:2]:
        rank.collective(0, 4, 5, 2)
    for n, group in enumerate((ranks[:2], ranks[1:])):
        for rank in group:
            for seq in range(1, 4):
                rank.collective(0, 2, 3, seq, group=f"{n + 1}", group_size=2)
    for rank in ranks:
        rank.collective(0, 6, 7, 0)
        rank.collective(0, 8, 9, 3)
        rank.collective(0, 12, 13, 1, group="self", group_size=1)
    ranks[0].collective(0, 10, 11, 3)

    joined = join([rank.batch() for rank in ranks])

    groups = sorted((d.group, size) for d, size in zip(joined.descriptors, joined.sizes.tolist(), strict=True))
    assert (groups, joined.incomplete) == ([("0", 3), *[("1", 2)] * 3, *[("2", 2)] * 3], 2)


def test_one_host_has_one_clock():
    """Monotonic times of one boot compare exactly, whatever the anchors of its processes say."""
    batches = [Rank(r, 2, anchor=Anchor(0, r * 10**15, 99)).batch() for r in range(2)]
    assert clocks(batches) == Clocks("one monotonic clock", 0, (0, 0), (0, 0))


def test_hosts_compare_by_wall_clock():
    """Each host has one offset, that of its tightest anchor; the two largest uncertainties add up."""
    anchors = [("a", Anchor(0, 500, 30)), ("a", Anchor(0, 510, 20)), ("b", Anchor(0, 900, 40)), ("c", Anchor(0, 7, 5))]
    batches = [Rank(r, 4, host, anchor=anchor).batch() for r, (host, anchor) in enumerate(anchors)]
    assert clocks(batches) == Clocks("wall clocks of several hosts", 60, (510, 510, 900, 7), (0, 0, 1, 2))


@pytest.mark.parametrize(
    ("processes", "hosts"),
    [
        pytest.param([("pod-0", "boot"), ("pod-1", "boot")], (0, 0), id="two names of one machine"),
        pytest.param([("node", "boot-0"), ("node", "boot-1")], (0, 1), id="started anew"),
        pytest.param([("a", ""), ("b", ""), ("a", "")], (0, 1, 0), id="files that tell of no boot"),
    ],
)
def test_a_clock_is_that_of_a_boot(processes, hosts):
    """Containers have a name each and one clock; where no boot is known the name tells."""
    batches = [Rank(r, len(hosts)).batch() for r in range(len(hosts))]
    named = [
        replace(batch, process=replace(batch.process, host=host, boot_id=boot))
        for batch, (host, boot) in zip(batches, processes, strict=True)
    ]
    assert clocks(named).hosts == hosts


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), min_size=1, max_size=8))
def test_wait_core_and_completion_are_the_duration(calls):
    """Whatever the times, even impossible ones, the three parts are never negative and add up."""
    begin = np.array([b for b, _ in calls])
    end = begin + np.array([d for _, d in calls])
    wait, core, completion = split(begin, end, np.full(len(calls), begin.max()), np.full(len(calls), end.min()))
    assert min(wait.min(), core.min(), completion.min()) >= 0
    assert (wait + core + completion).tolist() == (end - begin).tolist()


def test_early_ranks_wait_for_the_last_one():
    """Rank 0 comes 6 ms before rank 1, and leaves 1 ms after it."""
    batches = [
        Rank(0, 2).collective(0, 10, 21, 1).batch(),
        Rank(1, 2).collective(0, 16, 20, 1, flags=Flag.ASYNC).batch(),
    ]
    nobody = Spread()

    assert waits(join(batches)) == Waits(
        joined=1,
        analysed=1,
        incomplete=0,
        other_ends=0,
        violations=0,
        violation=0,
        uncertainty=0,
        ranks=(
            RankWaits(0, 1, 11 * MS, 6 * MS, 4 * MS, MS, 6 * MS, 1, 0, nobody),
            RankWaits(1, 1, 4 * MS, 0, 4 * MS, 0, 0, 1, 1, Spread(1, 6 * MS, 6 * MS, 6 * MS, 6 * MS, 6 * MS)),
        ),
    )


def test_a_rank_is_blocked_in_the_wait_for_a_handle():
    """Rank 0 launches it 8 ms before rank 1, computes for 5 ms and then waits: for 3 ms of them it is held up.

    What else is done for the operation is no wait.
    """
    rank = Rank(0, 2).collective(0, 10, 21, 1, flags=Flag.ASYNC)
    for begin, end in ((15, 19), (19, 21)):
        rank.wait(0, begin, end)
        rank.rows[-1]["parent_no"] = 1
    rank.add(Descriptor(PHASE, "compress"), 0, 11, 12, parent_no=1)
    batches = [rank.batch(), Rank(1, 2).collective(0, 18, 20, 1, flags=Flag.ASYNC).batch()]

    assert [(one.wait, one.blocked) for one in waits(join(batches)).ranks] == [(8 * MS, 3 * MS), (0, 0)]


@pytest.mark.parametrize("source", [Source.HOST_ISSUE, Source.BOUND, Source.DEVICE, Source.RECORDER])
def test_no_wait_is_told_from_an_end_that_is_none(source):
    """One rank whose end is no end is enough; who came last is told all the same, for begins are exact."""
    batches = [
        Rank(0, 2).collective(0, 10, 21, 1).batch(),
        Rank(1, 2).collective(0, 16, 20, 1, source=source).batch(),
    ]
    found = waits(join(batches))
    assert (found.joined, found.analysed, found.other_ends) == (1, 0, 1)
    assert [(r.collectives, r.wait, r.last, r.late.max) for r in found.ranks] == [(0, 0, 0, 0), (0, 0, 1, 6 * MS)]


@pytest.mark.parametrize(
    ("name", "synchronises"),
    [
        ("all_reduce", True),
        ("MPI_Iallreduce", True),
        ("allreduce", True),
        ("_all_gather_base", True),
        ("reduce_scatter_tensor", True),
        ("barrier", True),
        ("all_to_all_single", True),
        ("push_pull", True),
        ("broadcast", False),
        ("reduce", False),
        ("gather", False),
        ("Alltoallv", False),
    ],
)
def test_only_operations_in_which_all_wait_for_all_are_analysed(name, synchronises):
    """A broadcast's root waits for nobody, and an all-to-all with sizes may send nothing."""
    assert is_synchronising(name) == synchronises


def test_a_wait_below_the_clocks_uncertainty_is_refused():
    """Across hosts a figure that the clocks cannot carry is None, and nobody is said to be last."""
    anchors = (Anchor(0, 0, 3 * MS), Anchor(0, 0, 4 * MS))
    batches = [
        Rank(r, 2, f"node-{r}", anchor=anchor).collective(0, 10 + 6 * r, 20, 1).batch()
        for r, anchor in enumerate(anchors)
    ]
    found = waits(join(batches))
    assert found.uncertainty == 7 * MS
    assert [(r.wait, r.core, r.completion, r.blocked, r.last) for r in found.ranks] == [(None, None, None, None, 0)] * 2


def test_a_rank_that_is_done_before_the_last_one_came_proves_the_clocks_wrong():
    """What they may be off by, from the ends and from what the last one took, is uncertainty of all across hosts."""
    ranks = [Rank(r, 2, host) for r, host in enumerate("aba")]
    ranks[0].collective(0, 10, 20, 1).collective(0, 40, 50, 2)
    ranks[1].collective(0, 25, 30, 1).collective(0, 44, 50, 2)
    for rank in ranks[::2]:
        rank.collective(0, 60, 61, 1, group="of one host", group_size=2)
    batches = [rank.batch() for rank in ranks]
    joined = widen(join([*batches]))
    assert joined.uncertainty.tolist() == [0] * 3, "anchors without uncertainty: nothing to widen"

    unsure = [replace(b, process=replace(b.process, anchor=Anchor(0, 0, 1))) for b in batches]
    found = waits(join(unsure))
    assert (found.violations, found.violation, found.uncertainty) == (1, 5 * MS, 15 * MS)
    assert sorted(widen(join(unsure)).uncertainty.tolist()) == [0, 15 * MS, 15 * MS]
    assert [r.last for r in found.ranks] == [0] * 3


def test_clocks_are_off_by_as_much_as_the_worst_collective_proves():
    """Two are hardly too early, and by one of them all is known."""
    ranks = [Rank(r, 2, host, anchor=Anchor(0, 0, 1)) for r, host in enumerate("ab")]
    for seq, early in enumerate((1, 1, 40), 1):
        ranks[0].collective(0, 100 * seq, 100 * seq + 10, seq)
        ranks[1].collective(0, 100 * seq + 10 + early, 100 * seq + 11 + early, seq)
    assert widen(join([rank.batch() for rank in ranks])).uncertainty.tolist() == [40 * MS] * 3

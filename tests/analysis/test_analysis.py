"""Analyses: what was planted by hand is found again, with its figures."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_dltrace.analysis.blame.excess import others_median
from otel_dltrace.analysis.blame.frontier import FrontierStage, frontier
from otel_dltrace.analysis.blame.judgement import Straggler
from otel_dltrace.analysis.blame.marked import PhaseRow, RankPhase
from otel_dltrace.analysis.collectives.aligned import is_aligned, telling
from otel_dltrace.analysis.collectives.clocks import Clocks, clocks
from otel_dltrace.analysis.collectives.joined import is_synchronising, join
from otel_dltrace.analysis.collectives.lateness import in_a_row, lateness
from otel_dltrace.analysis.collectives.operations import OperationRow, RankOperation, operations
from otel_dltrace.analysis.collectives.waits import RankWaits, Waits, split, waits, widen
from otel_dltrace.analysis.compose import MOST_LISTED, Guards, analyse
from otel_dltrace.analysis.intervals import unions
from otel_dltrace.analysis.scaling import scaling
from otel_dltrace.analysis.select import MOST_STRETCHES, by_world, select, spell
from otel_dltrace.analysis.spread import Spread, spread
from otel_dltrace.analysis.steps.breakdown import RankBreakdown, StageTime, breakdown
from otel_dltrace.analysis.steps.drift import Drift, DriftedRank, drift
from otel_dltrace.analysis.steps.own import columns, mixed, own
from otel_dltrace.analysis.steps.table import step_tables
from otel_dltrace.analysis.steps.throughput import Rates
from otel_dltrace.analysis.steps.untold import steps_with_operations
from otel_dltrace.model.attributes import number_columns
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import OTHER, Descriptor
from otel_dltrace.model.plan import Window
from otel_dltrace.model.semconv import ASYNC_PARAM, DL_COMM_SIZE, GC, P2P, PHASE, Flag, Level, Source
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.model.time import Anchor
from otel_dltrace.report.words import rests_on, verdict
from tests.support.runs import MS, Rank, ddp, ddp_on_devices, rendered


def test_a_spread_tells_sum_mean_and_quantiles():
    """Quantiles are interpolated, and nothing of nothing is zero."""
    assert spread(np.arange(1, 101)) == Spread(100, 5050, 50, 50, 95, 100)
    assert spread(np.zeros(0)) == Spread()


@pytest.mark.parametrize("backend", ["horovod", "gloo", "mpi"])
def test_without_waits_nobody_knows_where_handles_block_a_rank(backend):
    """They last until they are waited for, be that a moment: level `collective` does not tell."""
    rank = Rank(0, 2).step(0, 0, 20).stage(0, "optimizer", 1, 20)
    handle = {"flags": int(Flag.ASYNC), "level": Level.COLLECTIVE}
    rank.collective(0, 2, 18, 1, "allreduce", backend=backend, tensor="w", **handle)
    without, (with_wait,) = rank.batch(), step_tables([rank.wait(0, 3, 18).batch()])
    blocking = Rank(0, 2).step(0, 0, 20).collective(0, 2, 18, 1, "allreduce", backend=backend, level=Level.COLLECTIVE)

    tables = *step_tables([without]), with_wait, *step_tables([blocking.batch()])
    assert [steps_with_operations(t).tolist() for t in tables] == [[False], [True], [True]]
    of_both = [scaling({"run": [batch]}).runs[0].steady.exposed for batch in (without, rank.batch())]
    assert of_both == [None, 0.75]


@pytest.mark.parametrize(("begun", "is_told"), [(6, True), (2, False)])
def test_ddp_waits_for_what_a_communication_hook_launches(begun, is_told):
    """The backward ends when that is done: only handles from before its buckets may be waited for in silence."""
    handle = {"flags": int(Flag.ASYNC), "level": Level.COLLECTIVE}
    rank = Rank(0, 2).step(0, 0, 20).stage(0, "backward", 1, 18)
    for n, launched in enumerate((5, 12)):
        rank.collective(0, launched, 18, 0, "comm_hook", tensor=f"bucket {n}", source=Source.BOUND, **handle)
        rank.collective(0, launched + 1 if n else begun, 17, n + 1, dtype="float16", **handle)

    assert steps_with_operations(*step_tables([rank.batch()])).tolist() == [is_told]


# -- which part of a run -------------------------------------------------------------------------


def test_steps_and_ranks_can_be_selected():
    """Anything with `in` selects steps; records outside any step are not in them."""
    batches = [Rank(r, 3).step(0, 0, 1).step(1, 1, 2).step(5, 2, 3).batch() for r in range(3)]

    chosen = select(batches, steps=Window.parse("1-4,5-9"), ranks=[0, 2])

    assert [(batch.rank, batch["step"].tolist()) for batch in chosen] == [(0, [1, 5]), (2, [1, 5])]
    assert select(batches) == batches


@pytest.mark.parametrize(
    ("steps", "ranks", "sentence"),
    [
        pytest.param(None, [1, 7, 8], "rank 7-8 is not in this run; it has 0-1", id="rank"),
        pytest.param(range(9, 12), None, "none of the steps asked for is in this run; it has steps 0-1, 5", id="step"),
    ],
)
def test_what_is_not_there_is_said(steps, ranks, sentence):
    """An unknown rank, or steps that nobody made, is an error that names what there is."""
    batches = [Rank(r, 2).step(0, 0, 1).step(1, 1, 2).step(5, 2, 3).batch() for r in range(2)]
    with pytest.raises(RunNotFoundError) as error:
        select(batches, steps, ranks)
    assert str(error.value) == sentence


def test_numbers_are_spelled_as_ranges():
    """Neighbours are joined."""
    assert spell({7, 0, 1, 2, 9, 10}) == "0-2, 7, 9-10"


def test_of_many_numbers_the_first_are_spelled():
    """Of a world in which every other rank is missing a sentence names some, and how many more there are."""
    told = ", ".join(str(2 * n) for n in range(MOST_STRETCHES))
    assert spell(range(0, 2 * MOST_STRETCHES, 2)) == told
    assert spell([*range(0, 2 * MOST_STRETCHES, 2), *range(5000, 6234)]) == f"{told} and 1,234 more"


# -- one rank's steps ----------------------------------------------------------------------------


def test_a_step_is_its_stages_and_a_residual():
    """Stages, residual and the time between steps, exactly; the mean of the rows adds up to the step."""
    rank = Rank()
    for n, start in enumerate((100, 120, 140)):
        rank.step(n, start, start + 16, a=64).stage(n, "forward", start + 1, start + 6)
        rank.stage(n, "backward", start + 6, start + 14)
    wanted = RankBreakdown(
        0,
        Spread(2, 32 * MS, 16 * MS, 16 * MS, 16 * MS, 16 * MS),
        (
            StageTime("forward", 2, Spread(2, 10 * MS, 5 * MS, 5 * MS, 5 * MS, 5 * MS)),
            StageTime("backward", 2, Spread(2, 16 * MS, 8 * MS, 8 * MS, 8 * MS, 8 * MS)),
        ),
        Spread(2, 6 * MS, 3 * MS, 3 * MS, 3 * MS, 3 * MS),
        Spread(2, 8 * MS, 4 * MS, 4 * MS, 4 * MS, 4 * MS),
        50.0,
        3200.0,
    )

    found = breakdown(step_tables([rank.batch()]))

    assert (found.warm_up, found.steady) == (1, (wanted,))
    assert found.first[0].step.count == 1


@pytest.mark.parametrize(
    ("stages", "residual"),
    [
        pytest.param([], 20, id="no stages"),
        pytest.param([("forward", 0, 20, None, 1)], 0, id="all"),
        pytest.param([("forward", 2, 8, None, 1), ("backward", 6, 12, None, 1)], 10, id="overlap counts once"),
        pytest.param([("prepare_batch", 2, 8, None, 1), ("to_device", 4, 6, None, 1)], 14, id="nested counts once"),
        pytest.param([("forward", -5, 5, None, 1), ("backward", 15, 30, None, 1)], 10, id="cut to the step"),
        pytest.param([("evaluate", -9, 0, None, 1)], 20, id="before the step"),
        pytest.param(
            [("forward", 0, 12, 4, 2), ("backward", 2, 16, 8, 2), ("optimizer", 16, 18, None, 1)],
            6,
            id="pieces count by their total",
        ),
        pytest.param(
            [("forward", 0, 10, 9, 3), ("to_device", 0, 10, 8, 3)], 10, id="never more than the union of the extents"
        ),
        pytest.param([("forward", 0, 10, 4, 1)], 16, id="never more than the totals"),
        pytest.param(
            [("prepare_batch", 0, 10, None, 1), ("to_device", 2, 8, None, 1), ("forward", 10, 20, 4, 2)],
            6,
            id="nested ones beside pieces",
        ),
        pytest.param(
            [("evaluate", -50, -10, 30, 2), ("forward", 0, 18, 8, 3)], 12, id="pieces before the step, and in it"
        ),
    ],
)
def test_the_residual_is_what_no_stage_covers(stages, residual):
    """The residual is step - union(stages); accumulated stages cover their total."""
    rank = Rank().step(0, 100, 120)
    for name, start, end, total, pieces in stages:
        rank.stage(0, name, 100 + start, 100 + end, total, pieces)
    assert step_tables([rank.batch()])[0].residual.tolist() == [residual * MS]


def test_evaluation_is_no_gap_between_steps():
    """What belongs to the next step but came before it is not counted as time between steps."""
    rank = Rank().step(0, 0, 10).stage(1, "evaluate", 12, 40).step(1, 45, 50)
    table = step_tables([rank.batch()])[0]
    assert (table.between.tolist(), table.residual.tolist()) == ([0, 7 * MS], [10 * MS, 5 * MS])

    (beside,) = step_tables([Rank().step(0, 0, 10).stage(1, "evaluate", 4, 40).step(1, 45, 50).batch()])
    assert beside.between.tolist() == [0, 0], "another thread began it in the step before"


@pytest.mark.parametrize("flag", [Flag.TRUNCATED, Flag.ERROR], ids=["left open", "failed"])
def test_a_job_that_goes_on_with_the_step_that_was_not_done_has_all_of_them(flag):
    """The process after the one that ended in step 5 begins with it."""
    first, second = Rank(nonce=1), Rank(nonce=2)
    for n in range(9):
        (first if n < 5 else second).step(n, 10 * n, 10 * n + 9)
    batches = [first.step(5, 50, 600_050, flags=flag).batch(), second.batch()]

    assert step_tables(batches)[0].steps.tolist() == list(range(9))
    assert analyse(batches).guards.unused == 0


@pytest.mark.parametrize("flag", [Flag.TRUNCATED, Flag.ERROR], ids=["left open", "failed"])
def test_a_step_that_was_not_done_counts_for_nothing(flag):
    """A kill leaves a truncated step, whose end is no end; one that failed had waited for a rank that was gone."""
    rank = Rank().step(0, 0, 10).step(1, 10, 600_010, flags=flag).stage(1, "forward", 10, 12)
    report = analyse([rank.batch()])

    assert step_tables([rank.batch()])[0].steps.tolist() == [0]
    assert (report.guards.steps, report.guards.common_steps, report.guards.unused) == ((0, 0), 1, 0)
    assert report.throughput.overall == Rates(0.01, 100.0, None, None)


@pytest.mark.parametrize(
    ("durations", "warm_up"),
    [
        pytest.param([10, 10], 0, id="too few to tell"),
        pytest.param([10, 10, 10, 10], 1, id="step 0 always"),
        pytest.param([90, 50, 16, 10, 10, 10, 10, 10, 10], 3, id="as long as they are slow"),
        pytest.param([90, 10, 90, 10, 10, 10, 10], 1, id="a later slow step is no warm-up"),
        pytest.param([90] * 15 + [10] * 30, 10, id="ten at most"),
    ],
)
def test_warm_up_is_told_from_steady_state(durations, warm_up):
    """The first step alone explains many a bad scaling figure."""
    rank, now = Rank(), 0
    for n, duration in enumerate(durations):
        rank.step(n, now, now + duration)
        now += duration
    assert breakdown(step_tables([rank.batch()])).warm_up == warm_up


def test_a_part_of_a_run_has_no_warm_up():
    """Steps from the middle of a run are steady from the first one on."""
    rank = Rank().step(100, 0, 90).step(101, 90, 100).step(102, 100, 110)
    found = breakdown(step_tables([rank.batch()]))
    assert (found.warm_up, found.first, found.steady[0].step.count) == (0, (), 3)


def test_the_slowest_of_a_column_is_named_only_if_it_stands_out():
    """Five percent over the others' median, and worth one percent of the step."""
    found = breakdown(step_tables(ddp(3, slow={(2, "forward"): 3.0, (0, "optimizer"): 0.1})))
    assert found.slowest == (("forward", 2), ("backward", 1))

    ranks = [Rank(r, 2).step(0, 0, 40).stage(0, "forward", 0, 10).collective(0, 20 + 10 * r, 35, 1) for r in range(2)]
    assert breakdown(step_tables([rank.batch() for rank in ranks])).slowest == (("operations", 0), ("residual", 1))


def test_no_rank_is_the_slowest_beside_one_without_steps():
    """A helper that trains nothing, and answers alone, is no measure for the one that does."""
    report = analyse([*ddp(2)[:1], Rank(1, 2).batch()])
    assert report.breakdown.slowest == ()
    assert {(stage.slowest, stage.stands_out) for stage in report.timings.stages} == {(None, False)}
    assert report.throughput.overall == report.throughput.ranks[0].rates


# -- operations ----------------------------------------------------------------------------------


def test_operations_are_counted_per_kind_and_rank():
    """Tensors that differ in a number are one kind; the skew is over joined collectives, and ranks are in order."""
    ranks = [Rank(r, 2) for r in range(2)]
    for r, rank in enumerate(ranks):
        for i in range(3):
            begin, size = 10 * i + r, 1024 * (r + 1)
            rank.collective(0, begin, 10 * i + 5, i + 1, tensor=f"bucket {i}", dtype="float32", size=size)
        rank.collective(0, 50, 90, 9, flags=Flag.TRUNCATED)
    batches = [rank.batch() for rank in reversed(ranks)]
    of_ranks = (
        RankOperation(0, 3, 3072, Spread(3, 15 * MS, 5 * MS, 5 * MS, 5 * MS, 5 * MS)),
        RankOperation(1, 3, 6144, Spread(3, 12 * MS, 4 * MS, 4 * MS, 4 * MS, 4 * MS)),
    )

    found = operations(batches, join(batches))

    assert found == (
        OperationRow(
            "all_reduce",
            "gloo",
            "0",
            "float32",
            "bucket N",
            "host_done",
            (3, 3),
            (3072, 6144),
            Spread(6, 27 * MS, 4_500_000, 4_500_000, 5 * MS, 5 * MS),
            Spread(3, 3 * MS, MS, MS, MS, MS),
            of_ranks,
        ),
    )


def test_ends_of_different_meaning_are_not_averaged():
    """An issue time and a done time make two rows."""
    rank = Rank().collective(0, 0, 5, 1).collective(0, 5, 6, 2, source=Source.HOST_ISSUE)
    batches = [rank.batch()]
    found = operations(batches, join(batches))
    assert [(row.source, row.time.total) for row in found] == [("host_done", 5 * MS), ("host_issue", MS)]


def test_sizes_that_do_not_fit_together_into_64_bits_are_added():
    """Two of the largest made a negative number."""
    most = (1 << 63) - 1
    batch = Rank().collective(0, 0, 5, 1, size=most).collective(0, 5, 6, 2, size=most).batch()
    (row,) = operations([batch], join([batch]))

    assert row.bytes == (2 * most, 2 * most)


@pytest.mark.parametrize("size", [1 << 63, (1 << 64) - 1], ids=["2**63", "-1"])
def test_a_size_that_cannot_be_is_none(size):
    """A program told it: it neither makes the sum of the others smaller, nor is sent as a negative number."""
    batch = Rank().collective(0, 0, 5, 1).collective(0, 5, 6, 2, size=size).batch()
    (row,) = operations([batch], join([batch]))
    ((values, told),) = ((values, told) for name, values, told in number_columns(batch) if name == DL_COMM_SIZE)

    assert (row.count, row.bytes, values[told].tolist()) == ((2, 2), (1024, 1024), [1024])


# -- collectives on all ranks --------------------------------------------------------------------


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


# -- waits ---------------------------------------------------------------------------------------


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


# -- stragglers ----------------------------------------------------------------------------------


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


@pytest.mark.parametrize("lag", [0.0, 350.0])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_devices_that_tell_their_buckets_tell_the_straggler(stage, lag):
    """Also where they are steps behind their hosts: what a device did is compared with what it did."""
    report = analyse(ddp_on_devices(3, {(1, stage): 20.0}, timed=True, lag=lag))
    (found,) = report.stragglers.found
    assert (found.rank, found.stage, found.excess, found.late) == (1, stage, 20 * MS, 19)
    waited = {r.rank: r.mean for part in report.timings.stages if part.name == "grad_sync" for r in part.ranks}
    assert waited == {0: 21 * MS, 1: MS, 2: 21 * MS}


def test_a_batch_is_worked_on_from_when_the_device_is_free():
    """Not for as long as it lay there while the device, some steps behind its host, was at those before."""
    rank = Rank()
    for n in range(10):
        rank.step(n, 20 * n, 20 * n + 20, seq=n + 1).stage(n, "prepare_batch", 20 * n, 20 * n + 1)
        rank.stage(n, "forward", 500 + 20 * n, 508 + 20 * n, source=Source.DEVICE)
        rank.stage(n, "backward", 508 + 20 * n, 518 + 20 * n, source=Source.DEVICE)
    (batch,) = (part for part in analyse([rank.batch()]).timings.stages if part.name == "train_batch")
    assert [(r.p50, r.mean) for r in batch.ranks] == [(20 * MS, 20 * MS)]


@pytest.mark.parametrize("hosts", ["ab", "aa"])
def test_who_comes_last_on_a_device_is_told_by_how_long_it_is_at_it(hosts):
    """Not by when it is assumed to begin, nor by the clocks of the hosts, which are 40 ms apart; all end together."""
    batches = []
    for rank, host in enumerate(hosts):
        one = Rank(rank, 2, host, anchor=Anchor(0, 40 * MS * (host == "b"), 1000))
        one.collective(NO_STEP, 0, 0, 20, "broadcast_coalesced", source=Source.HOST_ISSUE, backend="nccl")
        for n in range(10):
            begin = 100.0 * n
            one.step(n, begin, begin + 90, seq=n + 1)
            took = 3 if rank else 33
            one.collective(n, begin + 5, begin + 5 + took, n + 1, source=Source.RECORDER, backend="nccl")
        batches.append(one.batch())
    report = analyse(batches)
    (found,) = report.stragglers.found
    assert (found.rank, found.stage, found.arrivals, found.lateness) == (1, "", 9, 30 * MS)
    assert [(r.wait, r.core, r.completion, r.last) for r in report.waits.ranks] == [
        (300 * MS, 30 * MS, 0, 0),
        (None, None, None, 10 + (hosts == "ab")),  # of what hosts have asked for their clocks tell
    ]
    assert report.waits.violations == 0


@pytest.mark.parametrize(
    ("sources", "hosts", "name", "aligned"),
    [
        ((Source.RECORDER, Source.RECORDER), "aa", "all_reduce", True),
        ((Source.DEVICE, Source.RECORDER), "aa", "all_reduce", True),
        ((Source.DEVICE, Source.DEVICE), "ab", "all_reduce", True),
        ((Source.DEVICE, Source.DEVICE), "aa", "all_reduce", False),
        ((Source.RECORDER, Source.HOST_DONE), "ab", "all_reduce", False),
        ((Source.HOST_DONE, Source.HOST_DONE), "ab", "all_reduce", False),
        ((Source.RECORDER, Source.RECORDER), "ab", "broadcast", False),
    ],
)
def test_what_all_devices_tell_is_compared_by_its_end_where_begins_are_vague(sources, hosts, name, aligned):
    """If all wait for all in it; where it is compared so, across hosts, what the hosts tell is not."""
    ranks = [Rank(r, 2, host) for r, host in enumerate(hosts)]
    for rank, source in zip(ranks, sources, strict=True):
        rank.collective(0, 0, 5, 1, name, source=source).collective(0, 10, 15, 1, "barrier", group="1")
    joined = join([rank.batch() for rank in ranks])
    assert [d.name for d in joined.take(is_aligned(joined)).descriptors] == [name] * aligned
    told = {d.name for d in telling(joined).descriptors}
    assert told == ({name} if aligned and hosts == "ab" else {name, "barrier"})


def without_device(batch, stages, steps):
    """Have the *stages* of a batch's first *steps* the times of the host alone, which only asks."""
    told = (batch["step"] < steps) & (batch["source"] == Source.DEVICE) & batch.lookup(lambda d: d.name in stages, bool)
    batch.rows["source"][told] = Source.HOST_DONE
    batch.rows["end"][told] = batch.rows["start"][told] + 100
    batch.rows["size"][told] = 100


@pytest.mark.parametrize("steps", [10, 20])
def test_a_device_s_times_are_not_compared_with_those_of_asking_it(steps):
    """Where one rank's device tells nothing, its forward is how long it took to ask it: nobody is slower for that."""
    first, second = ddp_on_devices(2, {(0, "forward"): 2.0, (1, "forward"): 2.0}, timed=True)
    without_device(second, ("forward", "backward", "optimizer"), steps)
    report = analyse([first, second])
    assert report.stragglers.verdict == ("none" if steps == 10 else "cannot tell")
    assert ("without the times of all ranks' devices" in report.stragglers.reason) == (steps == 20)
    assert {one.slow.against for one in report.saturation.stages} <= {"usual"}


def test_one_stage_without_a_device_s_times_leaves_the_others_to_be_compared():
    """A captured piece, or an optimizer that is offloaded, is no reason to say nothing of the forward."""
    first, second = ddp_on_devices(2, {(1, "forward"): 20.0}, timed=True)
    without_device(first, ("optimizer",), 20)
    report = analyse([first, second])
    (found,) = report.stragglers.found
    assert (found.rank, found.stage, found.slow, found.late) == (1, "forward", 19, 19)
    assert len(report.stragglers.frontier) > 0
    tables = step_tables([first, second])
    of_both = mixed(tables, tables[0].steps).any(axis=0)
    assert [name for name, is_mixed in zip(columns(tables[0].stages), of_both, strict=True) if is_mixed] == [
        "optimizer",
        "residual",
    ]


def test_a_small_collective_behind_a_large_one_does_not_acquit():
    """Whoever came late made all wait at the large one, which may hide it; to the small one all come at once."""
    ranks = [Rank(r, 3) for r in range(3)]
    for n in range(20):
        begin = 120.0 * n
        for r, rank in enumerate(ranks):
            ready = begin + 40 + 7 * (r == 1)
            end = begin + 117
            rank.step(n, begin, begin + 120, seq=2 * n + 1).stage(n, "forward", begin, ready, source=Source.DEVICE)
            rank.collective(n, ready, end, 2 * n + 1, source=Source.RECORDER, backend="nccl")
            rank.collective(n, end, end + 0.05, 2 * n + 2, source=Source.RECORDER, backend="nccl")
    (found,) = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert (found.rank, found.stage, found.arrivals) == (1, "forward", 0)


def test_a_device_s_clock_that_is_tied_loosely_accuses_nobody():
    """The ranks share a host; one's device seems 12 ms later than it is, and says that it may be 24."""
    first, second = ddp_on_devices(2, {}, timed=False)
    for batch, later in ((first, 0), (second, 12 * MS)):
        of_device = batch["source"] == Source.DEVICE
        batch.rows["b"][of_device] = 2 * later
        buckets = batch.lookup(lambda d: d.is_bucket, bool)
        batch.rows["source"][buckets] = Source.DEVICE
        batch.rows["end"][buckets] += 3 * MS
        for name in ("start", "end"):
            batch.rows[name][of_device | buckets] += later
    assert analyse([first, second]).stragglers.found == ()


def test_launches_by_the_hosts_of_devices_say_nothing_of_waiting():
    """Hosts launch all at once: who waits for whom inside backward nobody knows, and no figure pretends to."""
    report = analyse(ddp_on_devices(2, {(1, "backward"): 20.0}))
    assert (report.stragglers.verdict, report.stragglers.reason) == (
        "cannot tell",
        "no rank takes longer than the others by itself, but without its device's times of the buckets "
        "(TORCH_NCCL_ENABLE_TIMING=1) waiting cannot be told from computing in backward",
    )
    assert "grad_sync" not in {part.name for part in report.timings.stages}
    assert report.saturation.stages == ()


def test_a_slow_forward_of_a_device_is_told_without_its_buckets_times():
    """Nobody waits in the forward of a model that is whole on every rank; of a sharded one who knows."""
    (found,) = analyse(ddp_on_devices(2, {(1, "forward"): 20.0})).stragglers.found
    assert (found.rank, found.stage, found.arrivals) == (1, "forward", 0)
    sharded = analyse(ddp_on_devices(2, {(1, "forward"): 20.0}, gathers=True)).stragglers
    assert (sharded.verdict, "without the waits between its streams" in sharded.reason) == ("cannot tell", True)


def test_a_longer_backward_alone_is_no_proof_without_buckets():
    """It may compute or wait; the reason says which level would tell."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            length = 40 + 20 * r
            rank.step(n, length * n, length * (n + 1)).stage(n, "backward", length * n, length * (n + 1))
    found = analyse([rank.batch() for rank in ranks]).stragglers
    assert (found.verdict, found.reason) == (
        "cannot tell",
        "rank 1's backward takes 20.0 ms longer than the others', but without its operations "
        "(OTEL_DLTRACE_LEVEL=collective) waiting cannot be told from computing",
    )


def test_a_longer_optimizer_alone_is_no_proof_without_operations():
    """Horovod's ranks wait in it; nothing tells a rank that computes longer there from one that waits."""
    found = analyse(ddp(3, slow={(1, "optimizer"): 20.0}, buckets=False)).stragglers
    assert (found.verdict, found.found) == ("cannot tell", ())
    assert "without its operations (OTEL_DLTRACE_LEVEL=collective) waiting cannot be told" in found.reason


def waiting_in_the_optimizer(slow: str, messages: bool = False) -> list[SpanBatch]:
    """Return two ranks of Horovod at level step: rank 1 is 20 ms slow in *slow*, rank 0 waits in its optimizer.

    With *messages* they are of MPI, at level collective.
    """
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            begin, late = 100 * n, 20 * r
            backward = begin + 10 + (late if slow in ("residual", "forward") else 0)
            forward = begin + (late if slow == "residual" else 0)
            optimizer = begin + 20 + late
            rank.step(n, begin, begin + 47).stage(n, "forward", forward, backward)
            rank.stage(n, "backward", backward, optimizer).stage(n, "optimizer", optimizer, begin + 47)
            if messages:
                handle = {"flags": Flag.ASYNC, "level": Level.COLLECTIVE}
                rank.add(Descriptor(P2P, "irecv", "world", backend="mpi"), n, optimizer, begin + 45, **handle)
    return [rank.batch() for rank in ranks]


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("stage", ["residual", "forward"])
def test_a_rank_that_waits_in_its_optimizer_is_not_accused(stage, messages):
    """The one whose own time is longer where nobody waits is named, whichever comes first in the step."""
    batches = waiting_in_the_optimizer(stage, messages)
    (found,) = analyse(batches).stragglers.found
    assert (found.rank, found.stage, found.excess) == (1, stage, 20 * MS)
    named = [(slow.slow.rank, slow.slow.stage) for slow in analyse(batches).saturation.stages]
    assert named == [(1, stage)]


def test_who_waits_in_the_optimizer_for_a_backward_cannot_be_told():
    """One rank's backward is longer, the other's optimizer: either may be the wait."""
    found = analyse(waiting_in_the_optimizer("backward")).stragglers
    assert (found.verdict, found.found) == ("cannot tell", ())


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


def accumulating(numbered: bool, source: Source = Source.BOUND) -> list[SpanBatch]:
    """Return two ranks with four backwards a step, each after 30 ms on rank 1 that no stage covers: rank 0 waits.

    Moving the batches has pieces at both ends of the step, little in all. Where a backward is of two DDP models its
    collectives are not *numbered*.
    """
    ranks = [Rank(r, 2) for r in range(2)]
    bucket = {"tensor": "bucket 0", "source": source, "flags": Flag.ASYNC}
    for n in range(12):
        for r, rank in enumerate(ranks):
            begin = 1000 * n
            rank.step(n, begin, begin + 200, seq=4 * n + 1)
            rank.stage(n, "to_device", begin + 1, begin + 171, total=2, pieces=2)
            rank.stage(n, "forward", begin, begin + 155, total=20, pieces=4)
            for micro in range(4):
                ready, reduced = begin + 50 * micro + (40 if r else 10), begin + 50 * micro + 41
                rank.collective(n, ready, reduced, (4 * n + micro + 1) * numbered, **bucket)
            total = 4 * (6 if r else 36)
            rank.stage(n, "backward", begin + (35 if r else 5), begin + 191, total=total, pieces=4)
    return [rank.batch() for rank in ranks]


@pytest.mark.parametrize("source", [Source.BOUND, Source.HOST_DONE])
@pytest.mark.parametrize("numbered", [True, False])
def test_a_rank_waits_in_every_backward_of_its_step(numbered, source):
    """Not in the last one alone: it was named for waiting, and its backward told as slow."""
    report = analyse(accumulating(numbered, source))
    (found,) = report.stragglers.found
    assert (found.rank, found.stage, found.arrivals) == (1, "residual", 11 * numbered)
    assert [(slow.slow.rank, slow.slow.stage) for slow in report.saturation.stages] == [(1, "residual")]
    waited = {r.rank: r.mean for part in report.timings.stages if part.name == "grad_sync" for r in part.ranks}
    assert waited == {0: 4 * 31 * MS, 1: 4 * MS}


def through_two_models(backwards: int) -> list[SpanBatch]:
    """Return two ranks with a backward through two DDP models, as a GAN's, 30 ms slower on rank 1 in the first.

    Its buckets are done before the second's are launched. Of two *backwards* the first goes through that one alone.
    """
    ranks = [Rank(r, 2) for r in range(2)]
    bucket = {"tensor": "bucket 0", "source": Source.HOST_DONE, "flags": Flag.ASYNC}
    for n in range(12):
        for r, rank in enumerate(ranks):
            begin, slower = 1000 * n, 30 * r
            rank.step(n, begin, begin + 200)
            if backwards > 1:
                rank.collective(n, begin + 4, begin + 5, 3 * n + 3, **bucket)
            rank.collective(n, begin + 10 + slower, begin + 41, 3 * n + 1, **bucket)
            rank.collective(n, begin + 60 + slower, begin + 91, 3 * n + 2, **bucket)
            rank.stage(n, "backward", begin, begin + 92, pieces=backwards)
    return [rank.batch() for rank in ranks]


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_backward_through_two_models_waits_once(backwards):
    """While it goes on to the second it computes: that was told as waiting, and rank 1 as 60 ms slower."""
    (found,) = analyse(through_two_models(backwards)).stragglers.found
    assert (found.rank, found.stage, found.excess) == (1, "backward", 30 * MS)


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


STEPLESS_BUCKETS = {"source": Source.BOUND, "flags": Flag.ASYNC, "tensor": "bucket 0"}


def without_steps(case: str) -> list[SpanBatch]:
    """Return ranks without steps, rank 1 of which comes 5 ms late to each collective, and nobody knows why.

    It is by its host's clock, with or without another rank beside it, or not much as others are under way, or it waited
    for a message, or others are not here. In what sets MPI up, and what servers answer at once, it waited for nobody.
    """
    of_host = {"clocks": "ab", "clocks, as beside it": "abb", "its own": "abb"}
    hosts = [f"node-{host}" for host in of_host.get(case, "aa")]
    world = {"missing": 4}.get(case, 2)
    ranks = [Rank(r, world, host) for r, host in enumerate(hosts)]
    many = 25 if case == "at once" else 1
    late = 0.3 if case == "at once" else 5
    for n in range(20):
        for rank in ranks[1:] if len(hosts) > 2 else ():
            begin = 100 * n + 91 + (rank is ranks[1]) * (0.1 if "clocks" in case else 4)
            rank.collective(NO_STEP, begin, 100 * n + 98, n + 1, group="of one host", group_size=2)
        for r, rank in enumerate(ranks):
            begin = 100 * n + 20 + late * r
            for one in range(many):
                extra = STEPLESS_BUCKETS | ({"source": Source.HOST_ISSUE} if case == "issued" else {})
                if r < 2:
                    rank.collective(NO_STEP, begin, 100 * n + 90, many * n + one + 1, **extra)
            if case == "message" and r == 1:
                message = Descriptor(P2P, "recv", backend="gloo", group="0")
                rank.add(message, NO_STEP, 100 * n + 19, begin, seq=n + 1, a=2)
    if case == "set up":
        ranks[1].collective(NO_STEP, 0, 90, 0, "init", backend="mpi")
    if case == "answered at once":
        ranks[1].collective(NO_STEP, 0, 90, 0, "push_pull", backend="byteps", tensor=f"{ASYNC_PARAM}w")
    return [rank.batch() for rank in ranks]


@pytest.mark.parametrize(
    ("case", "verdict"),
    [
        *[
            (case, "cannot tell")
            for case in ("clocks", "clocks, as beside it", "issued", "at once", "message", "missing")
        ],
        *[(case, "straggler") for case in ("", "its own", "set up", "answered at once")],
    ],
)
def test_without_steps_nobody_is_named_for_what_others_may_have_done(case, verdict):
    """Without any of it rank 1 is named."""
    assert analyse(without_steps(case)).stragglers.verdict == verdict


@pytest.mark.parametrize(
    ("late", "who"),
    [
        pytest.param(lambda _: (1, 5.0), 1, id="always the same"),
        pytest.param(lambda n: (n % 2, 5.0), None, id="in turn"),
        pytest.param(lambda n: (1 if n % 2 else 0, 5.0 if n % 2 else 0.1), 1, id="by far"),
        pytest.param(lambda _: (1, 0.1), None, id="hardly"),
        pytest.param(lambda n: (1, 500.0 if n == 7 else 0.01), None, id="once"),
        pytest.param(lambda n: (1, 300.0 if n % 4 == 1 else 0.1), 1, id="each fourth turn"),
        pytest.param(lambda n: (1, 300.0 if n in (3, 7, 9, 11) else 0.1), None, id="four times"),
    ],
)
def test_without_steps_the_collectives_tell_who_makes_the_others_wait(late, who):
    """The one that comes last to them, time and again, and alone costs the others a part of the time that counts."""
    ranks, now = [Rank(r, 2) for r in range(2)], 0.0
    for n in range(20):
        last, by = late(n)
        for r, rank in enumerate(ranks):
            rank.collective(NO_STEP, now + (by if r == last else 0), now + by + 0.1, n + 1)
        now += by + 20
    report = analyse([rank.batch() for rank in ranks])
    told = [(one.rank, one.stage) for one in report.stragglers.found]
    assert (report.stragglers.verdict, told) == (("cannot tell", []) if who is None else ("straggler", [(who, "")]))
    assert "Steps from" not in rendered(report)


@pytest.mark.parametrize(("computes", "verdict"), [(0, "none"), (6, "straggler")])
def test_who_is_done_later_with_a_collective_is_not_named_for_coming_later_to_the_next(computes, verdict):
    """Rank 0 has the sum 5 ms after the others, as MPI's algorithm has it: only what it does itself counts."""
    ranks, begins = [Rank(r, 3) for r in range(3)], [0, 0, 0]
    for n in range(12):
        done = max(begins) + 30
        for r, rank in enumerate(ranks):
            end = done + 5 * (r == 0)
            rank.step(n, begins[r], end).collective(n, begins[r] + 8, end, n + 1, backend="mpi", group="world")
            begins[r] = end + (computes if r == 0 else 0)
    assert analyse([rank.batch() for rank in ranks]).stragglers.verdict == verdict


def test_where_no_operations_are_recorded_all_that_no_stage_covers_may_be_waiting():
    """At level step a program of MPI has nothing but steps, each as long as the slowest rank's."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for rank in ranks:
            rank.step(n, 100 * n, 100 * n + 25)
    found = analyse([rank.batch() for rank in ranks]).stragglers
    assert (found.verdict, found.reason) == (
        "cannot tell",
        "no rank takes longer than the others by itself, but without its operations (OTEL_DLTRACE_LEVEL=collective) "
        "waiting cannot be told from computing in the part of the step outside any stage",
    )


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("awaited_in", "stage"), [("residual", "backward"), ("residual", "optimizer"), ("forward", "optimizer")]
)
def test_who_waits_where_no_operations_are_recorded_is_not_accused(ranks, awaited_in, stage):
    """A loop that reduces by hand, or a sharded model: rank 1 computes for longer, the others are as long in a wait."""
    out = [Rank(r, ranks) for r in range(ranks)]
    now = [0] * ranks
    for n in range(10):
        took = [{"backward": 10, "optimizer": 10} | ({stage: 30} if r == 1 else {}) for r in range(ranks)]
        forward = [max(now) + 10] * ranks if awaited_in == "forward" else [begin + 10 for begin in now]
        backward = [begin + mine["backward"] for begin, mine in zip(forward, took, strict=True)]
        reduced = [max(backward) + 1] * ranks if awaited_in == "residual" else backward
        for r, rank in enumerate(out):
            end = reduced[r] + took[r]["optimizer"]
            rank.step(n, now[r], end).stage(n, "forward", now[r], forward[r])
            rank.stage(n, "backward", forward[r], backward[r]).stage(n, "optimizer", reduced[r], end)
            now[r] = end
    found = analyse([rank.batch() for rank in out]).stragglers
    assert (found.verdict, found.reason) == (
        "cannot tell",
        f"rank 1's {stage} takes 20.0 ms longer than the others', but without its operations "
        "(OTEL_DLTRACE_LEVEL=collective) waiting cannot be told from computing",
    )


def test_who_waits_where_no_operations_are_recorded_may_do_so_in_a_stage_that_the_slow_rank_lacks():
    """Rank 0 takes part in a backward that rank 1 has not, as one whose part of the model is frozen."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            begin, ready = 40 * n, 40 * n + 10 + 20 * r
            rank.step(n, begin, begin + 40).stage(n, "forward", begin, ready)
            rank.stage(n, "optimizer", begin + 31, begin + 40)
        ranks[0].stage(n, "backward", 40 * n + 10, 40 * n + 31)
    (found,) = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert (found.rank, found.stage, found.excess) == (1, "forward", 20 * MS)


def test_who_has_a_stage_that_the_others_lack_may_be_who_they_wait_for():
    """Rank 0 alone does something before its optimizer, and rank 1 waits for it in the next forward."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        begin = 40 * n
        ranks[0].step(n, begin, begin + 40).stage(n, "forward", begin, begin + 10)
        ranks[0].stage(n, "backward", begin + 10, begin + 30).stage(n, "optimizer", begin + 30, begin + 40)
        ranks[1].step(n, begin - 20, begin + 20).stage(n, "forward", begin - 20, begin + 10)
        ranks[1].stage(n, "optimizer", begin + 10, begin + 20)
    found = analyse([rank.batch() for rank in ranks]).stragglers
    assert (found.verdict, found.found) == ("cannot tell", ())


def test_blocked_time_is_not_a_ranks_own():
    """A loop that reduces by hand: rank 0's long stage is a wait for rank 1, whose forward is slow."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        at = 100 * n
        for r, rank in enumerate(ranks):
            forward = 10 + 20 * r
            rank.step(n, at, at + 50).stage(n, "forward", at, at + forward)
            rank.stage(n, "reduce_metrics", at + forward, at + 45)
            rank.collective(n, at + forward + 1, at + 40, n + 1, flags=Flag.ASYNC).wait(n, at + forward + 2, at + 40)
    batches = [rank.batch() for rank in ranks]

    assert own(step_tables(batches)[0])[3].tolist() == [50 * MS, 10 * MS, 7 * MS, 5 * MS]
    assert analyse(batches).stragglers.found == (Straggler(1, "forward", 30 * MS, 10 * MS, 20 * MS, 9, 9, 9, 20 * MS),)


def test_what_a_program_launches_itself_in_the_backward_is_not_waited_for_at_its_end():
    """A layer's exchange is over early in the backward, and rank 1 computes for long behind it: that is its own."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            at, done = 100 * n, 100 * n + 12 + 20 * r
            rank.step(n, at, at + 40).stage(n, "forward", at, at + 2).stage(n, "backward", at + 2, done)
            rank.collective(n, at + 4, at + 6, 2 * n + 1, source=Source.BOUND, flags=Flag.ASYNC)
            rank.collective(n, done, at + 36, 2 * n + 2)
    report = analyse([rank.batch() for rank in ranks])

    (found,) = report.stragglers.found
    assert (found.rank, found.stage, found.excess) == (1, "backward", 20 * MS)
    (grad_sync,) = (stage for stage in report.timings.stages if stage.name == "grad_sync")
    assert [timing.mean for timing in grad_sync.ranks] == [24 * MS, 4 * MS]


def test_a_stage_inside_another_counts_once():
    """The copy to the device is not prepare_batch's own time."""
    rank = Rank().step(0, 0, 20).stage(0, "prepare_batch", 0, 10).stage(0, "to_device", 2, 9)
    table = step_tables([rank.batch()])[0]
    assert columns(table.stages) == ("between steps", "prepare_batch", "to_device", "residual")
    assert own(table).tolist() == [[0, 3 * MS, 7 * MS, 10 * MS]]


def test_an_accumulated_backward_is_told_by_its_last_piece():
    """Two forwards and backwards in a step; the buckets are launched in the second backward."""
    rank = Rank(0, 2).step(0, 0, 30)
    rank.stage(0, "forward", 0, 14, 8, 2).stage(0, "backward", 4, 28, 20, 2)
    rank.collective(0, 18, 28, 1, tensor="bucket 0", source=Source.BOUND, flags=Flag.ASYNC)
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, 8 * MS, 10 * MS, 2 * MS]]


@pytest.mark.parametrize(("seen", "blocked_ms"), [((False, False), 12), ((True, False), 12), ((True, True), 7)])
def test_buckets_that_are_all_seen_to_end_block_until_then(seen, blocked_ms):
    """At level `partition` a hook sees them; what backward does after the last of them is the rank's own."""
    rank = Rank(0, 2).step(0, 0, 40).stage(0, "backward", 10, 30)
    for n, (begin, end) in enumerate(((14, 25), (18, 23))):
        how = {"source": Source.HOST_DONE if seen[n] else Source.BOUND, "flags": Flag.ASYNC}
        rank.collective(0, begin, end if seen[n] else 30, n + 1, tensor=f"bucket {n}", **how)
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, (20 - blocked_ms) * MS, 20 * MS]]


def test_what_a_pipeline_waits_between_its_pieces_is_in_none_of_them():
    """Two micro-batches take 2 ms each in either stage: all it waits for messages lies in the gaps."""
    rank = Rank(0, 2).step(0, 0, 60)
    rank.stage(0, "forward", 0, 20, 4, 2).stage(0, "backward", 30, 55, 4, 2)
    for begin, end in ((2, 17), (20, 29), (32, 42)):
        rank.add(Descriptor(P2P, "recv"), 0, begin, end)
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, 4 * MS, 4 * MS, (60 - 8 - 15 - 9 - 10) * MS]]


def pipeline(
    ranks: int, slow: float = 0.0, where: tuple[int, str] = (1, "forward"), **of_message: int
) -> list[SpanBatch]:
    """Return a pipeline of four micro-batches, forwards of 4 ms, then backwards of 8, with a collective at its end.

    A rank is *slow* ms longer in a stage, *where*.
    """
    out = [Rank(r, ranks) for r in range(ranks)]
    begin = 0.0
    for n in range(10):
        before, now, pieces = begin, [begin] * ranks, [dict[str, list[tuple[float, float]]]() for _ in range(ranks)]
        for stage, order, length in (("forward", [*range(ranks)], 4.0), ("backward", [*range(ranks)][::-1], 8.0)):
            sent = [begin] * 4
            for r in order:
                for batch in range(4):
                    if r != order[0]:
                        came, now[r] = now[r], max(now[r], sent[batch])
                        out[r].add(Descriptor(P2P, "recv"), n, came, now[r], a=order[order.index(r) - 1], **of_message)
                    piece = now[r], now[r] + length + (slow / 4 if (r, stage) == where else 0)
                    sent[batch] = now[r] = piece[1]
                    pieces[r].setdefault(stage, []).append(piece)
        begin = max(now) + 1
        for r, rank in enumerate(out):
            rank.step(n, before, begin).collective(n, now[r], begin, n + 1, level=of_message.get("level", Level.PHASE))
            for stage, of in pieces[r].items():
                rank.stage(n, stage, of[0][0], of[-1][1], sum(end - start for start, end in of), 4)
    return [rank.batch() for rank in out]


def test_in_a_pipeline_the_slow_rank_alone_is_named_with_its_own_time():
    """The others' waits for messages would fit into their pieces, and are between them, on all ranks."""
    (found,) = analyse(pipeline(4, slow=16.0)).stragglers.found
    assert found == Straggler(1, "forward", 32 * MS, 16 * MS, 16 * MS, 9, 9, 9, 8 * MS)


def test_what_a_sharded_model_waits_for_is_in_its_pieces_whatever_else_is_between_them():
    """5 ms of the program's own between two pieces of 10 ms each, in either of which 3 ms are waited."""
    rank = Rank(0, 2).step(0, 0, 30).stage(0, "forward", 0, 25, 20, 2)
    for seq, begin in enumerate((1, 16), 1):
        rank.collective(0, begin, begin + 3, seq, "all_gather_into_tensor")
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, 14 * MS, 10 * MS]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_an_even_pipeline_nobody_is_named(ranks):
    """Rank 0 comes last to what follows the backwards, in each step, since the others' gradients come to it last."""
    report = analyse(pipeline(ranks))
    assert report.stragglers.verdict == "none"
    assert [rank.last for rank in report.waits.ranks] == [10, *[0] * (ranks - 1)]


def test_a_wait_in_a_stage_of_several_pieces_is_not_taken_for_the_one_around_it():
    """Metrics are gathered before and, for 40 of its 60 ms, while a batch is prepared: there a rank waits for 36 ms."""
    rank = Rank(0, 2).step(0, 0, 100).stage(0, "prepare_batch", 30, 90, 20).stage(0, "reduce_metrics", 10, 85, 48, 3)
    rank.collective(0, 32, 68, 1)
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, (48 - 36) * MS, 20 * MS, (100 - 20 - 48) * MS]]


def test_what_may_be_in_an_evaluation_or_in_sharing_its_metrics_is_in_the_latter():
    """It is, until its pieces are full: a gather of 30 ms does not fit, and is one of a sharded model's."""
    rank = Rank(0, 2).step(0, 0, 130).stage(0, "evaluate", 0, 110, 60, 4).stage(0, "reduce_metrics", 10, 110, 27, 3)
    for seq, (begin, end) in enumerate(((10, 18), (30, 38), (45, 75), (101, 110)), 1):
        rank.collective(0, begin, end, seq, "all_gather")
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, (60 - 30) * MS, 2 * MS, (130 - 60 - 27) * MS]]


def test_a_rank_without_steps_is_told_beside_one_that_shares_metrics():
    """It was killed in its first step, in which it communicates as the other does."""
    ranks = [Rank(r, 2).stage(0, "reduce_metrics", 0, 5).collective(0, 1, 2, 1) for r in range(2)]
    ranks[0].step(0, 0, 10)
    ranks[1].step(0, 0, 10, flags=Flag.TRUNCATED)
    report = analyse([rank.batch() for rank in ranks])
    assert report.stragglers.reason == "1 of 2 ranks have no step in the part looked at: 1"
    assert [rank.step.count for rank in report.breakdown.steady] == [1, 0]


HANDLES = {"flags": Flag.ASYNC, "level": Level.COLLECTIVE}


@pytest.mark.parametrize(("ranks", "waited"), [(2, 8), (4, 16)])
def test_who_may_have_waited_for_handles_is_not_named_for_coming_late(ranks, waited):
    """Rank 0 waits for the others' gradients, and nobody recorded it: that it comes last confirms nothing."""
    report = analyse(pipeline(ranks, **HANDLES))
    assert (report.stragglers.verdict, report.stragglers.reason) == (
        "cannot tell",
        f"rank 0's time outside any stage takes {waited}.0 ms longer than the others', but without its waits "
        "(OTEL_DLTRACE_LEVEL=phase) waiting cannot be told from computing",
    )
    assert report.saturation.stages == ()


@pytest.mark.parametrize("where", [(1, "forward"), (0, "backward")])
def test_who_is_slow_between_two_ranks_with_handles_is_named_rather_than_who_waits(where):
    """Rank 0 is longer outside any stage as well, where it waits."""
    (found,) = analyse(pipeline(2, 16.0, where, **HANDLES)).stragglers.found
    assert (found.rank, found.stage, found.excess) == (*where, 16 * MS)


@pytest.mark.parametrize("message", [0, 10])
def test_who_is_a_little_slow_in_several_stages_is_named_though_it_has_messages(message):
    """3 ms longer in either of two stages are below the threshold each, and what it was in messages rank 0 was too."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(20):
        for r, rank in enumerate(ranks):
            begin, each = 100 * n, 40 + 3 * r
            rank.stage(n, "forward", begin, begin + each).stage(n, "backward", begin + each, begin + 2 * each)
            rank.add(Descriptor(P2P, "send", backend="gloo"), n, begin + 2, begin + 2 + message, a=1 - r)
            rank.collective(n, begin + 2 * each, begin + 88, n + 1).step(n, begin, begin + 92)
    (found,) = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert found == Straggler(1, "", 0, 0, 0, 0, 19, 19, 6 * MS)


@pytest.mark.parametrize("how", [0, int(Flag.ASYNC)], ids=["blocking", "handles"])
def test_who_is_a_little_late_to_each_layer_of_a_sharded_model_is_late_by_all_of_it(how):
    """Rank 1 is 1 ms late to each of 16 in which all wait: too little for one alone."""
    ranks = [Rank(r, 4) for r in range(4)]
    for n in range(12):
        for r, rank in enumerate(ranks):
            begin = 100 * n
            for layer in range(16):
                at = begin + 3.5 * layer
                called, over = at + (3 if r == 1 else 2), at + 3.5
                rank.collective(n, called, over, 16 * n + layer + 1, "all_gather_into_tensor", flags=how)
                if how:
                    rank.wait(n, called + 0.01, over)
                    rank.rows[-1]["parent_no"] = rank.rows[-2]["span_no"]
            rank.step(n, begin, begin + 57).stage(n, "forward", begin, begin + 56)
    (found,) = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert (found.rank, found.stage, found.excess) == (1, "forward", 16 * MS)
    assert (found.late, found.arrivals, found.lateness) == (11, 11, 16 * MS)


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        pytest.param("broadcast", ["node"] * 4, id="nobody waits for all"),
        pytest.param("all_gather_into_tensor", [f"node-{r}" for r in range(4)], id="several clocks"),
    ],
)
def test_lateness_that_may_not_add_up_is_not_added_up(name, hosts):
    """Who is late to a broadcast meets nobody there, and of several hosts' clocks the errors would add up as well."""
    ranks = [Rank(r, 4, host) for r, host in enumerate(hosts)]
    for r, rank in enumerate(ranks):
        for layer in range(16):
            rank.collective(0, 10 * layer + (r == 1), 10 * layer + 5, layer + 1, name)
    joined = join([rank.batch() for rank in ranks])
    assert len(in_a_row(joined, np.ones(len(joined), bool))) == 0


def test_what_ranks_come_late_by_chance_to_many_layers_makes_nobody_late():
    """Each is late to some, by more than it is early to others; beside what the others are late by in all, none is."""
    rng = np.random.default_rng(0)
    ranks = [Rank(r, 8) for r in range(8)]
    now = 0.0
    for n in range(20):
        begin = now
        for layer in range(40):
            called = now + 1 + rng.gamma(0.5, 0.6, 8)
            now = called.max() + 0.3
            for rank, at in zip(ranks, called.tolist(), strict=True):
                rank.collective(n, at, now, 40 * n + layer + 1, "all_gather_into_tensor")
        for rank in ranks:
            rank.step(n, begin, now).stage(n, "forward", begin, now)
    assert analyse([rank.batch() for rank in ranks]).stragglers.verdict == "none"


@pytest.mark.parametrize("turns", [2, 3])
def test_a_wait_is_in_the_stage_whose_turn_it_is(turns):
    """A sharded model that accumulates: 10 ms of each forward and 8 of each backward are waited, the last longer."""
    rank, now = Rank(0, 2).step(0, 0, 40 * turns + 20), 0
    for turn in range(turns):
        backward = 40 if turn == turns - 1 else 20
        for begin, end in ((now + 1, now + 11), (now + 21, now + 13 + backward)):
            rank.collective(0, begin, end, len(rank.rows) + 1, "all_gather_into_tensor")
        now += 20 + backward
    rank.stage(0, "forward", 0, now - 40, 20 * turns, turns)
    rank.stage(0, "backward", 20, now, 20 * turns + 20, turns)
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, 10 * turns * MS, 8 * turns * MS, 0]]


def test_what_does_not_fit_into_a_stage_was_in_the_one_it_alternates_with():
    """Turns may be of unequal length: whoever is told to hold more than it lasted did not."""
    rank = Rank(0, 2).step(0, 0, 100)
    rank.stage(0, "forward", 0, 80, 60, 3).stage(0, "backward", 10, 100, 40, 3)
    for begin, end in ((12, 36), (50, 76)):
        rank.collective(0, begin, end, len(rank.rows) + 1)
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, 50 * MS, 0, 0]]


def test_few_collectives_beside_messages_name_nobody_without_a_stage():
    """Rank 0 came late to the collectives of a quarter of the steps, and nothing else tells of it."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(40):
        for r, rank in enumerate(ranks):
            rank.step(n, 100 * n, 100 * n + 60).stage(n, "forward", 100 * n, 100 * n + 20)
            rank.add(Descriptor(P2P, "recv"), n, 100 * n + 20, 100 * n + 30)
            if n % 4 == 0:
                rank.collective(n, 100 * n + (35 if r else 50), 100 * n + 52, n // 4 + 1)
    assert [one.rank for one in analyse([rank.batch() for rank in ranks]).stragglers.found] == []


@pytest.mark.parametrize("late", [0, 1])
def test_one_collective_beside_messages_accuses_nobody_and_confirms_nothing(late):
    """Ranks send each other messages in each step, and meet once: rank 1 is slow, whoever came late to that alone."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(12):
        for r, rank in enumerate(ranks):
            begin, forward = 100 * n, 40 if r else 10
            rank.step(n, begin, begin + 60).stage(n, "forward", begin, begin + forward)
            rank.stage(n, "optimizer", begin + 50, begin + (52 if r else 58))
            rank.add(Descriptor(P2P, "recv"), n, begin + forward, begin + 48)
    for r, rank in enumerate(ranks):
        rank.collective(11, 1158 if r == late else 1152, 1160, 1)
    found = analyse([rank.batch() for rank in ranks]).stragglers
    assert [(one.rank, one.stage, one.excess) for one in found.found] == [(1, "forward", 30 * MS)]
    assert verdict(found)[1:] == ["Nothing confirms it: no collective shows who came late."]


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


def test_the_frontier_is_the_slowest_ranks_step():
    """F_s = max of the ranks' sums; what each stage adds to it is exposed, and the sum is exact."""
    durations = np.array([[[4, 2, 3], [4, 2, 3]], [[1, 6, 1], [1, 8, 1]]])
    assert frontier(("a", "b", "c"), (0, 5), durations) == (
        FrontierStage("a", 4, 0, 2),
        FrontierStage("b", 4, 5, 2),
        FrontierStage("c", 2, 0, 1, ambiguous=True),
    )


# -- drift ---------------------------------------------------------------------------------------


def numbered(rank: int, seqs: dict[int, int]) -> Rank:
    """Return a rank whose steps began at these numbers of the world group."""
    out = Rank(rank, 3)
    for step, seq in seqs.items():
        out.step(step, 10 * step, 10 * step + 9, seq=seq)
    return out


def test_ranks_that_count_alike_do_not_drift():
    """A seq of 0 is not known, and is not compared."""
    seqs = {n: 5 * n for n in range(10)}
    tables = step_tables([numbered(r, seqs).batch() for r in range(3)])
    assert drift(tables) == Drift(9, 0, ())


def test_a_rank_that_counts_differently_is_named():
    """Rank 0 missed a step from 4 on; ranks 1 and 2 agree, so it is rank 0 that drifted."""
    usual = {n: 5 * n + 1 for n in range(10)}
    drifted = {n: 5 * (n + (n >= 4)) + 1 for n in range(9)}
    batches = [numbered(r, drifted if r == 0 else usual).batch() for r in range(3)]

    assert drift(step_tables(batches)) == Drift(10, 1, (DriftedRank(0, 4, 26, 21, 1),))
    report = analyse(batches)
    assert report.stragglers.reason == "rank 0 numbers its steps differently from the others"
    assert "\nRank 0 numbers its steps differently: before step 4" in rendered(report)


def test_a_step_that_begins_before_a_collective_and_not_after_it_is_no_drift():
    """A rank with a batch more fetches it, breaks off, and then takes part in the collective of the epoch's end."""
    usual = {n: 5 * n + 1 + (n >= 6) for n in range(10)}
    tables = step_tables([numbered(0, usual).batch(), numbered(1, usual | {6: 31}).batch()])
    assert drift(tables) == Drift(10, 0, ())


def test_ranks_without_a_common_step_are_not_compared():
    """One joined when the other had left."""
    tables = step_tables([numbered(r, {n + 5 * r: n + 1 for n in range(3)}).batch() for r in range(2)])
    assert drift(tables) == Drift(0, 0, ())


def test_a_drift_that_is_no_shift_is_said_as_such():
    """Steps that meet no numbering of the others have no distance."""
    tables = step_tables([numbered(0, {0: 1, 1: 5}).batch(), numbered(1, {0: 1, 1: 7}).batch()])
    assert drift(tables) == Drift(2, 0, (DriftedRank(1, 1, 7, 5, None),))


# -- the whole -----------------------------------------------------------------------------------


def test_a_report_says_what_it_rests_on():
    """Ranks, steps, losses of all drains, clocks."""
    hosts = {0: ("a", Anchor(0, 0, 30)), 1: ("b", Anchor(0, 0, 50))}
    drains = [
        {"summary": {"lapped_phase": 7, "spans": 9, "truncated": 1}, "ended": True},
        {"summary": {"lapped_phase": 1, "dropped_by_quota": 3, "unrecorded": 2, "removed": 5, "otlp": {"sent": 4}}},
    ]
    batches = ddp(3, steps=10, hosts={**hosts, 2: hosts[1]})[:2]
    batches.append(Rank(0, 3, "a", role="server", nonce=99, anchor=hosts[0][1]).wait(0, 0, 1).batch())

    assert analyse(batches, drains).guards == Guards(
        ranks=(0, 1),
        missing=(2,),
        expected=3,
        hosts=2,
        steps=(0, 9),
        common_steps=10,
        spans=141,
        truncated=0,
        lost=(("dropped_by_quota", 3), ("lapped_phase", 8), ("removed", 5), ("unrecorded", 2)),
        clock="wall clocks of several hosts",
        uncertainty=80,
        unused=0,
    )
    begun = analyse(batches, [*drains, {"ended": False}]).guards
    assert (begun.is_over, "more may come: a drain has not ended" in rests_on(begun)) == (False, True)


def test_what_a_report_rests_on_costs_the_ranks_that_are_there():
    """How many there should be is only said, and may be nonsense."""
    report = analyse([Rank(rank, 1 << 31).step(0, 0, 1).batch() for rank in (0, 2, 3)])
    assert report.guards.missing == (1, *range(4, MOST_LISTED + 3))
    assert rests_on(report.guards).startswith("Rests on: ranks 0, 2-3 of 2147483648, missing 1, 4-2147483647; ")


def test_of_two_processes_of_a_rank_the_one_with_the_steps_speaks():
    """A forked child has the rank of its parent, and no steps, or a few."""
    parent = Rank(0).step(0, 0, 10).step(1, 10, 20)
    child = Rank(0, nonce=77).step(0, 5, 6)
    batches = [child.batch(), parent.batch()]
    assert [(t.rank, t.steps.tolist()) for t in step_tables(batches)] == [(0, [0, 1])]
    assert analyse(batches).guards.unused == 1


def test_processes_of_a_rank_whose_steps_go_on_are_one_table():
    """As timelines in several files are: what lies between them is no time of a step, whatever their clocks say."""
    first = Rank(0).step(0, 100, 110).step(1, 110, 120).stage(1, "forward", 112, 118)
    first.step(2, 120, 999, flags=Flag.TRUNCATED).stage(2, "forward", 120, 990)
    then = Rank(0, nonce=77).stage(3, "optimizer", 20, 24).wait(3, 21, 22)
    then.step(2, 5, 15).stage(2, "backward", 6, 14).step(3, 18, 28)
    batches = [then.batch(), first.batch()]
    (table,) = step_tables(batches)

    assert (table.steps.tolist(), table.part.tolist()) == ([0, 1, 2, 3], [0, 0, 1, 1])
    assert (table.duration // MS).tolist() == [10, 10, 10, 10]
    assert (table.between // MS).tolist() == [0, 0, 0, 3]
    assert dict(zip(table.stages, (table.total // MS).T.tolist(), strict=True)) == {
        "forward": [0, 6, 0, 0],
        "backward": [0, 0, 8, 0],
        "optimizer": [0, 0, 0, 4],
    }
    assert (own(table)[:, columns(table.stages).index("optimizer")] // MS).tolist() == [0, 0, 0, 3]
    assert analyse(batches).guards.unused == 0


def test_nothing_recorded_is_a_report_too():
    """No batch, or an empty one, is no error."""
    assert analyse([]).guards.steps is None
    assert analyse([Rank(0, 2).batch()]).guards.ranks == (0,)


def test_time_that_ranks_cover_is_told_of_runs_of_any_length():
    """One rank's step of hours, as an evaluation is, beside hundreds of thousands of short ones."""
    group = np.arange(640_000)
    start = np.zeros(len(group), np.int64)
    end = np.where(group == 7, 5 * 3600 * 1000 * MS, 10 * MS)
    assert unions(group, start, end, len(group)).tolist() == end.tolist()


def worlds() -> list[SpanBatch]:
    """Return two ranks of one world, and two of another whose steps are numbered alike and take longer."""
    fast, slow = ddp(2), ddp(2, slow={(0, "forward"): 30.0, (1, "forward"): 30.0})
    bound = [replace(b.process, bind=replace(b.process.bind, world="rollout"), nonce=r + 9) for r, b in enumerate(slow)]
    return fast + [replace(batch, process=process) for batch, process in zip(slow, bound, strict=True)]


def test_worlds_of_one_job_are_looked_at_apart():
    """Rank 1 of one is not rank 1 of the other."""
    found = {name: analyse(batches) for name, batches in by_world(worlds()).items()}
    assert {name: (r.guards.ranks, r.guards.unused, r.stragglers.verdict) for name, r in found.items()} == {
        "default": ((0, 1), 0, "none"),
        "rollout": ((0, 1), 0, "none"),
    }


def test_a_step_that_was_cut_off_hides_no_process():
    """Both ranks were killed in their first step: nobody else has steps of theirs."""
    cut = [Rank(r, 2).step(0, 0, 10, flags=Flag.TRUNCATED).batch() for r in range(2)]
    assert analyse(cut).guards.unused == 0

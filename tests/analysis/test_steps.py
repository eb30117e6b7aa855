"""One rank's steps: stages, residual, warm-up, what of them counts, and whether ranks count them alike."""

import pytest

from otel_dltrace.analysis.compose import analyse
from otel_dltrace.analysis.spread import Spread
from otel_dltrace.analysis.steps.breakdown import RankBreakdown, StageTime, breakdown
from otel_dltrace.analysis.steps.drift import Drift, DriftedRank, drift
from otel_dltrace.analysis.steps.table import step_tables
from otel_dltrace.analysis.steps.throughput import Rates
from otel_dltrace.model.semconv import Flag
from tests.support.runs import MS, Rank, ddp, rendered


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

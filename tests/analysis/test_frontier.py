"""The frontier: which stage holds all ranks up, from steps and stages alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from otel_dltrace.analysis.blame.frontier import FrontierStage, frontier
from otel_dltrace.analysis.compose import analyse
from otel_dltrace.model.semconv import STAGE, STEP
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.model.time import Anchor
from otel_dltrace.report.words import where_the_step_goes
from tests.support.runs import MS, ddp


def summary_tier(batches: list[SpanBatch]) -> list[SpanBatch]:
    """Return what is recorded of *batches* while tracing windows are closed: steps and stages."""
    return [batch.take(batch.is_kind(STEP, STAGE)) for batch in batches]


@given(
    arrays.arrays(
        np.int64,
        st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 6)),
        elements=st.integers(0, 10**9),
    )
)
def test_the_exposed_times_sum_to_the_slowest_ranks_step(durations):
    """Exactly, but for the rounding of each stage's mean; none is negative."""
    found = frontier(tuple("abcdef")[: durations.shape[2]], tuple(range(len(durations))), durations)
    slowest = durations.sum(axis=2).max(axis=0).mean()
    assert sum(stage.exposed for stage in found) == pytest.approx(slowest, abs=len(found) / 2 + 1e-6 * slowest)
    assert min(stage.exposed for stage in found) >= 0


def test_the_frontier_of_a_run_names_stage_and_rank_without_any_clock():
    """A late DataLoader on rank 0 and a long forward on rank 1, on hosts whose clocks are hours apart."""
    hosts = {0: ("a", Anchor(0, 0, 30)), 1: ("b", Anchor(0, 10**13, 30))}
    slow = {(0, "dataloader_next"): 6.0, (1, "forward"): 20.0}

    report = analyse(summary_tier(ddp(2, steps=12, slow=slow, hosts=hosts)))

    assert report.stragglers.frontier == (
        FrontierStage("between steps", 0, 0, 11, ambiguous=True),
        FrontierStage("dataloader_next", 8 * MS, 0, 11),
        FrontierStage("forward", 18 * MS, 1, 11),
        FrontierStage("backward", 9 * MS, 0, 11, ambiguous=True),
        FrontierStage("optimizer", 1 * MS, 0, 11, ambiguous=True),
        FrontierStage("residual", 0, 0, 11, ambiguous=True),
    )
    assert where_the_step_goes(report.stragglers) == (
        "Where the slowest rank's step goes, waiting included, ms and who leads: forward 18.0 (rank 1), "
        "backward 9.00 (no rank alone), dataloader_next 8.00 (rank 0), optimizer 1.00 (no rank alone)."
    )
    assert report.stragglers.longest == 36 * MS
    one = replace(report.stragglers, frontier=(FrontierStage("residual", 2 * MS, 0, 5),), longest=2 * MS)
    assert where_the_step_goes(one).endswith(": outside any stage 2.00 (rank 0).")
    assert where_the_step_goes(replace(one, longest=MS)).endswith(
        "(rank 0). That is 2.00 ms, and no rank takes more than 1.00: as when they are slow in turn."
    )


@pytest.mark.parametrize(
    ("steps", "stage"),
    [
        pytest.param([(10, 8), (10, 8), (10, 8)], FrontierStage("a", 10, 0, 3), id="one leads"),
        pytest.param([(10, 8)] * 5 + [(8, 10)] * 4, FrontierStage("a", 10, 0, 5, ambiguous=True), id="one a bit more"),
        pytest.param([(10, 8)] * 7 + [(8, 10)] * 2, FrontierStage("a", 10, 0, 7), id="one mostly"),
        pytest.param([(10, 8), (8, 10)], FrontierStage("a", 10, 0, 1, ambiguous=True), id="they take turns"),
        pytest.param([(1000, 995)] * 5, FrontierStage("a", 1000, 0, 5, ambiguous=True), id="hardly ahead"),
        pytest.param([(1000, 980)] * 5, FrontierStage("a", 1000, 0, 5), id="ahead"),
        pytest.param([(1000, 980)], FrontierStage("a", 1000, 0, 1, ambiguous=True), id="ahead by chance"),
        pytest.param([(10,), (12,)], FrontierStage("a", 11, 0, 2), id="one rank"),
    ],
)
def test_a_lead_that_is_none_is_labelled(steps, stage):
    """Less than 1 % of the step, of one or a few less than 5 %, or in half of the steps, by no more than chance."""
    durations = np.array(steps).T[:, :, np.newaxis]
    assert frontier(("a",), tuple(range(len(durations))), durations) == (stage,)


def test_who_leads_at_a_seldom_stage_is_told_by_the_steps_that_have_it():
    """Rank 1 is ahead in most steps; the checkpoint, in one of five, is rank 0's."""
    durations = np.array([[[10, 0]] * 4 + [[10, 90]], [[20, 0]] * 5])

    assert frontier(("forward", "checkpoint"), (0, 1), durations) == (
        FrontierStage("forward", 20, 1, 5),
        FrontierStage("checkpoint", 16, 0, 1),
    )


def test_no_step_has_no_frontier():
    """Nothing done by all ranks, nothing to tell."""
    assert frontier(("a",), (0, 1), np.zeros((2, 0, 1), np.int64)) == ()
    assert analyse([]).stragglers.frontier == ()


def test_the_frontier_is_the_slowest_ranks_step():
    """F_s = max of the ranks' sums; what each stage adds to it is exposed, and the sum is exact."""
    durations = np.array([[[4, 2, 3], [4, 2, 3]], [[1, 6, 1], [1, 8, 1]]])
    assert frontier(("a", "b", "c"), (0, 5), durations) == (
        FrontierStage("a", 4, 0, 2),
        FrontierStage("b", 4, 5, 2),
        FrontierStage("c", 2, 0, 1, ambiguous=True),
    )

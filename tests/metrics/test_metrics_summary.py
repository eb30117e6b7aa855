"""The summary of each step: its stages, what is left of it, its exposed communication, the throughput."""

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest

from otel_dltrace.analysis.steps.own import blocked, columns
from otel_dltrace.analysis.steps.table import step_tables
from otel_dltrace.export.metrics.summary import Observed, StepSummary
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.descriptors import Descriptors
from otel_dltrace.model.metric_batch import Point
from otel_dltrace.model.metrics import attributes_of
from otel_dltrace.model.semconv import Flag, Level
from tests.support.runs import Rank, ddp


def summed_up(rank: Rank | None = None, batch=None, parts: int = 1) -> list[Point]:
    """Return the points of a rank's spans, taken in so many parts."""
    batch = batch or rank.batch()
    summary = StepSummary(batch.rank)
    descriptors = Descriptors.of(batch.descriptors)
    rows = batch.rows.take(np.argsort(batch["end"], kind="stable"))
    return all_of(summary, np.array_split(rows, parts), descriptors)


def all_of(summary: StepSummary, parts: Iterable[Column], descriptors: Descriptors) -> list[Point]:
    """Return what the summary says of *parts*, one after the other, and at the end."""
    points = [point for part in parts for point in flat(summary.add(part, descriptors))]
    return points + flat((summary.end(), []))


def flat(found: tuple[list[Observed], list[Point]]) -> list[Point]:
    """Return observations as points, and the points."""
    observed, points = found
    return [Point(o.metric, value, o.attributes, o.rank) for o in observed for value in o.values.tolist()] + points


def of(points: list[Point], metric: str) -> list[tuple[str, float]]:
    """Return the values of *metric* with their stage, rounded to us."""
    return [(attributes_of(p.attributes).get(s.DL_PHASE, ""), round(p.value, 6)) for p in points if p.metric == metric]


def one_step() -> Rank:
    """Return a step of 20 ms with three stages, the middle one in two pieces."""
    rank = Rank(3)
    rank.stage(0, "dataloader_next", 100, 102).stage(0, "forward", 102, 110, total=6, pieces=2)
    return rank.stage(0, "optimizer", 112, 117).step(0, 100, 120, a=8)


def test_a_step_is_its_stages_and_the_rest():
    """One observation for each stage, and the residual: together they are the step."""
    points = summed_up(one_step())

    assert [p.rank for p in points] == [3] * len(points)
    assert of(points, m.DL_STEP_DURATION) == [("", 0.02)]
    assert of(points, m.DL_STEP_STAGE_DURATION) == [
        ("dataloader_next", 0.002),
        ("forward", 0.006),
        ("optimizer", 0.005),
        ("residual", 0.007),
    ]
    assert of(points, m.DL_STEP_GRAD_SYNC_EXPOSED) == []


def test_what_was_over_before_the_step_began_is_no_part_of_its_time():
    """An evaluation belongs to the step that follows it."""
    rank = Rank().stage(0, "evaluate", 50, 90).stage(0, "forward", 100, 110).step(0, 100, 120)

    assert of(summed_up(rank), m.DL_STEP_STAGE_DURATION) == [
        ("evaluate", 0.04),
        ("forward", 0.01),
        ("residual", 0.01),
    ]


def test_a_step_that_was_cut_off_has_no_summary():
    """A killed rank's last step has no length, and its stages are not all; what had ended before counts."""
    rank = one_step().stage(1, "forward", 120, 121).step(1, 120, 121, flags=Flag.TRUNCATED)
    points = summed_up(rank)

    assert of(points, m.DL_STEP_DURATION) == [("", 0.02)]
    assert dict(of(points, m.DL_STEP_STAGE_DURATION))["forward"] == 0.006


def test_what_comes_after_the_last_step_counts():
    """The last evaluation, and the checkpoint behind it, are of a step that never begins, and in no step's time."""
    rank = one_step().stage(1, "evaluate", 130, 140).stage(1, "checkpoint", 140, 145)
    found = dict(of(summed_up(rank), m.DL_STEP_STAGE_DURATION))

    assert {name: found[name] for name in ("evaluate", "checkpoint", "residual")} == {
        "evaluate": 0.01,
        "checkpoint": 0.005,
        "residual": 0.007,
    }


def test_the_last_partial_batch_counts_as_what_it_is():
    """Nine steps of 32 samples and one of 5; the rate is over the time that they took."""
    rank = Rank()
    for step in range(10):
        rank.step(step, 100 + step * 10, 110 + step * 10, a=32 if step < 9 else 5)
    points = summed_up(rank)

    assert {
        p.metric: round(p.value, 3) for p in points if p.metric not in (m.DL_STEP_DURATION, m.DL_STEP_STAGE_DURATION)
    } == {
        m.DL_TRAIN_BATCHES: 10,
        m.DL_TRAIN_SAMPLES: 293,
        m.DL_THROUGHPUT_BATCHES: 100.0,
        m.DL_THROUGHPUT_SAMPLES: 2930.0,
    }


def test_batches_that_are_accumulated_each_count():
    """Three in the first step, one in the second, which was not fetched from a DataLoader."""
    rank = Rank().stage(0, "dataloader_next", 100, 103, pieces=3).step(0, 100, 110).step(1, 110, 120)
    points = summed_up(rank)

    assert (of(points, m.DL_TRAIN_BATCHES), of(points, m.DL_THROUGHPUT_BATCHES)) == ([("", 4)], [("", 200.0)])


def test_without_batch_sizes_there_are_no_samples():
    """Batches are counted all the same."""
    points = summed_up(Rank().step(0, 100, 110).step(1, 110, 130))

    assert [(p.metric, p.value) for p in points if p.metric.startswith(("dl.train", "dl.throughput"))] == [
        (m.DL_TRAIN_BATCHES, 2),
        (m.DL_THROUGHPUT_BATCHES, pytest.approx(200 / 3)),
    ]


def exposed(rank: Rank) -> list[float]:
    """Return the exposed ms of each step."""
    return [round(p.value * 1e3, 3) for p in summed_up(rank) if p.metric == m.DL_STEP_GRAD_SYNC_EXPOSED]


SYNC = {"level": Level.COLLECTIVE, "source": s.Source.HOST_DONE}
BOUND = {"level": Level.COLLECTIVE, "source": s.Source.BOUND, "flags": Flag.ASYNC}
SEEN = {"level": Level.COLLECTIVE, "source": s.Source.HOST_DONE, "flags": Flag.ASYNC}


@pytest.mark.parametrize(
    ("add", "ms"),
    [
        pytest.param(lambda r: r.collective(0, 106, 109, 1, **SYNC), [3.0], id="a blocking call outside any stage"),
        pytest.param(lambda r: r.collective(0, 106, 109, 1, **SYNC).wait(0, 107, 109), [3.0], id="its wait inside it"),
        pytest.param(
            lambda r: r.collective(0, 103, 108, 1, **SYNC, flags=Flag.ASYNC).wait(0, 106, 108),
            [2.0],
            id="an asynchronous one: its wait",
        ),
        pytest.param(
            lambda r: r.stage(0, "backward", 105, 109).collective(
                0, 106, 107, 1, source=s.Source.BOUND, flags=Flag.ASYNC
            ),
            [0.0],
            id="one that the program launches in its backward, and that is over",
        ),
        pytest.param(
            lambda r: (
                r.stage(0, "backward", 105, 110, total=4, pieces=2)
                .collective(0, 105.5, 107, 1, tensor="bucket 0", **BOUND)
                .collective(0, 106, 107, 2, tensor="bucket 1", **BOUND)
                .collective(0, 108, 110, 3, tensor="bucket 0", **BOUND)
            ),
            [3.0],
            id="each of several backwards, from its last bucket on",
        ),
        pytest.param(
            lambda r: (
                r.stage(0, "backward", 105, 110, total=4, pieces=2)
                .collective(0, 105.5, 106, 1, tensor="bucket 0", **SEEN)
                .collective(0, 105.75, 107, 2, tensor="bucket 1", **SEEN)
                .collective(0, 108, 109.5, 3, tensor="bucket 0", **SEEN)
            ),
            [2.75],
            id="each of several backwards, until its buckets are seen to be done",
        ),
        pytest.param(
            lambda r: (
                r.stage(0, "backward", 105, 110)
                .collective(0, 106, 107, 1, tensor="bucket 0", **SEEN)
                .collective(0, 108, 109, 2, tensor="bucket 0", **SEEN)
            ),
            [1.0],
            id="one backward through two models, from its last bucket on",
        ),
        pytest.param(
            lambda r: (
                r.stage(0, "backward", 105, 110)
                .collective(0, 106, 110, 0, "comm_hook", tensor="bucket 0", **BOUND)
                .collective(0, 108, 109, 1, **SEEN)
                .collective(0, 109.5, 110, 2, **SEEN)
            ),
            [2.0],
            id="a communication hook, from its first call on",
        ),
        pytest.param(
            lambda r: r.stage(0, "backward", 105, 109).collective(
                0, 106, 109, 0, "comm_hook", tensor="bucket 0", **BOUND
            ),
            [3.0],
            id="a communication hook whose calls nobody sees",
        ),
        pytest.param(lambda r: r.collective(0, 101, 101.5, 1, **SYNC), [0.0], id="while data is fetched"),
        pytest.param(lambda r: r.wait(5, 200, 210), [], id="in a step that has not ended"),
        pytest.param(lambda r: r, [], id="no operations: nobody knows"),
    ],
)
def test_exposed_is_what_blocks_in_backward_optimizer_or_outside(add, ms):
    """Union of calls and waits."""
    rank = Rank(0, 2).stage(0, "dataloader_next", 100, 102).stage(0, "forward", 102, 105)

    assert exposed(add(rank.step(0, 100, 110))) == ms


def test_ddp_is_blocked_from_its_last_launch_to_the_end_of_backward():
    """Rank 1 is 5 ms slower in its backward: rank 0 waits that long, and for the transfer, in every step."""
    for batch, expected in zip(ddp(2, 4, slow={(1, "backward"): 5.0}), (6.0, 1.0), strict=True):
        found = [p.value * 1e3 for p in summed_up(batch=batch) if p.metric == m.DL_STEP_GRAD_SYNC_EXPOSED]
        assert found == [pytest.approx(expected)] * 4


def test_exposed_is_what_the_report_says_a_rank_is_blocked_for():
    """Two computations, one as rows come and one over a whole run, of the same thing."""
    for batch in ddp(2, 6, slow={(1, "backward"): 5.0, (0, "optimizer"): 2.0}):
        (table,) = step_tables([batch])
        counted = np.isin(columns(table.stages), ("between", "backward", "optimizer", "residual"))
        of_report = blocked(table)[:, counted].sum(axis=1) / 1e6
        found = [p.value * 1e3 for p in summed_up(batch=batch) if p.metric == m.DL_STEP_GRAD_SYNC_EXPOSED]

        assert found == pytest.approx(of_report.tolist())
        assert sum(found) > 0


def test_it_does_not_matter_in_which_portions_rows_come():
    """Operations come before their step; a step comes with its stages."""
    (batch, _) = ddp(2, 6)
    rows = batch.rows.take(np.lexsort((batch.is_kind(s.STEP, s.STAGE), batch["step"])))
    is_stage = batch.take(np.lexsort((batch.is_kind(s.STEP, s.STAGE), batch["step"]))).is_kind(s.STEP, s.STAGE)
    cuts = np.flatnonzero(np.diff(is_stage.astype(int)) != 0) + 1
    points = all_of(StepSummary(0), np.split(rows, cuts), Descriptors.of(batch.descriptors))
    rates = (m.DL_THROUGHPUT_BATCHES, m.DL_THROUGHPUT_SAMPLES, m.DL_TRAIN_BATCHES, m.DL_TRAIN_SAMPLES)

    assert Counter(p for p in points if p.metric not in rates) == Counter(
        p for p in summed_up(batch=batch) if p.metric not in rates
    )


def test_operations_that_come_when_the_next_step_is_over_count():
    """As DDP's do that has just rebuilt its buckets; of the last step nothing waits for another one."""
    (batch, _) = ddp(2, 6, slow={(1, "backward"): 5.0})
    is_own = batch.is_kind(s.STEP, s.STAGE)
    steps = range(6)
    parts = [
        batch.rows.compress((batch["step"] == step) & is_own | (batch["step"] == step - 1) & ~is_own) for step in steps
    ]
    late = batch.rows.compress((batch["step"] == 5) & ~is_own)

    points = all_of(StepSummary(0), [*parts, late], Descriptors.of(batch.descriptors))
    exposed = of(points, m.DL_STEP_GRAD_SYNC_EXPOSED)

    assert exposed == of(summed_up(batch=batch), m.DL_STEP_GRAD_SYNC_EXPOSED)
    assert len(exposed) == 6

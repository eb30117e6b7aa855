"""What must hold between two reports, whatever is in them: of a run, and of the same one as somebody else saw it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from otel_dltrace.analysis.compose import RunReport, analyse
from otel_dltrace.analysis.steps.timings import OVERLAPPING
from otel_dltrace.model.spans import SpanBatch, fill_ids
from otel_dltrace.model.time import Anchor
from tests.support.runs import MS, USUAL, Rank, ddp, ddp_on_devices

HOUR = 3_600_000 * MS
STEPS = 8
few = settings(max_examples=6, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # a number says all there is


def accumulated(ranks: int, slow: dict[tuple[int, str], float]) -> list[SpanBatch]:
    """Return steps of three batches each, whose gradients the program averages when all are done."""
    out = [Rank(rank, ranks) for rank in range(ranks)]
    now = 1000.0
    for step in range(STEPS):
        ready = []
        for rank, one in enumerate(out):
            ahead, back = (USUAL[name] + slow.get((rank, name), 0.0) for name in ("forward", "backward"))
            done = now + 3 * (ahead + back)
            one.stage(step, "forward", now, done - back, 3 * ahead, 3)
            one.stage(step, "backward", now + ahead, done, 3 * back, 3)
            ready.append(done)
        for one, done in zip(out, ready, strict=True):
            one.collective(step, done, max(ready) + 1, step + 1).step(step, now, max(ready) + 3)
            one.stage(step, "optimizer", max(ready) + 1, max(ready) + 2)
        now = max(ready) + 3.5
    return [one.batch() for one in out]


def a_run(number: int) -> list[SpanBatch]:
    """Return one of the many runs: of a few ranks on one host, of which some are slow in some stage."""
    random = Random(number)
    ranks = random.randint(2, 4)
    stages = [name for name in USUAL if name not in ("between steps", "residual")]
    slow = {(random.randrange(ranks), random.choice(stages)): random.randrange(9000) / 1000 for _ in range(2)}
    kind = random.randrange(4)
    if kind < 2:
        return ddp(ranks, STEPS, slow, buckets=kind == 0, jitter=0.65)
    return accumulated(ranks, slow) if kind == 2 else ddp_on_devices(ranks, slow, timed=True, lag=30)


runs = st.integers(0, 10_000)
"""The numbers of runs, which are what a failing test shows."""


def counted_from(batch: SpanBatch, zero: int) -> SpanBatch:
    """Return *batch* as by a clock that began *zero* ns later."""
    rows, at = batch.rows.copy(), batch.process.anchor
    rows["start"] -= zero
    rows["end"] -= zero
    process = replace(batch.process, anchor=Anchor(at.monotonic - zero, at.wall, at.uncertainty))
    return replace(batch, rows=rows, process=process)


@few
@given(runs, st.sampled_from([-HOUR, HOUR]))
def test_where_a_clock_begins_says_nothing(number, zero):
    """Not even if it began after the run, as that of a host which had not yet booted then."""
    run = a_run(number)
    assert analyse([counted_from(batch, zero) for batch in run]) == analyse(run)


def in_two_parts(batch: SpanBatch, moves: bool) -> list[SpanBatch]:
    """Return *batch* as by two processes, the second on the same host or, if it *moves*, on one just booted."""
    early, late = (batch.take(which) for which in (batch["step"] < STEPS // 2, batch["step"] >= STEPS // 2))
    host, zero = ("node-1", 1200 * MS) if moves else ("node-0", 0)
    next_process = replace(batch.process, nonce=100 + batch.rank, host=host, boot_id=f"boot-{host}")
    return [early, counted_from(replace(late, process=next_process), zero)]


@few
@given(runs)
def test_a_rank_may_go_on_on_a_host_that_booted_later(number):
    """What it did before is told by the second host's clock, at times before that began."""
    stays, moves = (
        analyse([part for batch in a_run(number) for part in in_two_parts(batch, one)]) for one in (False, True)
    )
    assert (moves.timings, moves.breakdown) == (stays.timings, stays.breakdown)


def of_ranks(report: RunReport, names: Sequence[int]) -> Counter[Any]:
    """Return what *report* says of each rank, under other *names* for the ranks."""
    rows = [*report.stragglers.found, *report.breakdown.steady, *report.waits.ranks, *report.throughput.ranks]
    rows += [timing for stage in report.timings.stages for timing in stage.ranks]
    rows += [one for operation in report.operations for one in operation.ranks]
    rows += [slow.slow for slow in report.saturation.stages]
    return Counter(replace(row, rank=names[row.rank]) for row in rows)


def called(batch: SpanBatch, rank: int) -> SpanBatch:
    """Return *batch* as that of *rank*."""
    assert batch.process.bind is not None
    process = replace(batch.process, bind=replace(batch.process.bind, rank=rank))
    rows = batch.rows.copy()
    fill_ids(rows, batch.descriptors, process)
    return replace(batch, rows=rows, process=process)


@few
@given(runs)
def test_how_ranks_are_numbered_says_nothing(number):
    """Under other numbers they are told the same things of."""
    run, random = a_run(number), Random(number)
    numbers = random.sample(range(len(run)), len(run))
    renamed = analyse([called(batch, number) for batch, number in zip(run, numbers, strict=True)])
    assert of_ranks(renamed, range(len(run))) == of_ranks(analyse(run), numbers)


@few
@given(runs)
def test_the_order_of_spans_and_processes_says_nothing(number):
    """Segments are written as rings are read, and hosts' folders are read by name."""
    run, random = a_run(number), Random(number)
    mixed = [batch.take(random.sample(range(len(batch)), len(batch))) for batch in run]
    assert analyse(random.sample(mixed, len(run))) == analyse(run)


@few
@given(runs)
def test_the_parts_of_a_step_add_up_to_it(number):
    """And those of a collective to it."""
    report = analyse(a_run(number))
    parts = [stage for stage in report.timings.stages if stage.name not in OVERLAPPING]
    for rank in report.breakdown.steady if not report.guards.device else ():
        operations = rank.operations.total if rank.operations else 0
        assert sum(stage.time.total for stage in rank.stages) + operations + rank.residual.total == rank.step.total
        mine = [timing.total for stage in parts for timing in stage.ranks if timing.rank == rank.rank]
        assert sum(mine) + operations == rank.step.total
    for rank in report.waits.ranks:
        assert (
            None in (rank.wait, rank.core, rank.completion) or rank.wait + rank.core + rank.completion == rank.duration
        )
    exposed = sum(stage.exposed for stage in report.stragglers.frontier)
    assert exposed >= report.stragglers.longest - len(report.stragglers.frontier)

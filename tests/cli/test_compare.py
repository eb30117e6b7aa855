"""`otel-dltrace compare`: what is planted in runs of several sizes comes out, the first epoch apart."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from otel_dltrace.analysis.negotiation.shares import FIRST_EPOCH
from otel_dltrace.analysis.scaling import RANK_STEPS, SAMPLES, WARM_UP, Part, RunScaling, Scaling, scaling
from otel_dltrace.analysis.select import select
from otel_dltrace.analysis.spread import Spread
from otel_dltrace.cli.main import main
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.plan import Window
from otel_dltrace.model.semconv import STAGE, Flag, Level, Source
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.report.scaling import sentences, write_scaling
from tests.support.horovod_files import unpack
from tests.support.run_files import write
from tests.support.runs import MS, Rank, ddp

STEP_OF_16_MS = Spread(9, 9 * 16 * MS, 16 * MS, 16 * MS, 16 * MS, 16 * MS)
STEP_OF_20_MS = Spread(9, 9 * 20 * MS, 20 * MS, 20 * MS, 20 * MS, 20 * MS)


def in_epochs(batches: list[SpanBatch], length: int) -> list[SpanBatch]:
    """Return *batches* with *length* steps an epoch, as programs that tell their epoch record it."""
    for batch in batches:
        own = batch.is_rank_step
        batch.rows["b"][own] = batch.rows["step"][own] // length
    return batches


def exact(run: RunScaling) -> RunScaling:
    """Return *run* without the last bit of its rates, which are quotients of seconds."""

    def part(one: Part) -> Part:
        samples = None if one.samples_per_second is None else round(one.samples_per_second, 6)
        return replace(one, steps_per_second=round(one.steps_per_second, 6), samples_per_second=samples)

    return replace(
        run,
        first=run.first and part(run.first),
        steady=part(run.steady),
        speed_up=run.speed_up and round(run.speed_up, 6),
        efficiency=run.efficiency and round(run.efficiency, 6),
    )


def test_planted_figures_are_found():
    """One rank of four computes 4 ms longer: 3.2 times the work of one, which waits 1 ms of 16 for its buckets."""
    found = scaling({"four": ddp(4, 10, {(3, "forward"): 4.0}), "one": ddp(1, 10)})

    first = Part(1, Spread(1, 16 * MS, 16 * MS, 16 * MS, 16 * MS, 16 * MS), 62.5, 2000.0, 5 / 16, 1 / 16, None)
    one = Part(9, STEP_OF_16_MS, 62.5, 2000.0, 5 / 16, 1 / 16, None)
    # Buckets go in the middle and at the end of backward, 4 and 0 ms before the slowest rank's end, and take 1 ms;
    # three ranks are 4 ms earlier, and wait.
    four = Part(9, STEP_OF_20_MS, 50.0, 6400.0, (9 + 9 + 9 + 5) / 80, (5 + 5 + 5 + 1) / 80, None)
    assert found.rate == SAMPLES
    assert exact(found.runs[0]) == RunScaling("one", 1, 1, 1, WARM_UP, first, one, 1.0, None)
    assert exact(found.runs[1]) == replace(exact(found.runs[1]), steady=four, speed_up=3.2, efficiency=0.8)
    assert sentences(found) == [
        "4 ranks do 3.20 times the work of 1: a parallel efficiency of 80%, the first steps apart."
    ]


def test_runs_of_as_many_ranks_have_a_speed_up_alone():
    """An efficiency of 80% would say that something is lost to ranks."""
    found = scaling({"before": ddp(2, 10), "after": ddp(2, 10, {(1, "forward"): 4.0})})

    assert [(run.speed_up, run.efficiency) for run in map(exact, found.runs)] == [(1.0, None), (0.8, None)]


@pytest.mark.parametrize("ranks", [[0], [0, 1]])
@pytest.mark.parametrize("steps", [[3], [9], [3, 9]])
def test_a_step_that_failed_is_in_no_figure(ranks, steps):
    """In the first epoch or later, on one rank or on both: a collective of 600 s is none of the work done."""
    batches = in_epochs(ddp(2, 12), 4)
    for batch in batches:
        gone = np.isin(batch["step"], steps) & (batch.rank in ranks)
        batch.rows["flags"][gone & batch.is_rank_step] = Flag.ERROR
        batch.rows["end"][gone & ~batch.is_kind(STAGE)] += 600_000 * MS
    (run,) = scaling({"failed": batches}).runs
    whole = scaling({"whole": in_epochs(ddp(2, 12), 4)}).runs[0]

    assert run.first
    assert whole.first
    both = len(ranks) == 2
    assert (run.first.steps, run.steady.steps) == (4 - both * (3 in steps), 8 - both * (9 in steps))
    for part, other in ((run.first, whole.first), (run.steady, whole.steady)):
        assert (part.step.p50, part.step.max) == (other.step.p50, other.step.max)
        assert part.communication == pytest.approx(other.communication)


def test_the_first_epoch_is_apart_where_it_is_known():
    """As in ANL's runs: it alone is 20 times slower, and all later ones scale."""
    one = in_epochs(ddp(1, 12), 4)
    two = in_epochs(_slowed(2, 12, 4, 304.0), 4)
    found = scaling({"one": one, "two": two})
    slow = found.runs[1]

    assert (slow.apart, slow.first and slow.first.steps, slow.steady.steps) == (FIRST_EPOCH, 4, 8)
    assert slow.first is not None
    assert (slow.first.step.p50, slow.steady.step.p50, exact(slow).efficiency) == (320 * MS, 16 * MS, 1.0)
    assert sentences(found)[1] == (
        "On 2 ranks a step of the first epoch takes 20.0 times a later one: do not measure scaling by it."
    )


def test_later_steps_that_take_no_time_are_no_measure_of_the_first_ones():
    """As in a file that has somebody else's times: nothing is divided by them."""
    timeless = []
    for batch in in_epochs(ddp(2, 12), 4):
        rows = batch.rows.copy()
        later = rows["step"] >= 4
        rows["end"][later] = rows["start"][later]
        timeless.append(replace(batch, rows=rows))
    found = scaling({"one": in_epochs(ddp(1, 12), 4), "two": timeless})

    assert found.runs[1].steady.step.mean == 0
    assert not [sentence for sentence in sentences(found) if "do not measure" in sentence]


@pytest.mark.parametrize(
    ("steps", "apart", "first"),
    [
        pytest.param("2-9", FIRST_EPOCH, 2, id="what is there of the first epoch"),
        pytest.param("4-11", WARM_UP, None, id="later epochs alone"),
    ],
)
def test_the_first_epoch_of_a_part_is_that_of_the_run(steps, apart, first):
    """`--steps` that begin later have no first epoch, so none is left out."""
    batches = select(in_epochs(ddp(2, 12), 4), Window.parse(steps))
    (_, run) = scaling({"one": ddp(1, 12), "two": batches}).runs

    assert (run.apart, run.first and run.first.steps, run.steady.steps) == (apart, first, 8 - (first or 0))


@pytest.mark.parametrize(
    ("length", "apart"),
    [
        pytest.param(4, FIRST_EPOCH, id="all tell epochs"),
        pytest.param(12, "the first steps (the first epoch where it is known)", id="one does"),
    ],
)
def test_what_is_apart_has_one_name(length, apart, capsys):
    """In the sentence and above both tables; a run of one epoch tells none."""
    found = scaling({"one": in_epochs(ddp(1, 12), length), "two": in_epochs(ddp(2, 12), 4)})
    write_scaling(found, Console(width=160))
    said = capsys.readouterr().out.splitlines()

    assert said[0].endswith(f" of 100%, {apart} apart.")
    assert [line for line in said if line in (f"Scaling, without {apart}", f"Apart: {apart}")] == [
        f"Scaling, without {apart}",
        f"Apart: {apart}",
    ]


def _slowed(ranks: int, steps: int, length: int, extra: float) -> list[SpanBatch]:
    """Return a run whose first *length* steps compute *extra* ms longer."""
    slow = ddp(ranks, length, {(rank, "forward"): extra for rank in range(ranks)})
    fast = ddp(ranks, steps)
    for early, whole in zip(slow, fast, strict=True):
        late = length * round((extra) * MS)
        is_early = whole["step"] < length
        for name in ("start", "end"):
            whole.rows[name][~is_early] += late
            whole.rows[name][is_early] = early.rows[name]
        whole.rows["size"][is_early] = early.rows["size"]
    return fast


def test_without_samples_each_ranks_step_counts():
    """The batch sizes are not known, so they are taken to be as large on each rank, and that is said."""
    runs = {str(ranks): [_untold(batch) for batch in ddp(ranks, 10)] for ranks in (2, 4)}
    found = scaling(runs)

    assert (found.rate, [exact(run).speed_up for run in found.runs]) == (RANK_STEPS, [1.0, 2.0])
    assert [run.steady.samples_per_second for run in found.runs] == [None, None]


def test_what_is_shown_of_runs_of_which_one_tells_no_samples(capsys):
    """That not every run does is said; of several runs of as many ranks the slow beginning is that of the one named."""
    runs = {
        "one": in_epochs(ddp(1, 12), 4),
        "two": in_epochs(_slowed(2, 12, 4, 304.0), 4),
        "again": in_epochs([_untold(batch) for batch in ddp(2, 12)], 4),
    }
    write_scaling(scaling(runs), Console(width=160))
    said = [line.split() for line in capsys.readouterr().out.splitlines()]

    slow = "On 2 ranks (two) a step of the first epoch takes 20.0 times a later one: do not measure scaling by it."
    assert said[1] == slow.split()
    assert [line for line in said if line[:1] in (["one"], ["two"], ["again"])] == [
        ["one", "1", "8", "16.0", "62.50", "2,000.0", "1.00", "31%", "6%"],
        ["two", "2", "8", "16.0", "62.50", "4,000.0", "2.00", "100%", "31%", "6%"],
        ["again", "2", "8", "16.0", "62.50", "2.00", "100%", "31%", "6%"],
        ["one", "1", "4", "16.0", "16.0", "31%", "6%"],
        ["two", "2", "4", "320.0", "320.0", "2%", "0%"],
        ["again", "2", "4", "16.0", "16.0", "31%", "6%"],
    ]
    assert " ".join(said[-1]).startswith("not every run records all its samples, so each rank's step counts as one")


def _untold(batch: SpanBatch) -> SpanBatch:
    batch.rows["a"][batch.is_rank_step] = 0
    return batch


def test_communication_that_nobody_recorded_is_not_none():
    """At level step ranks that train together are not said to communicate in 0% of the time."""
    runs = {ranks: [b.take(b["level"] == Level.STEP) for b in ddp(ranks, 10)] for ranks in (1, 2)}
    one, two = (run.steady for run in scaling({str(ranks): run for ranks, run in runs.items()}).runs)

    assert [(part.communication, part.exposed) for part in (one, two)] == [(0.0, 0.0), (None, None)]


def test_ranks_that_are_not_there_are_told():
    """A timeline of rank 0 alone stands for its four ranks."""
    alone = Rank(0, 4)
    for step in range(5):
        alone.step(step, step * 10.0, step * 10.0 + 10)
    (found,) = scaling({"alone": [alone.batch()]}).runs

    assert (found.ranks, found.told, exact(found).steady.steps_per_second) == (4, 1, 100.0)


def test_what_blocks_before_the_first_step_is_none_of_its_time():
    """`MPI_Init` may take seconds, and no step is exposed to it."""
    (found,) = scaling({"mpi": [_initialised(rank) for rank in range(2)]}).runs

    assert found.first is not None
    assert (found.first.exposed, found.steady.exposed, found.steady.negotiation) == (0.5, 0.5, 0.0)


def _initialised(number: int) -> SpanBatch:
    ends = {"backend": "mpi", "group": "world", "source": Source.HOST_DONE}
    rank = Rank(number, 2).collective(NO_STEP, 0, 900, 0, "init", **ends)
    for step in range(4):
        begin = 1000 + step * 10.0
        rank.step(step, begin, begin + 10).collective(step, begin, begin + 5, step + 1, "allreduce", **ends)
    return rank.batch()


def test_what_communicates_after_the_loop_is_none_of_its_time():
    """It has the number of the last step, and more than its time."""
    rank = Rank(0)
    for n in range(4):
        rank.step(n, 10 * n, 10 * n + 10).collective(n, 10 * n + 6, 10 * n + 8, n + 1)
    rank.collective(3, 45, 95, 5)
    assert scaling({"one": [rank.batch()]}).runs[0].steady.communication == 2 / 10


def test_a_rank_without_a_step_in_a_part_is_not_taken_for_a_slow_one():
    """It came after the first steps: it does nothing there, and what the others do is known."""
    early, late = ddp(2, 10)
    (found,) = scaling({"late": [early, late.take(late["step"] >= 5)]}).runs
    (alone,) = scaling({"alone": [early]}).runs

    assert found.first is not None
    assert alone.first is not None
    assert (found.ranks, found.told, found.first.steps_per_second) == (2, 2, alone.first.steps_per_second)
    assert found.first.samples_per_second == pytest.approx(32 * found.first.steps_per_second)
    assert found.speed_up == 1.0


@pytest.fixture
def timelines(tmp_path, monkeypatch, capsys):
    """Import real timelines of two and of four ranks; be where the runs are."""
    monkeypatch.chdir(tmp_path)
    for run, name in (("NP2", "horovod_mpi_np2"), ("NP4", "horovod_mpi_np4_psets")):
        assert main(["import", "horovod", str(unpack(name, tmp_path)), "-o", run]) == 0
    capsys.readouterr()


def test_real_timelines_are_compared(timelines, capsys):
    """The negotiation share is that of the report by negotiation, the steps add up, the definitions are printed."""
    assert main(["compare", "NP2", "NP4", "--json"]) == 0
    two, four = json.loads(capsys.readouterr().out)["runs"]
    assert main(["report", "NP2", "--by", "negotiation", "--json"]) == 0
    apart = json.loads(capsys.readouterr().out)
    assert main(["compare", "NP4", "NP2"]) == 0
    text = capsys.readouterr().out

    assert (two["name"], two["ranks"], two["told"], two["first"]["steps"]) == ("NP2", 2, 1, 1)
    assert two["first"]["steps"] + two["steady"]["steps"] == apart["whole"]["steps"] == 20
    assert two["steady"]["negotiation"] == apart["others"]["negotiation"] / apart["others"]["communication"]
    assert two["first"]["negotiation"] == apart["first"]["negotiation"] / apart["first"]["communication"]
    assert (two["steady"]["exposed"], four["name"], four["ranks"]) == (None, "NP4", 4)
    assert [word for word in ("speed-up: ", "exposed: ", "negotiation: ", "Apart: ") if word not in text] == []
    assert "of NP2 1 of 2 ranks record their steps" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["NP2"], "give two or more runs", id="one run"),
        pytest.param(["NP2", "NP2"], "give two or more runs", id="one run twice"),
        pytest.param(["NP2", "NP4/../NP2"], "give two or more runs", id="one run by two paths"),
        pytest.param(["NP2", "NP9"], "NP9 is not a run directory", id="no run"),
        pytest.param(["NP2", "NP4", "--steps", "900-901"], "NP2: none of the steps", id="no steps"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(timelines, arguments, says, capsys):
    """Exit code 2."""
    assert main(["compare", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_nothing_is_made_up():
    """A run without steps has no rate, and no division fails."""
    (found,) = scaling({"empty": []}).runs

    assert (found.steady.steps, found.steady.communication, found.speed_up) == (0, 0.0, None)
    assert isinstance(scaling({"empty": []}), Scaling)


def test_runs_without_a_step_have_nothing_to_compare(tmp_path, capsys):
    """Exit code 2, and which they are."""
    for name, batches in (("trained", ddp(2)), ("served", [Rank(0, 1).collective(NO_STEP, 0, 9, 1).batch()])):
        for batch in batches:
            write(tmp_path / name, f"node-{batch.rank}", batch, compacted=False)

    assert main(["compare", str(tmp_path / "trained"), str(tmp_path / "served")]) == 2
    assert "served: no step was recorded; without steps nothing can be compared\n" in capsys.readouterr().err

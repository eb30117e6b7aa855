"""`step`, `phase` and `operation` in a user's own code: parents, steps, stages, errors, switched on and off."""

import asyncio
import contextvars
import copy
import pickle
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import otel_dltrace.record.blocks as blocks_module
import otel_dltrace.record.operation as operation_module
import otel_dltrace.record.steps as steps_module
from otel_dltrace.model.identity import NO_STEP, NO_USER_STEP
from otel_dltrace.record.blocks import operation, phase, step
from otel_dltrace.record.operation import Operation, open_span
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.ring_file import AMEND, BEGIN, SPAN
from otel_dltrace.record.tracer import Tracer, live
from tests.support.ring_files import read_own


class Ticks:
    """A clock that is one later at every look."""

    now = 0

    def __call__(self) -> int:
        """Return the next instant."""
        self.now += 1
        return self.now


@pytest.fixture
def tracer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracer]:
    """A live tracer under a clock that ticks."""
    ticks = Ticks()
    monkeypatch.setattr(steps_module, "monotonic_ns", ticks)
    monkeypatch.setattr(operation_module, "monotonic_ns", ticks)
    monkeypatch.setattr(blocks_module, "monotonic_ns", ticks)
    live.tracer = tracer = Tracer(Recorder(tmp_path, 1 << 20))
    yield tracer
    live.tracer = None
    tracer.recorder.close()
    assert open_span.get() is None


def spans(tracer: Tracer) -> list[tuple[Any, ...]]:
    """Return name, step, start, end and parent's name of every span (0: the step; None: no such parent)."""
    read = read_own(tracer.recorder)
    name = {record["number"]: read.names.descriptors[record["descriptor"]].name for record in read.records}
    return [
        (
            name[record["number"]],
            record["step"],
            record["start"],
            record["end"],
            record["parent"] and name.get(record["parent"]),
        )
        for record in read.records
        if record["kind"] == SPAN
    ]


def test_a_step_holds_its_phases_and_operations(tracer: Tracer) -> None:
    """Parents by nesting, the outermost belong to the step; the user's number is kept beside the ordinal."""
    for user in (100, 200):
        with step(user), phase("rollout"):
            with phase("sample", size=7), operation("all_reduce", size=64, tensor="w"):
                pass
            with phase("score"):
                pass
    read = read_own(tracer.recorder)

    assert spans(tracer)[:5] == [
        ("all_reduce", 0, 4, 5, "sample"),
        ("sample", 0, 3, 6, "rollout"),
        ("score", 0, 7, 8, "rollout"),
        ("rollout", 0, 2, 9, 0),
        ("rank.step", 0, 1, 10, 0),
    ]
    assert [(name, step) for name, step, *_ in spans(tracer)[5:]] == [
        (name, 1) for name in ("all_reduce", "sample", "score", "rollout", "rank.step")
    ]
    assert [r["size"] for r in read.records if r["kind"] == SPAN][:5] == [64, 7, 0, 0, 100]
    assert [r["seq"] for r in read.records if r["kind"] == SPAN and r["size"] == 64] == [1, 2]
    assert [r["kind"] for r in read.records].count(BEGIN) == 4


def test_a_phase_belongs_to_the_step_it_began_in(tracer: Tracer) -> None:
    """Also when it ends in a later one; what begins in a later one is that step's, with no parent in another trace."""
    with phase("epoch"):
        for _ in range(2):
            with step(), phase("work"):
                pass
    tracer.steps.begin()
    crossing = phase("crossing")
    with crossing:
        tracer.steps.begin()
        Operation(tracer.recorder, tracer.phases["work"]).close()

    assert [(name, step, parent) for name, step, _, _, parent in spans(tracer) if name != "rank.step"] == [
        ("work", 0, 0),
        ("work", 1, 0),
        ("epoch", NO_STEP, 0),
        ("work", 3, 0),
        ("crossing", 2, 0),
    ]


def test_a_phase_that_is_entered_again_is_another_span(tracer: Tracer) -> None:
    """A program may make its phase once, before the loop; children know which of the two they are in."""
    outer = phase("outer")
    with step():
        for _ in range(2):
            with outer, phase("inner"):
                pass

    read = read_own(tracer.recorder)
    closed = [record for record in read.records if record["kind"] == SPAN][:4]
    assert [read.names.descriptors[record["descriptor"]].name for record in closed] == ["inner", "outer"] * 2
    inner, first, again, second = closed
    assert (inner["parent"], again["parent"]) == (first["number"], second["number"])
    assert first["number"] != second["number"]


def test_a_step_that_gives_way_to_one_that_began_before_it_has_no_length(tracer: Tracer) -> None:
    """A batch that another thread had asked for earlier begins the next step: no step ends before it begins."""
    tracer.steps.begin(50)
    tracer.steps.begin(40)
    tracer.steps.end()

    assert [(at, start, end) for _, at, start, end, _ in spans(tracer)] == [(0, 50, 50), (1, 40, 40)]


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(step(3, batch_size=2, epoch=1), id="step"),
        pytest.param(phase("encode", 8), id="phase"),
        pytest.param(operation("exchange", size=8, tensor="policy", group="actors"), id="operation"),
    ],
)
def test_a_block_that_was_entered_is_copied_as_one_that_was_not(tracer: Tracer, block: Any) -> None:
    """A model may hold it, which is copied for an average and saved whole: also while it is open."""
    fresh = block.__getstate__()
    with block:
        copies = [copy.deepcopy(block), pickle.loads(pickle.dumps(block))]

    assert [one.__getstate__() for one in copies] == [fresh] * 2
    for one in copies:
        with one:
            pass
    assert len(spans(tracer)) == 3


def test_a_signal_s_handler_records_below_a_phase_that_just_begins(
    tracer: Tracer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also outside any step, where a phase that has a child writes its BEGIN, with its start."""

    def interrupted(opened: Any) -> Any:
        monkeypatch.setattr(blocks_module, "_set_open", open_span.set)
        token = open_span.set(opened)
        with phase("in the handler"):
            pass
        return token

    monkeypatch.setattr(blocks_module, "_set_open", interrupted)
    with phase("begins"):
        pass

    assert spans(tracer) == [("in the handler", NO_STEP, 2, 3, "begins"), ("begins", NO_STEP, 1, 4, 0)]


def test_a_stage_s_name_counts_as_the_stage_and_is_no_parent(tracer: Tracer) -> None:
    """Two pieces are one span, written again longer; the operation inside belongs to the phase around it."""
    with step(), phase("outer"):
        for _ in range(2):
            with phase("to_device"), operation("copy"):
                pass

    assert spans(tracer) == [
        ("copy", 0, 4, 5, "outer"),
        ("to_device", 0, 3, 6, 0),
        ("copy", 0, 8, 9, "outer"),
        ("to_device", 0, 3, 10, 0),
        ("outer", 0, 2, 11, 0),
        ("rank.step", 0, 1, 12, 0),
    ]
    stage = [record for record in read_own(tracer.recorder).records if record["start"] == 3]
    assert [(record["size"], record["a"], record["number"]) for record in stage] == [
        (3, 1, stage[0]["number"]),
        (6, 2, stage[0]["number"]),
    ]


def test_a_stage_between_two_marked_steps_is_the_second_ones(tracer: Tracer) -> None:
    """As in loops that are followed: in the step before it would be longer than that, and be told as a gap as well."""
    with step(), phase("forward"):
        pass
    with phase("evaluate"):
        pass
    with step():
        pass

    assert spans(tracer) == [
        ("forward", 0, 2, 3, 0),
        ("rank.step", 0, 1, 4, 0),
        ("evaluate", 1, 5, 6, 0),
        ("rank.step", 1, 7, 8, 0),
    ]


def test_an_evaluation_before_the_first_step_is_that_steps(tracer: Tracer) -> None:
    """As one between two is the second's; other stages that no step has are not recorded."""
    with phase("evaluate"):
        pass
    with phase("checkpoint"):
        pass
    with step():
        pass

    assert spans(tracer) == [("evaluate", 0, 1, 2, 0), ("rank.step", 0, 5, 6, 0)]


def test_stages_are_recorded_at_level_step_and_phases_are_not(tracer: Tracer) -> None:
    """The coarsest level still says where the step went."""
    tracer.recorder.level = 1
    with step(), phase("rollout"), operation("all_reduce"), phase("forward"):
        pass

    assert [name for name, *_ in spans(tracer)] == ["forward", "rank.step"]


@pytest.mark.parametrize("block", [phase("x"), operation("x"), phase("to_device")], ids=["phase", "operation", "stage"])
def test_the_user_s_error_passes_unmodified_and_is_noted(tracer: Tracer, block: Any) -> None:
    """The very object leaves the blocks; each span says that it failed, and how."""
    error = ValueError("diverged")
    with pytest.raises(ValueError, match="diverged") as caught, step(), block:
        raise error
    read = read_own(tracer.recorder)
    ended = [record["number"] for record in read.records if record["kind"] == SPAN]
    failed = [record["number"] for record in read.records if record["kind"] == AMEND]

    assert caught.value is error
    assert (len(failed), failed, read.names.strings) == (2, ended, {1: "ValueError"})


@pytest.mark.parametrize("end", [StopIteration, StopAsyncIteration, GeneratorExit])
def test_what_ends_a_loop_is_no_error(tracer: Tracer, end: type[BaseException]) -> None:
    """A block may be left by it."""
    for block in phase("x"), operation("x"), phase("to_device"):
        with suppress(end), step(), block:
            raise end
    assert [record for record in read_own(tracer.recorder).records if record["kind"] == AMEND] == []


def test_blocks_survive_switching_on_and_off_inside_them(tracer: Tracer) -> None:
    """A block that was entered without tracing ends without it, and the other way round."""
    live.tracer = None
    early = step(), phase("a"), operation("a")
    for block in early:
        block.__enter__()
    live.tracer = tracer
    for block in reversed(early):
        block.__exit__(None, None, None)
    late = step(), phase("b"), operation("b")
    for block in late:
        block.__enter__()
    live.tracer = None
    for block in reversed(late):
        block.__exit__(None, None, None)
    live.tracer = tracer
    with step():
        pass

    assert [(name, step) for name, step, *_ in spans(tracer)] == [
        ("b", 0),
        ("b", 0),
        ("rank.step", 0),
        ("rank.step", 1),
    ]


def test_threads_and_tasks_have_their_own_parents(tracer: Tracer) -> None:
    """A thread starts without a parent, a task with that of its creator; neither disturbs the other."""

    async def work(name: str) -> None:
        with phase(name):
            await asyncio.sleep(0)
            with phase(f"{name} inner"):
                await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(work("a"), work("b"))

    with step(), phase("outer"):
        asyncio.run(both())
        thread = threading.Thread(target=asyncio.run, args=(work("c"),))
        thread.start()
        thread.join()

    assert {name: parent for name, _, _, _, parent in spans(tracer)} == {
        "a inner": "a",
        "b inner": "b",
        "c inner": "c",
        "a": "outer",
        "b": "outer",
        "c": 0,
        "outer": 0,
        "rank.step": 0,
    }


def test_a_phase_of_an_operation_that_the_training_thread_is_ahead_of_is_below_it(tracer: Tracer) -> None:
    """In its step; one in a phase, which may be around many steps, has the step that is current."""
    begun, stepped = threading.Event(), threading.Event()

    def communicate() -> None:
        with operation("push_pull"), phase("PUSH"):
            pass
        with operation("push_pull"):
            begun.set()
            stepped.wait()
            with phase("PULL"), phase("chunk"):
                pass

    with step():
        thread = threading.Thread(target=communicate)
        thread.start()
        begun.wait()
    with step():
        stepped.set()
        thread.join()
        with phase("later"):
            pass
    with phase("around"), step(), phase("inside"):
        pass

    assert [(name, number, parent) for name, number, _, _, parent in spans(tracer)] == [
        ("PUSH", 0, "push_pull"),
        ("push_pull", 0, 0),
        ("rank.step", 0, 0),
        ("chunk", 0, "PULL"),
        ("PULL", 0, "push_pull"),
        ("push_pull", 0, 0),
        ("later", 1, 0),
        ("rank.step", 1, 0),
        ("inside", 2, 0),
        ("rank.step", 2, 0),
        ("around", 1, 0),
    ]


def test_an_operation_that_a_generator_holds_open_keeps_no_later_step(tracer: Tracer) -> None:
    """Each batch is fetched in it, and what the training does with a batch is of the training's step."""

    def stream() -> Iterator[int]:
        while True:
            with operation("fetch"):
                yield 1

    batches = stream()
    for _ in range(3):
        with step():
            next(batches)
            with phase("mix"):
                pass

    assert [number for name, number, *_ in spans(tracer) if name == "mix"] == [0, 1, 2]


def test_a_task_that_outlives_the_phase_it_was_begun_in_is_below_it(tracer: Tracer) -> None:
    """The phase is one span, in a step or outside: what comes later is no child of a span that nobody has."""

    async def late() -> None:
        with phase("late"):
            await asyncio.sleep(0)

    async def begin() -> None:
        with phase("begins"):
            task = asyncio.create_task(late())
        await task

    asyncio.run(begin())
    with step():
        asyncio.run(begin())

    begun = [record["number"] for record in read_own(tracer.recorder).records if record["kind"] == BEGIN]
    assert len(begun) == 1  # the step alone
    assert [(name, parent) for name, *_, parent in spans(tracer)] == [
        ("begins", 0),
        ("late", "begins"),
        ("begins", 0),
        ("late", "begins"),
        ("rank.step", 0),
    ]


@pytest.mark.parametrize("outer", [phase, operation])
@pytest.mark.parametrize("held", [phase, operation])
def test_a_block_that_a_generator_holds_open_brings_back_none_that_is_over(
    tracer: Tracer, held: type[phase | operation], outer: type[phase | operation]
) -> None:
    """What comes once the generator is exhausted, or left, is below none of what it was begun in; neither failed."""

    def batches() -> Iterator[int]:
        with held("source"), phase("file"):
            yield 1
            yield 2

    for is_left in (False, True):
        source = batches()
        with outer("epoch"), outer("warmup"):
            next(source)
        if is_left:
            source.close()
        for _ in source:
            with phase("train"):
                pass
        with phase("after"):
            pass

    assert not [r for r in read_own(tracer.recorder).records if r["kind"] == AMEND]
    assert {name: parent for name, *_, parent in spans(tracer)} == {
        "epoch": 0,
        "warmup": "epoch",
        "source": "warmup",
        "file": "source",
        "train": 0,
        "after": 0,
    }


def test_a_block_that_a_generator_holds_within_itself_holds_up_nobody(tracer: Tracer) -> None:
    """One phase for all of a tree, which none is for: what ends around it looks for it, and not for ever."""
    visits = phase("visits")

    def visited() -> Iterator[int]:
        with visits, visits:
            yield 1

    def visit() -> None:
        walk = visited()
        with phase("outer"):
            next(walk)
        walk.close()

    contextvars.copy_context().run(visit)  # where it is its own outer one for ever
    assert "outer" in [name for name, *_ in spans(tracer)]


@pytest.mark.parametrize("block", [phase("block"), operation("block")], ids=["phase", "operation"])
def test_a_block_that_ends_in_another_context_is_no_parent_any_more(
    tracer: Tracer, capfd: pytest.CaptureFixture[str], block: Any
) -> None:
    """As in an asynchronous generator that is left, which the loop ends: what comes then is below what it was in."""

    async def batches() -> AsyncIterator[int]:
        with block:
            yield 1

    async def train() -> None:
        async for _ in batches():
            with phase("inside"):
                break
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with phase("behind"):
            pass

    asyncio.run(train())
    with phase("outer"):
        asyncio.run(train())

    assert [(name, parent) for name, *_, parent in spans(tracer)] == [
        ("inside", "block"),
        ("block", 0),
        ("behind", 0),
        ("inside", "block"),
        ("block", "outer"),
        ("behind", "outer"),
        ("outer", 0),
    ]
    assert not capfd.readouterr().err


class Array:
    """What an array of several numbers is as one: it has the method, which raises."""

    def __index__(self) -> int:
        """Raise as arrays do."""
        raise TypeError


@pytest.mark.parametrize(
    "size", ["big", None, 1.5, 1 << 80, -1, Array()], ids=["big", "None", "1.5", "2**80", "-1", "array"]
)
def test_an_odd_argument_never_raises_into_training(tracer: Tracer, size: Any) -> None:
    """The span is there, with a size of 0 if none can be told; later ones have the right parent."""
    with step():
        with phase("odd", size=size), operation("odd", size=size):
            pass
        with phase("good"):
            pass

    found = [span[0] + str(span[4]) for span in spans(tracer)]
    assert found == ["oddodd", "odd0", "good0", "rank.step0"]
    assert open_span.get() is None


@pytest.mark.parametrize(
    ("value", "told"),
    [(2.0, 2), (0.5, 0), ("7", 7), ("abc", None), (float("nan"), None), ([], None)],
    ids=str,
)
def test_an_odd_number_of_a_step_costs_that_number_alone(tracer: Tracer, value: Any, told: int | None) -> None:
    """As where an epoch is counted in parts; the steps after it are there."""
    with step(value, epoch=value, batch_size=value):
        pass
    with step(9, batch_size=8):
        pass
    ended = [record for record in read_own(tracer.recorder).records if record["kind"] == SPAN]
    user, epoch, samples = (NO_USER_STEP, -1, 0) if told is None else (told, told, told)

    assert [(one["size"], one["b"], one["a"]) for one in ended] == [(user, epoch, samples), (9, epoch, 8)]


class Odd:
    """Says nothing of itself: no name, and no number."""

    def __hash__(self) -> int:
        """Raise."""
        raise RuntimeError

    def __index__(self) -> int:
        """Raise."""
        raise RuntimeError


@pytest.mark.parametrize("block", [step, phase, operation])
def test_who_takes_a_block_by_as_has_it_although_it_could_not_begin(tracer: Tracer, block: Any) -> None:
    """As a subclass does whose own attributes are asked for behind it."""
    made = block(Odd())
    with made as taken:
        pass

    assert taken is made
    assert open_span.get() is None


@pytest.mark.parametrize("is_on", [True, False], ids=["traced", "untraced"])
@pytest.mark.parametrize(
    "block", [step(), phase("x"), phase("to_device"), operation("x")], ids=lambda b: type(b).__name__
)
def test_a_block_that_is_left_and_was_never_entered_is_none(
    tracer: Tracer, monkeypatch: pytest.MonkeyPatch, block: Any, is_on: bool
) -> None:
    """A callback for the end may come where that for the begin did not."""
    if not is_on:
        monkeypatch.setattr(live, "tracer", None)
    block.__exit__(None, None, None)

    assert tracer.recorder.ring is None


def test_a_marked_step_that_is_open_at_the_end_lasts_till_then(tracer: Tracer) -> None:
    """As in a generator that nobody exhausts: its last stage is not the end of what the program marked."""
    block = step()
    block.__enter__()
    with phase("work"):
        pass
    tracer.steps.end()
    (_, work, _), (_, ended, _) = ((span[0], span[3], span[4]) for span in spans(tracer))

    assert ended > work


def test_a_step_that_is_never_left_is_told_once(tracer: Tracer, capsys: pytest.CaptureFixture[str]) -> None:
    """It takes in all that follow; steps that have one in each of them are as they should be."""
    for _ in range(300):
        with step(), step():
            pass
    assert capsys.readouterr().err == ""
    for _ in range(300):
        step().__enter__()

    assert tracer.steps.upcoming == 301
    assert capsys.readouterr().err == (
        "otel_dltrace: 100 steps were marked inside one that has not ended, and do not count as steps: "
        "leave each step() before the next one begins (`with otel_dltrace.step():`)\n"
    )


def test_operations_of_many_threads_get_each_number_once(tracer: Tracer) -> None:
    """Sequence numbers pair ranks: none is skipped or drawn twice, whoever calls."""

    def work() -> None:
        for _ in range(50):
            with operation("push_pull", tensor="w"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seqs = [record["seq"] for record in read_own(tracer.recorder).records if record["kind"] == SPAN]

    assert sorted(seqs) == list(range(1, 201))


def test_without_tracing_nothing_is_touched() -> None:
    """Blocks cost a comparison and record nothing."""
    assert live.tracer is None
    with step(3), phase("a"), operation("b"):
        assert open_span.get() is None

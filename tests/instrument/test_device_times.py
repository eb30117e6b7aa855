"""When a device was at stages and operations, from events that nobody waits for: planted times are found again."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, get_ident
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import otel_dltrace.record.operation as operation_module
import otel_dltrace.record.steps as steps_module
from otel_dltrace.export.rings.device import PATIENCE_S
from otel_dltrace.export.rings.source import RingSource
from otel_dltrace.instrument import torch_device
from otel_dltrace.instrument._device_clock import EVERY_NS, DeviceClock
from otel_dltrace.instrument._device_times import DeviceMarks
from otel_dltrace.instrument._loop import Loop
from otel_dltrace.instrument._sites import Attachment
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, DEVICE_STAGES, Flag, Level, Source
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.record.operation import Operation
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.ring import RingWriter
from otel_dltrace.record.tracer import Tracer, live
from tests.support.fake_device import FakeDevice, FakeEvent, needs_a_build_without_devices
from tests.support.processes import Place, attributes_of

MS = 1_000_000


@dataclass
class Traced:
    """A process that is traced, and its device."""

    tracer: Tracer
    device: FakeDevice
    marks: DeviceMarks

    def stage(self, name: str, host_ms: float, device_ms: float) -> tuple[int, int]:
        """Run a stage that asks the device for *device_ms* of work; return when the device does it."""
        steps, device = self.tracer.steps, self.device
        mark = steps.mark() if name in DEVICE_STAGES else None
        start = device.clock()
        begins = max(device.now, device.busy_until)
        device.ask(device_ms)
        device.now += int(host_ms * MS)
        steps.stage(name, start, device.clock(), mark=mark)
        return begins, device.busy_until

    def idle(self, ms: float) -> None:
        """Let time pass."""
        self.device.now += int(ms * MS)

    def read(self) -> list[dict[str, Any]]:
        """Return what the drain makes of the ring once the process has ended: the last step and stages."""
        self.tracer.steps.end(self.device.clock())
        recorder = self.tracer.recorder
        assert recorder.ring is not None
        path = recorder.ring.path
        recorder.close()
        source = RingSource(path)
        source.scan()
        return named(source, source.take())


def named(source: RingSource, rows: np.ndarray) -> list[dict[str, Any]]:
    """Return *rows* with the names of their descriptors."""
    fields = ("step", "start", "end", "size", "source", "flags", "a", "b")
    return [
        {"name": source.descriptors[int(row["descriptor"])].name, **{field: int(row[field]) for field in fields}}
        for row in np.sort(rows, order=["step", "span_no"])
    ]


@pytest.fixture(params=[(0, 0.0), (-(10**15), 60e-6), (7 * 10**11, -35e-6)], ids=["same clock", "fast", "slow"])
def traced(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Traced]:
    """A process whose device has a clock with another origin and another speed."""
    device = FakeDevice(*request.param)
    monkeypatch.setattr(steps_module, "monotonic_ns", device.clock)
    monkeypatch.setattr(operation_module, "monotonic_ns", device.clock)
    tracer = Tracer(Recorder(tmp_path, 1 << 20))
    marks = tracer.steps.device = DeviceMarks(tracer.recorder, device, device.clock)
    yield Traced(tracer, device, marks)
    tracer.recorder.close()


@pytest.mark.parametrize(
    ("offset", "drift"), [(0, 0.0), (-(10**15), 80e-6), (5 * 10**12, -40e-6)], ids=["same", "fast", "slow"]
)
def test_a_planted_offset_and_drift_are_found_again(offset: int, drift: float) -> None:
    """Within the residual that is told with them, some microseconds, also between ties and just after the last."""
    device = FakeDevice(offset, drift)
    clock = DeviceClock(device, 0, device.clock)
    seen = []
    for _ in range(90):
        clock.tie()
        device.now += EVERY_NS // 3
        event = device.event()
        event.record()
        device.now += 1000
        assert clock.anchor is not None
        at = clock.time_of(event, clock.anchor)
        seen.append((abs(clock.host(at) - event.at), clock.residual(at)))

    assert all(error <= residual for error, residual in seen)
    assert max(residual for _, residual in seen[6:]) < 20_000


def test_a_moment_in_which_the_host_stood_still_does_not_count() -> None:
    """It would be known to milliseconds only; the others are known to microseconds."""
    device = FakeDevice(123, 20e-6)
    clock = DeviceClock(device, 0, device.clock)
    for second in range(10):
        device.busy_until = 0
        aside = device.event
        if second == 4:

            def stalled() -> Any:
                event = FakeDevice.event(device)
                record = event.record

                def late(stream: int | None = None) -> None:
                    record(stream)
                    device.now += 5 * MS

                event.record = late  # type: ignore[method-assign]
                return event

            device.event = stalled  # type: ignore[method-assign]
        clock.tie()
        device.event = aside  # type: ignore[method-assign]
        device.now += EVERY_NS
    assert clock.anchor is not None
    assert clock.residual(clock.anchor.at) < 20_000


def test_stages_have_the_device_s_times(traced: Traced) -> None:
    """The host asks and goes on; the device is at a stage later and longer, and its clock is another."""
    steps, planted = traced.tracer.steps, {}
    for step in range(4):
        steps.begin()
        traced.stage("dataloader_next", 5, 0)
        planted[step, "forward"] = traced.stage("forward", 1, 30)
        planted[step, "backward"] = traced.stage("backward", 2, 50)
        planted[step, "optimizer"] = traced.stage("optimizer", 1, 8)
        traced.idle(400)
    rows = {(row["step"], row["name"]): row for row in traced.read()}

    for key, (start, end) in planted.items():
        row = rows[key]
        assert row["source"] == Source.DEVICE, key
        assert 0 < row["b"] < 100_000  # how well the clocks are tied: 35 ppm of a second before they are
        assert abs(row["start"] - start) <= row["b"], key
        assert abs(row["end"] - end) <= row["b"], key
        assert abs(row["size"] - (end - start)) < 10_000, key
        assert row["flags"] == 0
    assert {rows[step, "dataloader_next"]["source"] for step in range(4)} == {Source.HOST_DONE}


def test_the_pieces_of_a_stage_add_up(traced: Traced) -> None:
    """Accumulation: from the first piece's start to the last one's end, and the sum of all."""
    traced.tracer.steps.begin()
    pieces = []
    for _ in range(4):
        pieces.append(traced.stage("forward", 1, 10))
        traced.stage("backward", 1, 20)
    traced.idle(500)
    (row,) = [row for row in traced.read() if row["name"] == "forward"]

    assert (row["a"], row["source"]) == (4, Source.DEVICE)
    assert abs(row["start"] - pieces[0][0]) <= row["b"]
    assert abs(row["end"] - pieces[-1][1]) <= row["b"]
    assert abs(row["size"] - 40 * MS) < 40_000


def test_a_span_says_whose_times_it_has(traced: Traced) -> None:
    """`dl.time.source`, and how well the clocks are tied, as attributes of the stage."""
    traced.tracer.steps.begin()
    traced.stage("forward", 1, 10)
    traced.idle(100)
    traced.tracer.steps.end(traced.device.clock())
    recorder = traced.tracer.recorder
    assert recorder.ring is not None
    path = recorder.ring.path
    recorder.close()
    source = RingSource(path)
    source.scan()
    batch = SpanBatch(source.take(), source.descriptors, source.process(None, None))
    (forward,) = [one for one in attributes_of(batch) if one.get("dl.phase") == "forward"]

    assert forward["dl.time.source"] == "device"
    assert 0 < int(forward["dl.time.residual"]) < 20_000


def test_no_event_is_touched_while_a_graph_is_captured(traced: Traced) -> None:
    """It would break the capture: these stages have the host's times (the fake would fail)."""
    steps, device = traced.tracer.steps, traced.device
    steps.begin()
    traced.stage("forward", 1, 10)
    device.is_capturing = True
    traced.stage("backward", 1, 10)
    steps.begin()
    device.is_capturing = False
    traced.idle(100)
    rows = {row["name"]: row["source"] for row in traced.read()}

    assert (rows["forward"], rows["backward"]) == (Source.DEVICE, Source.HOST_DONE)


@pytest.mark.parametrize("captured", [0, 1, 2], ids=["the first", "one between", "the last"])
def test_a_piece_without_events_leaves_its_stage_to_the_host(traced: Traced, captured: int) -> None:
    """Half a stage's times would be wrong ones."""
    steps, device = traced.tracer.steps, traced.device
    steps.begin()
    for piece in range(3):
        device.is_capturing = piece == captured
        traced.stage("forward", 1, 10)
    device.is_capturing = False
    traced.idle(100)
    rows = {row["name"]: row for row in traced.read()}

    assert (rows["forward"]["source"], rows["forward"]["a"]) == (Source.HOST_DONE, 3)


def test_a_device_that_answers_late_is_asked_again(traced: Traced) -> None:
    """Without a moment that both clocks know there are no times; nobody waits for one."""
    device = traced.device
    device.latency = 10 * MS
    asked = device.now
    traced.tracer.steps.begin()
    traced.stage("forward", 0, 10)
    assert device.now - asked < MS
    traced.idle(200)
    device.latency = 3_000
    traced.tracer.steps.begin()
    traced.stage("forward", 0, 10)
    traced.idle(200)

    assert [row["source"] for row in traced.read() if row["name"] == "forward"] == [Source.HOST_DONE, Source.DEVICE]


def test_a_device_that_always_answers_late_has_its_times_less_well_known(traced: Traced) -> None:
    """Others use it as well, or all streams share a queue: how long it takes is exact, when is as the residual says."""
    device, planted = traced.device, {}
    device.latency = 8 * MS
    for step in range(8):
        traced.tracer.steps.begin()
        planted[step] = traced.stage("forward", 1, 30)
        traced.stage("backward", 1, 20)
        traced.idle(60)
    rows = {row["step"]: row for row in traced.read() if row["name"] == "forward"}

    assert [row["source"] for row in rows.values()] == [Source.HOST_DONE] + [Source.DEVICE] * 7
    for step in range(1, 8):
        start, end = planted[step]
        assert abs(rows[step]["start"] - start) <= rows[step]["b"] < 60 * MS
        assert abs(rows[step]["end"] - end) <= rows[step]["b"]
        assert abs(rows[step]["end"] - rows[step]["start"] - (end - start)) < 10_000


def test_a_device_that_is_not_used_is_left_alone(traced: Traced) -> None:
    """Nothing is initialised because of us: there is not one event."""
    traced.device.is_used = False
    traced.tracer.steps.begin()
    traced.stage("forward", 1, 10)

    assert {row["source"] for row in traced.read()} == {Source.HOST_DONE}
    assert traced.device.events == []


def test_a_stage_that_lacks_a_piece_s_times_holds_no_events(tmp_path: Path) -> None:
    """They are for the stages that will have the device's times."""
    device = FakeDevice()
    tracer = Tracer(Recorder(tmp_path, 1 << 20))
    marks = tracer.steps.device = DeviceMarks(tracer.recorder, device, device.clock, most=4)
    traced = Traced(tracer, device, marks)
    tracer.steps.begin()
    device.is_capturing = True
    traced.stage("forward", 1, 1)
    device.is_capturing = False
    for _ in range(9):
        traced.stage("forward", 1, 1)
    traced.stage("backward", 1, 1)
    traced.idle(100)
    rows = {row["name"]: row["source"] for row in traced.read()}

    assert (rows["forward"], rows["backward"]) == (Source.HOST_DONE, Source.DEVICE)


def test_steps_of_more_than_a_minute_have_the_device_s_times(traced: Traced) -> None:
    """The clocks are tied at their ends alone; what was marked before such a tie lies on the same line."""
    planted = []
    for _ in range(3):
        traced.tracer.steps.begin()
        planted.append(traced.stage("forward", 1, 30))
        traced.idle(70_000)
        planted.append(traced.stage("forward", 1, 5_000))
    traced.idle(10_000)
    rows = [row for row in traced.read() if row["name"] == "forward"]

    assert [row["source"] for row in rows] == [Source.DEVICE] * 3
    for row, (start, _), (_, end) in zip(rows, planted[::2], planted[1::2], strict=True):
        assert row["b"] < MS
        assert abs(row["start"] - start) <= row["b"]
        assert abs(row["end"] - end) <= row["b"]


def test_each_device_has_events_of_its_own(traced: Traced) -> None:
    """An event stays with the device that it was first used on (the fake would fail)."""
    for step in range(6):
        traced.device.current = step % 2
        traced.tracer.steps.begin()
        traced.stage("forward", 1, 10)
        traced.idle(100)

    assert {row["source"] for row in traced.read() if row["name"] == "forward"} == {Source.DEVICE}


def test_a_device_that_is_not_the_program_s_is_not_asked(traced: Traced) -> None:
    """The current one need not be the one that works: there is not one event."""
    traced.device.current = None
    traced.tracer.steps.begin()
    traced.stage("forward", 1, 10)

    assert {row["source"] for row in traced.read()} == {Source.HOST_DONE}
    assert traced.device.events == []


@pytest.mark.parametrize(
    ("current", "contexts", "models", "index"),
    [
        pytest.param(0, {0}, set(), 0, id="in use"),
        pytest.param(0, {1}, set(), None, id="without a context"),
        pytest.param(0, {0, 1}, {1}, None, id="beside the model"),
        pytest.param(1, {1}, {1}, 1, id="the model's"),
        pytest.param(1, {0, 1}, {0, 1}, 1, id="one of the model's"),
    ],
)
def test_a_device_is_asked_where_the_program_works(
    current: int, contexts: set[int], models: set[int], index: int | None
) -> None:
    """Programs that name the device of each tensor leave the first one current: asked, it would open a context."""
    cuda = torch_device.Cuda(SimpleNamespace(current_device=lambda: current), contexts.__contains__)
    assert cuda.index() == (current if current in contexts else None)
    cuda.meet(models)
    assert [cuda.index(), cuda.index()] == [index, index]


def in_another_thread(work: Callable[[], object]) -> None:
    """Do *work* in a thread of its own."""
    thread = Thread(target=work)
    thread.start()
    thread.join()


def test_other_threads_ask_the_device_nothing(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """A question would break the graph that the thread that trains may capture: their stages have the host's times."""
    asked: list[int] = []
    query = FakeEvent.query
    monkeypatch.setattr(FakeEvent, "query", lambda event: (asked.append(get_ident()), query(event))[1])
    tracer = traced.tracer

    def prefetch() -> None:
        traced.stage("to_device", 1, 10)
        operation = Operation(tracer.recorder, tracer.recorder.intern(Descriptor(COLLECTIVE, "all_reduce")))
        begun = tracer.steps.mark_operation()
        if begun is not None and traced.marks.operation(operation.number, operation.step, begun):
            operation.flags |= Flag.DEVICE
        operation.close()

    for _ in range(2):
        tracer.steps.begin()
        in_another_thread(prefetch)
        traced.stage("forward", 1, 10)
        in_another_thread(prefetch)
        traced.idle(100)
    tracer.steps.begin()
    sources = {(row["name"], row["source"]) for row in traced.read() if row["name"] != "rank.step"}

    assert set(asked) == {get_ident()}
    assert sources == {
        ("to_device", Source.HOST_DONE),
        ("forward", Source.DEVICE),
        ("all_reduce", Source.HOST_DONE),  # before the first stage of the device is known
        ("all_reduce", Source.DEVICE),
    }


def test_a_backward_in_which_optimizers_step_has_the_device_s_times(traced: Traced) -> None:
    """One for each parameter, as its gradient is there: on a device that is in the thread of the backward."""
    loop, device = Loop(traced.tracer.steps), traced.device
    for _ in range(2):
        loop.forward_begins(start := device.clock())
        device.ask(10)
        loop.forward_ended(start, device.clock())
        loop.backward_begins(start := device.clock())
        for _ in range(2):
            device.ask(10)
            in_another_thread(lambda: loop.optimizer_begins(loop, device.clock()))
            in_another_thread(lambda: loop.optimizer_ended(loop, device.clock()))
        loop.backward_ended(start, device.clock())
        traced.idle(100)
    rows = {(row["step"], row["name"]): row for row in traced.read() if row["name"] != "rank.step"}

    assert {key: (row["source"], row["a"]) for key, row in rows.items()} == {
        (step, name): known
        for step in range(2)
        for name, known in [
            ("forward", (Source.DEVICE, 1)),
            ("backward", (Source.DEVICE, 1)),
            ("optimizer", (Source.HOST_DONE, 2)),
        ]
    }


@pytest.mark.parametrize("level", [Level.STEP, Level.COLLECTIVE])
def test_events_are_used_from_level_collective_on(level: Level, tmp_path: Path) -> None:
    """The tier that a month-long run keeps on costs the device nothing; taken away, nothing stays."""
    pytest.importorskip("torch")
    (row,) = torch_device.ROWS
    assert isinstance(row, Attachment)
    live.tracer = tracer = Tracer(Recorder(tmp_path, 1 << 20, level))
    cuda = ModuleType("torch.cuda")
    cuda._is_compiled = lambda: True  # type: ignore[attr-defined]
    undo = row.attach(cuda)
    followed = tracer.steps.device is not None
    undo()
    live.tracer = None

    assert (followed, tracer.steps.device) == (level >= Level.COLLECTIVE, None)


def test_the_events_are_bounded_and_used_again(tmp_path: Path) -> None:
    """A device far behind: what comes when all events are in use has the host's times, later stages have theirs."""
    device = FakeDevice()
    tracer = Tracer(Recorder(tmp_path, 1 << 20))
    marks = tracer.steps.device = DeviceMarks(tracer.recorder, device, device.clock, most=6)
    traced = Traced(tracer, device, marks)
    for _ in range(6):
        tracer.steps.begin()
        traced.stage("forward", 1, 100)
    traced.idle(1000)
    for _ in range(3):
        tracer.steps.begin()
        traced.stage("forward", 1, 1)
        traced.idle(5)
    rows = [row for row in traced.read() if row["name"] == "forward"]

    assert [row["source"] for row in rows] == [Source.DEVICE] * 3 + [Source.HOST_DONE] * 3 + [Source.DEVICE] * 3
    assert len(device.events) <= 6 + 3  # of ties there was one a second, and but the last one is kept


def test_a_device_that_fails_is_not_asked_again(traced: Traced, capfd: pytest.CaptureFixture[str]) -> None:
    """One sentence; the program meets the error at its own next call, and stages have the host's times."""
    steps, device = traced.tracer.steps, traced.device
    steps.begin()
    traced.stage("forward", 1, 10)
    device.breaks = True
    for _ in range(3):
        traced.stage("backward", 1, 10)
    device.breaks = False
    traced.stage("optimizer", 1, 10)
    rows = {row["name"]: row["source"] for row in traced.read()}

    assert set(rows.values()) == {Source.HOST_DONE}
    assert capfd.readouterr().err.count("illegal memory access") <= 1


@pytest.mark.parametrize(
    ("lasts", "source"), [(40, Source.DEVICE), (1, Source.BOUND)], ids=["still running", "long done"]
)
def test_an_operation_that_is_waited_for(traced: Traced, lasts: float, source: int) -> None:
    """Its end is exact where the device had to wait for it, else it was some time before."""
    tracer, device = traced.tracer, traced.device
    tracer.steps.begin()
    operation = Operation(tracer.recorder, tracer.recorder.intern(Descriptor(COLLECTIVE, "all_reduce")), 64)
    begun = traced.marks.mark()
    assert begun is not None
    on_device = device.clock()
    done = on_device + int(lasts * MS)
    operation.flags |= Flag.DEVICE
    operation.close(source=Source.HOST_ISSUE)
    device.ask(10)
    asked = traced.marks.mark()
    assert asked is not None
    device.busy_until = max(device.busy_until, done)
    traced.marks.waited(operation.number, operation.step, begun, asked)
    traced.idle(200)
    (row,) = [row for row in traced.read() if row["name"] == "all_reduce"]

    assert (row["source"], row["size"]) == (source, 64)
    assert abs(row["start"] - on_device) < 20_000
    assert abs(row["end"] - max(done, on_device + 10 * MS)) < 20_000


def all_reduce_on_the_device(traced: Traced) -> RingWriter:
    """Begin a step, and in it a collective that takes the device 50 ms and has no times yet; return the ring."""
    recorder = traced.tracer.recorder
    traced.tracer.steps.begin()
    operation = Operation(recorder, recorder.intern(Descriptor(COLLECTIVE, "all_reduce")))
    begun = traced.marks.mark()
    assert begun is not None
    traced.device.ask(50)
    assert traced.marks.operation(operation.number, operation.step, begun)
    operation.flags |= Flag.DEVICE
    operation.close(source=Source.HOST_ISSUE)
    assert recorder.ring is not None
    return recorder.ring


def test_a_span_waits_for_its_times_also_in_the_next_drain(traced: Traced) -> None:
    """They come after it: the drain holds the span, and one that takes over holds it again."""
    ring = all_reduce_on_the_device(traced)
    first = RingSource(ring.path, buffer=ring.buffer)
    for _ in range(3):
        first.scan(alive=True)
        assert len(first.take()) == 0
    second = RingSource(ring.path, first.reader.taken.copy(), first.unfinished(), buffer=ring.buffer)
    traced.idle(100)
    traced.tracer.steps.begin()
    rows: list[dict[str, Any]] = []
    for _ in range(4):
        second.scan(alive=True)
        rows += named(second, second.take())
    (row,) = [row for row in rows if row["name"] == "all_reduce"]

    assert (row["source"], row["flags"]) == (Source.DEVICE, 0)
    assert row["end"] - row["start"] == pytest.approx(50 * MS, abs=20_000)


def test_a_step_comes_with_its_stages_however_late_the_device_is(traced: Traced) -> None:
    """The host is a step further: the step waits for the stage that the device is at, also in the next drain."""
    steps, recorder = traced.tracer.steps, traced.tracer.recorder
    steps.begin()
    traced.stage("dataloader_next", 1, 0)
    traced.stage("forward", 1, 500)
    steps.begin()
    assert recorder.ring is not None
    first = RingSource(recorder.ring.path, buffer=recorder.ring.buffer)
    for _ in range(3):
        first.scan(alive=True)
        assert len(first.take()) == 0
    second = RingSource(recorder.ring.path, first.reader.taken.copy(), first.unfinished(), buffer=recorder.ring.buffer)
    second.scan(alive=True)
    assert len(second.take()) == 0
    traced.idle(600)
    steps.begin()
    portions = []
    for _ in range(4):
        second.scan(alive=True)
        rows = named(second, second.take())
        portions.append(sorted((row["name"], row["step"], row["source"], row["flags"]) for row in rows))

    assert next(portion for portion in portions if portion) == [
        ("dataloader_next", 0, Source.HOST_DONE, 0),
        ("forward", 0, Source.DEVICE, 0),
        ("rank.step", 0, Source.HOST_DONE, 0),
    ]


def test_long_steps_wait_as_long_as_some_of_them_take(traced: Traced) -> None:
    """The device may be a step behind, and is only asked where stages end: more than some seconds later."""
    steps, recorder = traced.tracer.steps, traced.tracer.recorder
    steps.begin()
    traced.stage("forward", 20_000, 25_000)
    steps.begin()
    assert recorder.ring is not None
    source = RingSource(recorder.ring.path, buffer=recorder.ring.buffer)
    for now in (100.0, 100.0 + 2 * PATIENCE_S, 100.0 + 4 * PATIENCE_S):
        source.scan(alive=True)
        assert len(source.take(now)) == 0
    traced.stage("forward", 20_000, 25_000)
    taken = []
    for _ in range(3):  # what is written last is read at the next look
        source.scan(alive=True)
        taken += named(source, source.take(100.0 + 5 * PATIENCE_S))

    assert [(row["name"], row["step"], row["source"]) for row in taken] == [
        ("rank.step", 0, Source.HOST_DONE),
        ("forward", 0, Source.DEVICE),
    ]
    assert source.late == 0


def test_a_span_whose_times_do_not_come_goes_on_with_the_host_s(traced: Traced) -> None:
    """Some seconds later, though its process records no more; times that come then are counted as late."""
    ring = all_reduce_on_the_device(traced)
    source = RingSource(ring.path, buffer=ring.buffer)
    taken: list[list[tuple[Any, ...]]] = []
    for now in (100.0, 100.0, 100.0 + PATIENCE_S / 2, 101.0 + PATIENCE_S):
        source.scan(alive=True)
        taken.append([(row["name"], row["source"], row["flags"]) for row in named(source, source.take(now))])
    assert source.late == 0
    traced.idle(100)
    traced.tracer.steps.begin()
    for _ in range(2):
        source.scan(alive=True)
        source.take(200.0)

    assert taken == [[], [], [], [("all_reduce", Source.HOST_ISSUE, 0)]]
    assert source.late == 1


PROGRAM = """
    import time, types
    import otel_dltrace
    otel_dltrace.instrument()
    import torch
    from otel_dltrace.instrument import torch_device

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
        def record(self, stream=None):
            now = time.monotonic_ns()
            self.at = now if stream == "aside" else max(now, Device.busy_until)
        def query(self):
            return time.monotonic_ns() >= self.at
        def elapsed_time(self, end):
            return (end.at - self.at) / 1e6

    class Device(types.ModuleType):  # no synchronize, no wait: who calls one fails
        busy_until = 0
        Event = Event
        Stream = staticmethod(lambda index: "aside")
        _is_compiled = is_initialized = staticmethod(lambda: True)
        is_current_stream_capturing = staticmethod(lambda: False)
        current_device = staticmethod(lambda: 0)

    for name in ("Event", "Stream", "_is_compiled", "is_initialized", "is_current_stream_capturing", "current_device"):
        assert callable(getattr(torch.cuda, name)), name
    assert all(callable(getattr(torch.cuda.Event, name)) for name in ("record", "query", "elapsed_time"))
    (row,) = torch_device.ROWS
    row.attach(Device("torch.cuda"))

    class Slow(torch.nn.Linear):
        def forward(self, x):
            Device.busy_until = max(time.monotonic_ns(), Device.busy_until) + 40_000_000
            return super().forward(x)

    model = Slow(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(5):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        while time.monotonic_ns() < Device.busy_until:  # as `loss.item()` would
            time.sleep(0.001)
    otel_dltrace.stop()
"""


def test_a_program_s_stages_come_with_the_device_s_times(place: Place) -> None:
    """Through the ring, the drain and the run directory: the host asks at once, the device takes 40 ms."""
    needs_a_build_without_devices()
    done = place.run(PROGRAM)
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()
    (batch,) = place.spans()
    is_forward = batch.lookup(lambda d: d.name == "forward", bool)
    forward = batch.rows[is_forward & (batch["source"] == Source.DEVICE)]

    assert forward["step"].tolist()[:4] == [0, 1, 2, 3]  # of the last nobody asks any more
    assert (forward["end"] - forward["start"]).min() >= 39_900_000
    assert forward["size"].min() >= 39_900_000
    assert is_forward.sum() == 5

"""Collectives that nobody waits for: how long PyTorch's Flight Recorder says they took, and when that can have been."""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import otel_dltrace.record.operation as operation_module
import otel_dltrace.record.steps as steps_module
from otel_dltrace.export.rings.source import RingSource
from otel_dltrace.instrument._device_times import DeviceMarks
from otel_dltrace.instrument._torch import recorder
from otel_dltrace.instrument._torch.durations import Active, ends
from otel_dltrace.instrument._torch.recorder import Recorded
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, Flag, Source
from otel_dltrace.record.operation import Operation
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live
from otel_dltrace.settings.process import nccl_timing
from tests.support.fake_device import FakeDevice, needs_a_build_without_devices
from tests.support.processes import Place

MS = 1_000_000
WALL = 1_700_000_000 * 10**9
"""When the host's monotonic clock began, by that of the wall."""

times = st.integers(0, 1000)


@given(st.lists(st.tuples(times, times, st.integers(1, 1000), times), min_size=1, max_size=12), st.booleans())
def test_an_end_is_never_before_the_earliest_nor_after_the_latest(
    planted: list[tuple[int, int, int, int]], comes: bool
) -> None:
    """Whatever a group's operations wait for; where it is known when the device came to each, ends are exact."""
    active, truth, asked, over = [], [], 0, 0
    for gap, ready, lasted, noticed in planted:
        asked += gap
        came = asked + ready
        over = max(came, over) + lasted
        truth.append(over)
        active.append(Active(came if comes else asked, lasted, over + noticed, False))
    found = ends(active)

    assert all(end.earliest <= true <= end.latest for end, true in zip(found, truth, strict=True))
    assert [end.assumed for end in found] == ([*truth] if comes else [end.earliest for end in found])


@given(st.lists(st.tuples(times, st.integers(1, 1000)), min_size=1, max_size=12))
def test_the_last_of_those_that_the_device_waited_for_ends_when_it_goes_on(planted: list[tuple[int, int]]) -> None:
    """The others end so early that those behind them have their time, and one at a time."""
    asked, over, launched = 0, 0, []
    for gap, lasted in planted:
        asked += gap
        over = max(asked, over) + lasted
        launched.append((asked, lasted))
    assumed = [end.assumed for end in ends([Active(since, lasted, over, True) for since, lasted in launched])]

    assert assumed[-1] == over
    starts = [end - lasted for end, (_, lasted) in zip(assumed, launched, strict=True)]
    assert all(end <= start for end, start in zip(assumed, starts[1:], strict=False))
    assert all(start >= since for start, (since, _) in zip(starts, launched, strict=True))


@dataclass
class Nccl:
    """A process on one GPU: its group's collectives run in a stream, a watchdog looks at them ten times a second."""

    tracer: Tracer
    device: FakeDevice
    marks: DeviceMarks
    recorded: Recorded
    entries: list[dict[str, Any]] = field(default_factory=list)
    stream: int = 0
    dumps: int = 0
    takes_ms: float = 0
    seq: int = 0
    error: Exception | None = None

    def launch(self, ms: float) -> tuple[int, int, int]:
        """Ask for a collective that takes *ms*; return when the host did, when the device begins it and has done it."""
        now = self.device.clock()
        start = max(now, self.device.busy_until, self.stream)
        self.stream = start + int(ms * MS)
        self.seq += 1
        entry = {"is_p2p": False, "process_group": ["0", "default_pg"], "collective_seq_id": self.seq}
        self.entries.append({**entry, "time_created_ns": WALL + now, "ends": self.stream, "lasted": ms})
        return now, start, self.stream

    def dump(self, collectives: bool, active: bool) -> bytes:
        """Return what the Flight Recorder keeps."""
        assert (collectives, active, self.device.is_capturing) == (True, False, False)
        if self.error is not None:
            raise self.error
        self.dumps += 1
        self.device.now += int(self.takes_ms * MS)
        shown = []
        for entry in self.entries:
            noticed = -(-entry["ends"] // (100 * MS)) * 100 * MS
            told = {name: value for name, value in entry.items() if name not in ("ends", "lasted")}
            if noticed <= self.device.now:
                told |= {"duration_ms": entry["lasted"], "time_discovered_completed_ns": WALL + noticed}
            shown.append(told)
        return json.dumps({"entries": shown} if shown else {}).encode()

    def handle(self, ms: float) -> tuple[int, int]:
        """Run an ``async_op=True`` collective that nobody waits for; return when the device is at it."""
        operation = Operation(self.tracer.recorder, self.tracer.recorder.intern(Descriptor(COLLECTIVE, "all_reduce")))
        mark = self.tracer.steps.mark_operation()
        asked, start, end = self.launch(ms)
        if self.recorded.follows("0", self.seq, operation.number, operation.step, asked, mark):
            operation.flags |= Flag.DEVICE
        operation.close(self.seq, Source.HOST_ISSUE, end=asked)
        return start, end

    def buckets(self, *each: tuple[float, float]) -> list[tuple[int, int]]:
        """Compute, launch a bucket, for each of (ms, ms), then wait for all; return when the device is at them."""
        launched = []
        for computed, lasts in each:
            self.device.ask(computed)
            operation = Operation(self.tracer.recorder, self.tracer.recorder.intern(Descriptor(COLLECTIVE, "bucket")))
            launched.append((operation, self.seq + 1, self.launch(lasts)))
        self.device.busy_until = max(self.device.busy_until, self.stream)
        mark = self.tracer.steps.mark_operation()
        for operation, seq, (asked, _, _) in launched:
            assert self.recorded.follows("0", seq, operation.number, operation.step, asked, mark, is_end=True)
            operation.flags |= Flag.DEVICE
            operation.close(seq, Source.HOST_ISSUE, end=asked)
        return [(start, end) for _, _, (_, start, end) in launched]

    def idle(self, ms: float) -> None:
        """Let a step of *ms* go by."""
        self.device.now += int(ms * MS)
        self.tracer.steps.begin()

    def read(self) -> list[tuple[int, int, int]]:
        """End the process; return (source, start, end) of the collectives, in their order."""
        live.tracer = None
        self.tracer.steps.end(self.device.clock())
        assert self.tracer.recorder.ring is not None
        path = self.tracer.recorder.ring.path
        self.tracer.recorder.close()
        source = RingSource(path)
        source.scan()
        rows = source.take()
        rows = rows[[source.descriptors[int(number)].kind == COLLECTIVE for number in rows["descriptor"]]]
        return [(int(r["source"]), int(r["start"]), int(r["end"])) for r in np.sort(rows, order="seq")]


@pytest.fixture
def nccl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nccl]:
    """A process that is traced, whose groups are NCCL's, and measured."""
    device = FakeDevice(7 * 10**11, -35e-6)
    monkeypatch.setattr(steps_module, "monotonic_ns", device.clock)
    monkeypatch.setattr(operation_module, "monotonic_ns", device.clock)
    monkeypatch.setattr(recorder, "monotonic_ns", device.clock)
    monkeypatch.setattr(recorder, "time_ns", lambda: WALL + device.clock())
    tracer = Tracer(Recorder(tmp_path, 1 << 20))
    tracer.nccl_timing = lambda: True
    marks = tracer.steps.device = DeviceMarks(tracer.recorder, device, device.clock)
    recorded = Recorded(tracer)
    tracer.steps.on_end = recorded.step_ends
    monkeypatch.setattr(live, "tracer", tracer)
    process = Nccl(tracer, device, marks, recorded)
    module = SimpleNamespace(_dump_nccl_trace_json=process.dump)
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", module)
    tracer.steps.begin()
    yield process
    tracer.recorder.close()


def test_a_handle_that_nobody_waits_for_has_the_device_s_times(nccl: Nccl) -> None:
    """It begins when the device comes to it and the one before is over, however late a watchdog notices its end."""
    planted = []
    for computes, lasts in ((30, 5), (1, 40), (1, 3), (100, 20), (0, 2)):
        nccl.device.ask(computes)
        planted.append(nccl.handle(lasts))
    nccl.idle(1000)
    found = nccl.read()

    assert [source for source, _, _ in found] == [Source.RECORDER] * len(planted)
    np.testing.assert_allclose([[start, end] for _, start, end in found], planted, rtol=0, atol=30_000)


def test_buckets_end_before_the_device_goes_on(nccl: Nccl) -> None:
    """Each takes as long as it did; the last ends when the device goes on, and those without a gap behind them."""
    planted = nccl.buckets((30, 5), (20, 40), (10, 30), (1, 6))
    nccl.idle(1000)
    found = nccl.read()

    assert [source for source, _, _ in found] == [Source.RECORDER] * 4
    lasted = [end - start for _, start, end in found]
    np.testing.assert_allclose(lasted, [5 * MS, 40 * MS, 30 * MS, 6 * MS], rtol=0, atol=1000)
    np.testing.assert_allclose([end for _, _, end in found[1:]], [end for _, end in planted[1:]], rtol=0, atol=30_000)
    assert planted[0][1] < found[0][2] <= planted[1][0] + 30_000  # at the latest


@pytest.mark.parametrize(("takes_ms", "most"), [(1, 21), (30, 7), (500, 5)])
def test_the_recorder_is_read_as_seldom_as_it_is_slow(nccl: Nccl, takes_ms: float, most: int) -> None:
    """A hundredth of the time, or once in four seconds: a drain waits five for what it is told here."""
    nccl.takes_ms = takes_ms
    for _ in range(200):
        nccl.handle(2)
        nccl.idle(100)
    read = nccl.dumps

    assert 4 <= read <= most
    assert [source for source, _, _ in nccl.read()] == [Source.RECORDER] * 200


def test_a_collective_that_is_never_over_holds_the_others_up_for_ten_seconds(nccl: Nccl) -> None:
    """Nobody knows when those behind it were; then it is forgotten, as one that the recorder has overwritten is."""
    nccl.handle(1)
    nccl.entries[-1]["ends"] = sys.maxsize // 2
    nccl.handle(1)
    for _ in range(11):
        nccl.idle(1000)
    nccl.handle(1)
    nccl.idle(1000)
    nccl.handle(1)
    nccl.entries.pop()
    for _ in range(3):
        nccl.handle(1)
    del nccl.entries[:-2]
    nccl.idle(1000)

    asked, told = Source.HOST_ISSUE, Source.RECORDER
    assert [source for source, _, _ in nccl.read()] == [asked, told, told, asked, asked, told, told]


def test_a_group_that_was_there_before_is_another_one(nccl: Nccl) -> None:
    """The world is destroyed and begun anew, under the same name: its numbers begin again."""
    for _ in range(3):
        nccl.handle(50)
    nccl.idle(1000)
    nccl.seq = 0
    planted = [nccl.handle(1), nccl.handle(2)]
    nccl.idle(1000)
    found = sorted(nccl.read(), key=lambda row: row[1])[-2:]

    np.testing.assert_allclose([[start, end] for _, start, end in found], planted, rtol=0, atol=30_000)


def test_nothing_is_asked_while_a_graph_is_captured(nccl: Nccl) -> None:
    """The recorder asks the device (the fake would fail): it is read later; what is captured is not followed."""
    nccl.handle(1)
    nccl.device.is_capturing = True
    nccl.idle(1000)
    nccl.handle(1)
    nccl.idle(1000)
    nccl.device.is_capturing = False
    nccl.handle(1)
    nccl.idle(1000)

    assert [source for source, _, _ in nccl.read()] == [Source.RECORDER, Source.HOST_ISSUE, Source.RECORDER]


def test_a_device_that_tells_itself_is_believed(nccl: Nccl) -> None:
    """A handle that was waited for after all: its times are not written twice."""
    nccl.handle(5)
    first = next(iter(nccl.recorded.expected))
    nccl.recorded.knows(first)
    nccl.handle(5)
    nccl.idle(1000)

    assert [source for source, _, _ in nccl.read()] == [Source.HOST_ISSUE, Source.RECORDER]


def breaks(nccl: Nccl) -> None:
    """Have every dump fail."""
    nccl.error = RuntimeError("no dump today")


def is_off(nccl: Nccl) -> None:
    """Have the recorder keep nothing."""
    nccl.entries = SimpleNamespace(append=lambda _entry: None)  # type: ignore[assignment]
    nccl.dump = lambda *_: b'{"version": "2.10"}'  # type: ignore[method-assign]
    sys.modules["torch._C._distributed_c10d"]._dump_nccl_trace_json = nccl.dump  # type: ignore[attr-defined]


def is_not_timed(nccl: Nccl) -> None:
    """Have PyTorch measure nothing."""
    nccl.tracer.nccl_timing = lambda: False


def is_not_there(nccl: Nccl) -> None:
    """Have a PyTorch without NCCL."""
    del sys.modules["torch._C._distributed_c10d"]._dump_nccl_trace_json  # type: ignore[attr-defined]


@pytest.mark.parametrize("change", [breaks, is_off, is_not_timed, is_not_there])
def test_without_a_recorder_all_stays_as_it_is(
    nccl: Nccl, change: Callable[[Nccl], None], capfd: pytest.CaptureFixture[str]
) -> None:
    """The times are those of the calls; what fails is not asked again, and says so once."""
    change(nccl)
    for _ in range(3):
        nccl.handle(1)
        nccl.idle(2000)

    assert [(source, end - start < MS) for source, start, end in nccl.read()] == [(Source.HOST_ISSUE, True)] * 3
    said = capfd.readouterr().err
    assert said.count("no dump today") == said.count("otel_dltrace: ") <= (change is breaks)


@pytest.mark.parametrize(
    ("env", "is_timed"),
    [
        ({}, False),
        ({"TORCH_NCCL_ENABLE_TIMING": "0"}, False),
        ({"TORCH_NCCL_ENABLE_TIMING": "1"}, True),
        ({"NCCL_ENABLE_TIMING": "True"}, True),
        ({"TORCH_NCCL_ENABLE_TIMING": "1", "TORCH_NCCL_CUDA_EVENT_CACHE": "0"}, False),
    ],
)
def test_the_program_says_whether_it_is_timed(env: dict[str, str], is_timed: bool) -> None:
    """Never ours to switch on: it costs the device something."""
    assert nccl_timing(env) == is_timed


PROGRAM = """
import json, time, types
import otel_dltrace
otel_dltrace.instrument()
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
from otel_dltrace.instrument import torch_device
from otel_dltrace.instrument._torch import buckets, comm

class Event:  # of a device that is never late
    def __init__(self, enable_timing):
        pass
    def record(self, stream=None):
        self.at = time.monotonic_ns()
    def query(self):
        return True
    def elapsed_time(self, end):
        return (end.at - self.at) / 1e6

class Cuda(types.ModuleType):
    Event = Event
    Stream = staticmethod(lambda index: index)
    _is_compiled = is_initialized = staticmethod(lambda: True)
    is_current_stream_capturing = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)

(row,) = torch_device.ROWS
row.attach(Cuda("torch.cuda"))
comm.HOST_BACKENDS = buckets.HOST_BACKENDS = ("mpi",)  # Gloo stands for NCCL
c10d = torch._C._distributed_c10d
looks = []

def dump(collectives, active):
    # What NCCL's watchdog adds: collective k took k us.
    trace = json.loads(c10d._dump_fr_trace_json(collectives, active))
    for entry in trace["entries"]:
        entry["duration_ms"], entry["time_discovered_completed_ns"] = entry["collective_seq_id"] / 1000, time.time_ns()
    looks.append(time.monotonic_ns())
    return json.dumps(trace).encode()

c10d._dump_nccl_trace_json = dump
dist.init_process_group("gloo")
tensor = torch.ones(4)
net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
model = DistributedDataParallel(net, bucket_cap_mb=0.001)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = []
with otel_dltrace.step():
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    kept.append(dist.all_reduce(tensor, async_op=True))
    dist.all_gather([torch.ones(4), torch.ones(4)], tensor, async_op=True).wait()
    kept.append(functional.all_reduce(tensor, "sum", dist.group.WORLD))
    dist.all_reduce(tensor)
while not looks:
    with otel_dltrace.step():
        time.sleep(0.02)
kept.append(dist.all_reduce(tensor, async_op=True))
rank = dist.get_rank()
dist.destroy_process_group()
assert len(looks) >= 2  # what was under way is over
dist.init_process_group("gloo", store=dist.FileStore("again", 2), rank=rank, world_size=2)
kept.append(dist.broadcast(tensor, 0, async_op=True))
dist.barrier()
otel_dltrace.uninstrument()
read = len(looks)
kept.append(dist.all_reduce(tensor, async_op=True))
with otel_dltrace.step():
    time.sleep(0.02)
otel_dltrace.stop()
assert read >= 3 and len(looks) == read, (read, looks)
dist.destroy_process_group()
"""


def test_a_job_s_collectives_come_with_what_the_recorder_measured(place: Place) -> None:
    """Two ranks; by group and number, for those that no one waits for: a handle's, a functional one's, DDP's buckets.

    Gloo does the work, and its Flight Recorder the counting; the measured times are planted. The second world's group
    has the first one's name. Nothing is read after `uninstrument()`.
    """
    needs_a_build_without_devices()
    done = place.torchrun(PROGRAM, TORCH_FR_BUFFER_SIZE="200", TORCH_NCCL_ENABLE_TIMING="1")
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()
    found: dict[int, tuple[set[str], set[str]]] = {rank: (set(), set()) for rank in range(2)}
    for batch in place.spans():  # a run is one world's
        rows, names = batch.rows, batch.lookup(lambda d: f"{d.name} {d.tensor}".strip(), object)
        is_told, is_call = rows["source"] == Source.RECORDER, batch.is_kind(COLLECTIVE)
        assert (rows["end"] - rows["start"] == rows["seq"] * 1000)[is_told].all()
        found[batch.rank][0].update(names[is_told])
        found[batch.rank][1].update(names[is_call & ~is_told])

    told = {"all_reduce bucket 0", "all_reduce", "broadcast"}
    others = {"broadcast_coalesced", "all_gather", "all_reduce", "barrier"}
    assert found == {0: (told, others), 1: (told, others)}

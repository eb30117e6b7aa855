"""What a worker tells a server in a request's metadata, and where the server's span then hangs."""

import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from otel_dltrace.export.outgoing.gate import SETTLE_S, StepGate
from otel_dltrace.export.rings.source import RingSource
from otel_dltrace.instrument._pushpull.server import Server
from otel_dltrace.instrument._pushpull.worker import Worker
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP, Bind, span_id, trace_id
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.plan import Window, share_of
from otel_dltrace.model.queue_types import QueueType
from otel_dltrace.model.semconv import PHASE, PUSH, Flag, Level
from otel_dltrace.model.spans import empty_rows, fill_ids
from otel_dltrace.pushpull.wire import Request
from otel_dltrace.record.blocks import phase
from otel_dltrace.record.carrier import (
    Sender,
    read_tracestate,
    span_below,
    traceparent,
    traceparent_head,
    tracestate_entry,
)
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live

WORKER = Bind("job", f"1.{7:016x}", rank=1, world_size=2, local_world_size=2, servers=1)
SERVER = replace(WORKER, role="server", rank=0)
STEP, KEY = 4, 3 << 16 | 1


@pytest.fixture
def rings() -> Iterator[Path]:
    """Give a folder for rings."""
    folder = Path(tempfile.mkdtemp(prefix="dltrace-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def a_tracer(rings: Path, bind: Bind | None, server_key: int = -1) -> Tracer:
    """Return a tracer bound as *bind*."""
    recorder = Recorder(rings, 1 << 20, Level.PARTITION)
    if bind is not None:
        recorder.bind(bind)
    return Tracer(recorder, server_key=server_key)


def sent_by(tracer: Tracer, step: int = STEP) -> tuple[dict[str, str], int]:
    """Have a worker push the partition *KEY* in *step*; return the metadata and the id of its stage."""
    worker, recorder = Worker(tracer), tracer.recorder
    recorder.step = step
    pushed = worker.started("w", KEY >> 16, 0, 96, "float32", 100)
    assert pushed is not None
    metadata = dict(pushed.request_sending(1))
    pushed.stage_finished(1, QueueType.PUSH, 32, 0, 100, 110, 190)
    pushed.completed(200, None)
    (stage,) = (row for row in read(recorder) if row["level"] == Level.PARTITION)
    assert recorder.ring is not None
    nonce = int.from_bytes(recorder.ring.nonce, "little")
    return metadata, span_id(nonce, step, int(stage["span_no"]))


def served_by(tracer: Tracer, metadata: dict[str, str], key: int = KEY) -> Column:
    """Have a server answer a push with *metadata*; return the rows that its drain makes of it."""
    request = Request(key, 0, 0, 1, "w", "float32", 32)
    Server(tracer).answered("push", request, metadata, 120, 0, 150, None)
    return read(tracer.recorder) if tracer.recorder.ring else empty_rows()


def read(recorder: Recorder) -> Column:
    """Return all rows of this process's *recorder*, with ids if it is bound."""
    ring = recorder.ring
    assert ring is not None
    source = RingSource(ring.path, buffer=ring.buffer)
    source.scan(alive=False)
    rows = source.take()
    fill_ids(rows, source.descriptors, source.process(recorder.bound, None))
    source.close()
    return rows


def test_a_servers_span_hangs_below_the_stage_that_sent_it(rings):
    """In its step; its own id is of that step, too, so that a replay gives the same."""
    metadata, stage = sent_by(a_tracer(rings, WORKER))
    server = a_tracer(rings, SERVER)
    (row,) = served_by(server, metadata)

    assert metadata == {
        "traceparent": f"00-{trace_id(WORKER, STEP):032x}-{stage:016x}-01",
        "tracestate": f"dltrace={STEP}.default.1",
    }
    nonce = int.from_bytes(server.recorder.ring.nonce, "little")
    told = {name: int(row[name]) for name in ("step", "parent_id", "seq", "partition", "size", "start", "end", "b")}
    assert told == {
        "step": STEP,
        "parent_id": stage,
        "seq": 1,
        "partition": 1,
        "size": 32,
        "start": 120,
        "end": 150,
        "b": 1,
    }
    assert row["span_id"] == span_id(nonce, STEP, int(row["span_no"]))


def test_each_of_many_requests_names_its_own_stage(rings):
    """Also those whose numbers were drawn along with another's, and where a record is the last of its chunk."""
    worker, server = a_tracer(rings, WORKER), a_tracer(rings, SERVER)
    worker.recorder.step = STEP
    pushed, serving, told = Worker(worker).started("w", KEY >> 16, 0, 1280, "float32", 100), Server(server), {}
    for partition in range(40):
        metadata = pushed.request_sending(partition)
        told[partition] = int(metadata["traceparent"][36:52], 16)
        request = Request(KEY & ~0xFFFF | partition, 0, 0, 1, "w", "float32", 32)
        serving.answered("push", request, metadata, 120, 0, 150, None)
        pushed.stage_finished(partition, QueueType.PUSH, 32, 0, 100, 110, 190)
        pushed.stage_finished(partition, QueueType.COPYH2D, 32, None, 190, 191, 192)

    stages = [row for row in read(worker.recorder) if row["level"] == Level.PARTITION]
    assert len({int(row["span_id"]) for row in stages}) == 80
    assert {int(row["partition"]): int(row["span_id"]) for row in stages if row["b"] == 0} == told
    assert {int(row["partition"]): int(row["parent_id"]) for row in read(server.recorder)} == told


def test_outside_any_step_worker_and_server_name_the_trace_by_the_round(rings, monkeypatch):
    """Also inside a phase, which is a trace of its own: the server knows nothing of it."""
    worker = a_tracer(rings, WORKER)
    monkeypatch.setattr(live, "tracer", worker)
    with phase("broadcast"):
        metadata, stage = sent_by(worker, NO_STEP)
    (row,) = served_by(a_tracer(rings, SERVER), metadata)
    operation = next(row for row in read(worker.recorder) if row["level"] == Level.COLLECTIVE)

    assert metadata["traceparent"] == f"00-{trace_id(WORKER, 'ops.0'):032x}-{stage:016x}-01"
    assert (row["step"], row["parent_id"], operation["parent_id"]) == (NO_STEP, stage, 0)


def test_nothing_is_told_before_the_worker_is_bound(rings):
    """There are no ids yet; the server's span is outside any step."""
    worker = a_tracer(rings, None)
    metadata, _ = sent_by(worker)
    (row,) = served_by(a_tracer(rings, SERVER), metadata)

    assert (metadata, row["step"], row["parent_id"]) == ({}, NO_STEP, 0)


@pytest.mark.parametrize(
    "bind",
    [
        pytest.param(replace(WORKER, job="another"), id="job"),
        pytest.param(replace(WORKER, generation=f"1.{8:016x}"), id="start"),
        pytest.param(replace(WORKER, world="critic"), id="world"),
    ],
)
def test_a_stranger_is_nobodys_parent(rings, bind):
    """A span of another run, start or world has ids that mean nothing here."""
    metadata, _ = sent_by(a_tracer(rings, bind))
    (row,) = served_by(a_tracer(rings, SERVER), metadata)

    assert (row["step"], row["parent_id"], row["flags"]) == (NO_STEP, 0, 0)


def test_one_key_may_be_asked_for(rings):
    """Pushes and pulls of others are not recorded."""
    tracer = a_tracer(rings, SERVER, server_key=KEY)

    assert len(served_by(tracer, {}, key=KEY + 1)) == 0
    assert len(served_by(tracer, {})) == 1


def test_a_span_waits_one_scan_for_its_parent(rings):
    """A scan reads chunk after chunk, so the record of a parent may be seen after that of its span."""
    recorder = a_tracer(rings, SERVER).recorder
    descriptor = recorder.intern(Descriptor(PHASE, PUSH))

    def write(number: int) -> None:
        recorder.span(descriptor, Level.PARTITION, 1, 2, number=number, flags=Flag.REMOTE, step=NO_STEP)

    write(1)
    source = RingSource(recorder.ring.path, buffer=recorder.ring.buffer)
    came = []
    for happens in (
        lambda: None,
        lambda: recorder.remote_parent(1, 4, b"\x11" * 16, b"\x22" * 8, STEP, 0),
        lambda: write(2),
    ):
        happens()
        for _ in range(2):  # a live reader takes a record on the scan after the one that first saw it
            source.scan(alive=True)
        came.append([(int(row["span_no"]), int(row["step"]), int(row["parent_id"])) for row in source.take()])
    came.append([(int(row["span_no"]), int(row["step"]), int(row["parent_id"])) for row in source.take()])
    source.close()

    assert came == [[], [(1, STEP, 0x2222222222222222)], [], [(2, NO_STEP, 0)]]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", None, id="nothing"),
        pytest.param(f"a=b, {tracestate_entry(3, 'w.1,=', 4)} ,c=d", Sender(3, "w.1,=", 4), id="among others"),
        pytest.param("dltrace=3.w", None, id="no rank"),
        pytest.param("dltrace=9999999999.w.1", None, id="no step"),
    ],
)
def test_a_tracestate_names_a_sender_of_ours_or_none(text, expected):
    """Whatever a request brings along, it is read without an error."""
    assert read_tracestate(text) == expected


OURS = traceparent_head(1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("", None, id="nothing"),
        pytest.param(traceparent(OURS, 2), (2).to_bytes(8, "big"), id="ours"),
        pytest.param(f"{OURS}{2:016x}-00", (2).to_bytes(8, "big"), id="not sampled on its way"),
        pytest.param(traceparent(traceparent_head(3), 2), None, id="of another trace"),
        pytest.param(traceparent(OURS, 0), None, id="no span"),
        pytest.param(f"{OURS}{' ' * 14}02-01", None, id="half a span"),
        pytest.param(f"{OURS}000000000000000x-01", None, id="no number"),
        pytest.param(f"{OURS}{2:016x}", None, id="cut"),
    ],
)
def test_a_traceparent_names_a_span_of_the_trace_or_none(text, expected):
    """Whatever a request brings along, it is read without an error."""
    assert span_below(OURS, text) == expected


def served(step: int, number: int, ranks: tuple[int, ...] = (0, 1)) -> Column:
    """Return *number* pushes and pulls in *step* for each of *ranks*."""
    rows = empty_rows(len(ranks) * number)
    rows["step"], rows["level"], rows["b"] = step, Level.PARTITION, ranks * number
    rows["span_no"] = np.arange(1, len(rows) + 1)
    return rows


def outgoing(gate: StepGate, rows: Column) -> list[tuple[int, int, int, int]]:
    """Return step, shard, spans and spans left out of what goes out of *rows* two seconds later."""
    gate.add(rows, np.zeros(len(rows), bool), 0.0)
    assert gate.due(SETTLE_S / 2) == []
    return [(out.step, out.shard, len(out.rows), out.left_out) for out in gate.due(SETTLE_S)]


def never(step: int) -> Column:
    """Read nothing again."""
    raise AssertionError(step)


def test_a_servers_spans_go_out_with_the_steps_that_do():
    """It has no steps of its own to wait for; what it did outside any step goes out as well."""
    gate = StepGate(SERVER, Window.parse("1-1"), 0, never)

    assert outgoing(gate, served(0, 3)) == [(0, 0, 0, 6)]
    assert outgoing(gate, served(1, 3)) == [(1, 0, 6, 0)]
    assert outgoing(gate, served(NO_STEP, 3)) == [(NO_STEP, 0, 6, 0)]
    assert gate.undecided_from() == NO_STEP


def test_a_servers_spans_keep_to_the_budget_and_to_the_ranks_they_are_for():
    """They are in the rank's shard, when it has its turn; a step's limit holds over all that goes out of it."""
    bind, ranks = replace(SERVER, world_size=40, servers=4), (0, 39)
    seen = set()
    for step in range(200):
        shares = [share_of(rank, 40, 4, 800, step) for rank in ranks]
        gate = StepGate(bind, Window.parse("all"), 800, never)
        out = [part for _ in range(2) for part in outgoing(gate, served(step, 20, ranks))]
        assert sum(spans for _, _, spans, _ in out) == sum(share.limit // 4 // 4 for share in shares if share.full)
        assert sum(spans + left_out for _, _, spans, left_out in out) == 80
        assert [shard for _, shard, _, _ in out] == [0, 1, 0, 1]
        seen.add(tuple(share.full for share in shares))
    assert seen == {(False, False), (True, False), (False, True)}

"""Our requests say the same as the official exporter's, span by span and byte by byte once decoded."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext
from opentelemetry.trace.status import Status, StatusCode

from otel_dltrace._version import __version__
from otel_dltrace.export.otlp import merge
from otel_dltrace.export.otlp.merge import Merger
from otel_dltrace.export.otlp.requests import Part, encode_together
from otel_dltrace.export.rundir.traces import trace_id_column
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import OTHER, Descriptor
from otel_dltrace.model.spans import Process, SpanBatch, empty_rows, stack_rows
from otel_dltrace.model.time import Anchor
from tests.support.processes import requests_of
from tests.support.random_spans import BIND, WALL, batches, normal, resources, u32

SOURCES = ("host_done", "host_issue", "device", "recorder", "bound")


# -- the same spans, read row by row as the contract says, for the official exporter -------------


def contract_hash(tag, *fields):
    """H of contract 1."""
    texts = [str(field).encode("utf-8", "replace") for field in (tag, *fields)]
    return hashlib.sha256(b"otel_dltrace.1" + b"".join(len(t).to_bytes(4, "little") + t for t in texts)).digest()


def clean(text):
    return text.encode("utf-8", "replace").decode()


def signed(number):
    return number - (1 << 64) if number >> 63 else number


def operation_id(bind, d, r):
    if bind is None or d.kind not in ("collective", "p2p") or not r["seq"]:
        return None
    if d.kind == "p2p":
        sends = d.name.lstrip("i").startswith("send")
        ends = (bind.rank, r["a"]) if sends else (r["a"], bind.rank)
        fields = ("p2p", bind.job, bind.generation, bind.world, d.group, *ends, r["b"], r["seq"])
    else:
        name = "" if d.backend in ("gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "fake") else d.tensor
        fields = ("coll", bind.job, bind.generation, bind.world, "collective", d.group, name, r["seq"])
    return contract_hash(*fields)[:8].hex()


def read_attributes(d, r, error_type, operation, left_out):
    """What contract 2's table says of one record, as (name, value, whether it is said)."""
    step, stage, phase = d.kind == "step", d.kind == "stage", d.kind == "phase"
    collective, p2p = d.kind == "collective", d.kind == "p2p"
    comm, size = collective or p2p, signed(r["size"])
    said = [
        ("dl.step", r["step"], r["step"] != 0xFFFF_FFFF),
        ("dl.step.user", size, step and r["size"] != 0xFFFF_FFFF_FFFF_FFFF),
        ("dl.batch_size", r["a"], step and r["a"] > 0),
        ("dl.epoch", r["b"], step and r["b"] >= 0),
        ("dl.spans.left_out", left_out, left_out > 0),
        ("dl.phase", clean(d.name), stage),
        ("dl.stage.count", r["a"], stage),
        ("dl.stage.total", size, stage),
        ("dl.comm.operation", clean(d.name), comm),
        ("dl.comm.async", bool(r["flags"] & 1), comm),
        ("dl.comm.seq", r["seq"], comm and r["seq"] > 0),
        ("dl.comm.size", size, (comm and size >= 0) or (phase and size > 0)),
        ("dl.comm.root", r["b"], collective and r["b"] >= 0),
        ("dl.comm.peer.rank", r["a"], (p2p or d.kind == "tick") and r["a"] >= 0),
        ("dl.comm.tag", r["b"], p2p and r["b"] >= 0),
        ("dl.comm.collective_id", operation, operation is not None),
        ("dl.queue.wait", r["a"], (collective or phase) and r["a"] > 0),
        ("dl.key", d.key * 65536 + r["partition"], (phase or collective) and d.key >= 0),
        ("dl.partition", r["partition"], r["level"] == 4),
        ("dl.comm.backend", clean(d.backend), d.backend),
        ("dl.comm.group.id", clean(d.group), d.group),
        ("dl.comm.group.size", d.group_size, d.group_size),
        ("dl.comm.dtype", clean(d.dtype), d.dtype),
        ("dl.tensor.name", clean(d.tensor), d.tensor),
        ("dl.queue.type", clean(d.queue_type), d.queue_type),
        ("dl.activity", clean(d.activity), d.activity),
        ("error.type", clean(error_type), error_type),
        ("dl.time.source", SOURCES[min(r["source"], 4)], not (step or (stage and r["source"] != 2))),
        ("dl.time.residual", r["b"], stage and r["source"] == 2),
        ("cpython.gc.generation", r["b"], phase and d.name == "gc"),
        ("dl.span.truncated", True, r["flags"] & 4),
    ]
    return {name: value for name, value, is_said in said if is_said}


def sdk_span(batch, row, trace_id, resource, left_out):
    r = {name: batch.rows[name][row].item() for name in batch.rows.dtype.names}
    d = batch.descriptors[r["descriptor"]] if r["descriptor"] < len(batch.descriptors) else OTHER
    error_type, message = batch.errors[r["error"]]
    trace = int.from_bytes(trace_id, "big")
    remote = (d.kind, d.name) == ("step", "rank.step")
    is_linked = batch.process.resource and (d.kind, d.name) == ("step", "train.step")
    failed = r["error"] > 0 or r["flags"] & 2
    wall = batch.process.anchor.wall - batch.process.anchor.monotonic
    return ReadableSpan(
        name=clean(d.name),
        context=SpanContext(trace, r["span_id"], is_remote=False),
        parent=SpanContext(trace, r["parent_id"], is_remote=remote) if r["parent_id"] else None,
        resource=resource,
        attributes=read_attributes(d, r, error_type, operation_id(batch.process.bind, d, r), left_out),
        status=Status(StatusCode.ERROR, clean(message)) if failed else Status(),
        start_time=r["start"] + wall,
        end_time=r["end"] + wall,
        instrumentation_scope=InstrumentationScope("otel_dltrace", __version__),
        links=[Link(SpanContext(0xABC, 0xDEF, is_remote=True))] if is_linked else (),
    )


# -- random batches ------------------------------------------------------------------------------


@settings(max_examples=300)
@given(batches(), resources, st.binary(min_size=16, max_size=16), st.booleans(), st.data())
def test_a_request_says_what_the_official_exporter_says(batch, resource, trace, with_left_out, data):
    """Whatever is in a batch, our bytes decode to the official exporter's request for the same spans."""
    n = len(batch)
    traces = np.frombuffer(bytes(b ^ i for i in range(n) for b in trace), np.uint8).reshape(n, 16)
    counts = data.draw(st.lists(u32, min_size=n, max_size=n)) if with_left_out else [0] * n
    left_out = np.array(counts, np.uint32) if with_left_out else None

    (ours,) = requests_of(batch, traces, resource, left_out)

    sdk_resource = Resource({k: clean(v) if isinstance(v, str) else v for k, v in resource.items()})
    spans = [sdk_span(batch, i, traces[i].tobytes(), sdk_resource, counts[i]) for i in range(n)]
    expected = normal(encode_spans(spans))
    decoded = normal(ExportTraceServiceRequest.FromString(ours.body))
    assert (ours.spans, decoded) == (n, expected)
    # No field that the decoder does not know, and none said twice.
    assert decoded.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


@settings(max_examples=100)
@given(st.lists(batches(), min_size=2, max_size=3), resources, st.integers(100, 3000))
def test_processes_encoded_together_say_what_each_says_alone(parts, resource, limit):
    """Different tables, errors, clocks and jobs: each process's spans stand under its own resource, in any request."""
    parts = [replace(batch, process=replace(batch.process, nonce=i)) for i, batch in enumerate(parts)]
    together = [Part(b, trace_id_column(b, BIND, i), {**resource, "part": i}) for i, b in enumerate(parts)]
    alone = [requests_of(part.batch, part.trace_ids, part.resource)[0] for part in together]

    requests = encode_together(together, stack_rows(batch.rows for batch in parts), Merger(), limit)

    said: dict[int, list] = {i: [] for i in range(len(parts))}
    for request in requests:
        decoded = ExportTraceServiceRequest.FromString(request.body).resource_spans
        assert [part_of(spans) for spans in decoded] == list(request.parts)
        for spans in decoded:
            said[part_of(spans)] += spans.scope_spans[0].spans
    expected = [ExportTraceServiceRequest.FromString(r.body).resource_spans[0].scope_spans[0].spans for r in alone]
    assert [sorted_spans(spans) for spans in said.values()] == [sorted_spans(spans) for spans in expected]
    assert sum(request.spans for request in requests) == sum(map(len, parts))


def part_of(resource_spans):
    return {pair.key: pair.value.int_value for pair in resource_spans.resource.attributes}["part"]


def sorted_spans(spans):
    return sorted(span.SerializeToString(deterministic=True) for span in spans)


# -- requests ------------------------------------------------------------------------------------

PUSH = Descriptor("phase", "PUSH", tensor="gradient_7", queue_type="PUSH")
ALL_REDUCE = Descriptor("collective", "all_reduce", group="0", group_size=8, backend="gloo", dtype="float32")
GIANT = Descriptor("phase", "PULL", tensor="g" * 4096)


def batch_of(which, table=(PUSH, ALL_REDUCE, GIANT)):
    rows = empty_rows(len(which))
    rows["descriptor"] = which
    rows["span_id"] = np.arange(len(which)) + 1
    rows["parent_id"] = 9
    rows["size"] = np.arange(len(which)) * 1000
    rows["seq"] = np.arange(len(which)) + 1
    rows["step"] = 1000
    return SpanBatch(rows, table, Process(1, BIND, anchor=Anchor(0, WALL, 1)))


def spans_of(request):
    (resource_spans,) = ExportTraceServiceRequest.FromString(request.body).resource_spans
    (scope_spans,) = resource_spans.scope_spans
    return [int.from_bytes(span.span_id, "big") for span in scope_spans.spans]


@pytest.mark.parametrize("limit", [4000, 2500, 700, 0])
def test_requests_are_split_at_the_limit(limit):
    """Every span goes out exactly once, in requests within the limit; one that alone is longer goes alone."""
    batch = batch_of([0, 1] * 100 + [2, 0, 2])
    requests = requests_of(batch, trace_id_column(batch, BIND), {"service.name": "job"}, limit=limit)

    sent = [spans_of(request) for request in requests]
    assert sorted(span for ids in sent for span in ids) == list(range(1, 204))
    assert [request.spans for request in requests] == [len(ids) for ids in sent]
    assert [
        ids for request, ids in zip(requests, sent, strict=True) if len(request.body) > limit and len(ids) > 1
    ] == []


def test_a_request_is_filled_up_to_the_limit():
    """Spans of one length are sent in as few requests as can be."""
    batch = batch_of([0] * 1000)
    requests = requests_of(batch, trace_id_column(batch, BIND), {}, limit=20_000)

    length = len(requests[0].body) / requests[0].spans
    assert all(20_000 - length <= len(request.body) <= 20_000 for request in requests[:-1])


def test_no_spans_are_no_request():
    """An empty batch sends nothing."""
    batch = batch_of([])
    assert requests_of(batch, trace_id_column(batch, BIND), {}) == []


def test_a_span_takes_about_200_bytes():
    """Padding costs little: 100,000 phases of a push take about 200 bytes each."""
    batch = batch_of([0] * 100_000)
    requests = requests_of(batch, trace_id_column(batch, BIND), {})

    assert sum(request.spans for request in requests) == 100_000
    assert 150 < sum(len(request.body) for request in requests) / 100_000 < 230


# -- traces --------------------------------------------------------------------------------------


def contract_trace(part, shard=0):
    data = bytearray(contract_hash("trace", BIND.job, BIND.generation, BIND.world, shard, part)[:16])
    data[0] |= 0x80
    return bytes(data)


def test_the_spans_of_a_step_share_its_trace():
    """The trace of a row is that of its step, in the shard that is asked for."""
    batch = batch_of([0, 1, 0])
    batch.rows["step"] = [7, 0, 7]

    column = trace_id_column(batch, BIND, shard=2)

    assert [row.tobytes() for row in column] == [contract_trace(step, 2) for step in (7, 0, 7)]


def test_outside_steps_a_trace_holds_a_thousand_operations():
    """A program without steps is cut by its operations; what is below one goes with it, however deep."""
    batch = batch_of([1, 1, 0, 0, 0, 1, 0])
    batch.rows["step"] = [*[NO_STEP] * 6, 4]
    batch.rows["seq"] = [999, 1000, 5, 6, 7, 2500, 8]
    batch.rows["span_id"] = [10, 11, 12, 13, 14, 15, 16]
    batch.rows["parent_id"] = [0, 0, 13, 11, 99, 10, 11]  # 12 below 13 below 11; 14's parent is elsewhere

    column = trace_id_column(batch, BIND)

    parts = ["ops.0", "ops.1", "ops.1", "ops.1", "ops.0", "ops.2", 4]
    assert [row.tobytes() for row in column] == [contract_trace(part) for part in parts]


def test_descriptors_of_processes_that_are_gone_are_forgotten(monkeypatch):
    """A drain that serves for years keeps no more of them than one process may have, and mixes none up."""
    monkeypatch.setattr(merge, "MAX_DESCRIPTORS", 3)
    merger, seen = Merger(), []
    for number in range(4):
        table = [OTHER, *(Descriptor("phase", f"{number}.{n}") for n in range(2))]
        rows = empty_rows(2)
        rows["descriptor"] = [2, 1]
        merged = merger.merge([SpanBatch(rows, table, Process(1, None))], rows.copy())
        seen.append(([merged.descriptor_of(row).name for row in range(2)], len(merged.table) <= 5))

    assert seen == [([f"{number}.1", f"{number}.0"], True) for number in range(4)]

"""The SDK bridge: any SpanExporter gets our spans, and they say what our OTLP requests say."""

import io
import json
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import ConsoleSpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from otel_dltrace._version import __version__
from otel_dltrace.export.rundir.traces import trace_id_column
from otel_dltrace.export.sdk import readable_spans
from otel_dltrace.model.attributes import resource_attributes
from tests.support.processes import requests_of
from tests.support.random_spans import batches, texts, u32
from tests.support.runs import Rank

IS_REMOTE = 0x200


# -- the same whole value, read from both sides ----------------------------------------------------


def typed(values):
    """True and 1 are equal, but not the same attribute."""
    return {name: (type(value), value) for name, value in values.items()}


def read_attributes(attributes):
    assert len({a.key for a in attributes}) == len(attributes)
    return typed({a.key: getattr(a.value, a.value.WhichOneof("value")) for a in attributes})


def said_by_otlp(body):
    """What a request says, by span id."""
    (resource_spans,) = ExportTraceServiceRequest.FromString(body).resource_spans
    (scope_spans,) = resource_spans.scope_spans
    return {
        int.from_bytes(span.span_id, "big"): {
            "name": span.name,
            "trace": int.from_bytes(span.trace_id, "big"),
            "parent": (int.from_bytes(span.parent_span_id, "big"), bool(span.flags & IS_REMOTE))
            if span.parent_span_id
            else None,
            "kind": span.kind,
            "times": (span.start_time_unix_nano, span.end_time_unix_nano),
            "attributes": read_attributes(span.attributes),
            "status": (span.status.code, span.status.message),
            "events": list(span.events),
            "links": [
                (
                    int.from_bytes(link.trace_id, "big"),
                    int.from_bytes(link.span_id, "big"),
                    bool(link.flags & IS_REMOTE),
                )
                for link in span.links
            ],
            "resource": read_attributes(resource_spans.resource.attributes),
            "scope": (scope_spans.scope.name, scope_spans.scope.version),
        }
        for span in scope_spans.spans
    }


def said_by_sdk(spans):
    """What the SDK's objects say, by span id."""
    return {
        span.context.span_id: {
            "name": span.name,
            "trace": span.context.trace_id,
            "parent": (span.parent.span_id, span.parent.is_remote) if span.parent else None,
            "kind": span.kind.value + 1,  # in protobuf 0 is for unspecified
            "times": (span.start_time, span.end_time),
            "attributes": typed(span.attributes),
            "status": (span.status.status_code.value, span.status.description or ""),
            "events": list(span.events),
            "links": [(link.context.trace_id, link.context.span_id, link.context.is_remote) for link in span.links],
            "resource": typed(span.resource.attributes),
            "scope": (span.instrumentation_scope.name, span.instrumentation_scope.version),
        }
        for span in spans
    }


resources = st.dictionaries(texts.filter(bool), texts, max_size=3)


@settings(max_examples=100)
@given(batches(), resources, st.binary(min_size=16, max_size=16), st.booleans(), st.data())
def test_the_sdk_objects_say_what_our_requests_say(batch, resource, trace, with_left_out, data):
    """Whatever is in a batch: ids, times, attributes with their types, status, resource and scope are the same."""
    n = len(batch)
    process = replace(batch.process, resource=(*batch.process.resource, *resource.items()))
    batch = replace(batch, process=process)
    traces = np.frombuffer(bytes(b ^ i for i in range(n) for b in trace), np.uint8).reshape(n, 16)
    left_out = np.array(data.draw(st.lists(u32, min_size=n, max_size=n)), np.uint32) if with_left_out else None

    (request,) = requests_of(batch, traces, resource_attributes(process), left_out)
    spans = readable_spans(batch, traces, left_out)

    assert said_by_sdk(spans) == said_by_otlp(request.body)


# -- exporters of the SDK --------------------------------------------------------------------------


def a_step():
    """One step of rank 1: the step, a stage, a collective."""
    rank = Rank(1, 2).step(7, 0.0, 10.0, seq=1, a=32).stage(7, "forward", 0.0, 4.0)
    return rank.collective(7, 5.0, 6.0, 2, dtype="float32").batch()


def exported(batch):
    return readable_spans(batch, trace_id_column(batch, batch.process.bind))


def test_the_in_memory_exporter_holds_the_spans():
    """Names, parents and sampling: what a test of somebody's own exporter would look at."""
    exporter = InMemorySpanExporter()
    exporter.export(exported(a_step()))

    step, stage, collective = exporter.get_finished_spans()
    assert [span.name for span in (step, stage, collective)] == ["rank.step", "forward", "all_reduce"]
    assert stage.parent.span_id == collective.parent.span_id == step.context.span_id
    assert len({span.context.trace_id for span in (step, stage, collective)}) == 1
    assert all(span.context.is_valid and span.context.trace_flags.sampled for span in (step, stage, collective))
    assert step.resource is collective.resource


def test_the_console_exporter_prints_the_spans():
    """Each is a JSON object with everything in it."""
    out = io.StringIO()
    ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\n").export(exported(a_step()))

    step, stage, collective = map(json.loads, out.getvalue().splitlines())
    assert step["attributes"] == {"dl.step": 7, "dl.step.user": 0, "dl.batch_size": 32}
    assert stage["parent_id"] == step["context"]["span_id"]
    assert collective["attributes"]["dl.comm.size"] == 1024
    assert collective["resource"]["attributes"]["dl.rank"] == 1
    assert collective["kind"] == "SpanKind.INTERNAL"


def test_no_spans_are_no_objects():
    """An empty batch is an empty list; the scope is ours."""
    batch = a_step()
    assert exported(batch.take(slice(0, 0))) == []
    assert exported(batch)[0].instrumentation_scope.version == __version__

"""Requests, settings and ways over which OTLP goes, as the tests of it make them."""

import time
from contextlib import contextmanager

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, TracesData
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus

from otel_dltrace.export.otlp.outcome import Outcome, Verdict
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.otlp.transport import connect

PROTOCOLS = ("grpc", "http/protobuf")
SERVER_FILES = {"cert_file": "server", "key_file": "server_key", "client_ca_file": "authority"}
ACCEPTED = Outcome(Verdict.ACCEPTED)


def settings_for(endpoint, protocol="http/protobuf", **more):
    """Return the settings that a user's environment would give."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    settings = OtlpSettings.from_env(env | {f"OTEL_EXPORTER_OTLP_{name}": value for name, value in more.items()})
    assert settings is not None
    return settings


def endpoint_of(server, protocol):
    return server.grpc if protocol == "grpc" else server.http


@contextmanager
def connected(settings):
    transport = connect(settings)
    try:
        yield transport
    finally:
        transport.close()


def attribute(key, **value):
    return KeyValue(key=key, value=AnyValue(**value))


def request_of(*span_ids, trace=1 << 127):
    """Return a request with one span for each id; every field is set, attributes in alphabetic order."""
    now = time.time_ns()
    spans = [
        Span(
            trace_id=trace.to_bytes(16, "big"),
            span_id=number.to_bytes(8, "big"),
            parent_span_id=span_ids[0].to_bytes(8, "big") if number != span_ids[0] else b"",
            flags=1,
            trace_state="vendor=value",
            name="all_reduce",
            kind=Span.SPAN_KIND_INTERNAL,
            start_time_unix_nano=now + number,
            end_time_unix_nano=now + number + 1234,
            attributes=[
                attribute("dl.comm.async", bool_value=True),
                attribute("dl.comm.size", int_value=1 << 40),
                attribute("dl.loss", double_value=0.5),
                attribute("dl.ranks", array_value=ArrayValue(values=[AnyValue(int_value=n) for n in (3, 1, 2)])),
                attribute("dl.tensor.name", string_value="layer1.weight \u00e4"),
            ],
            events=[Span.Event(time_unix_nano=now, name="wait", attributes=[attribute("n", int_value=-1)])],
            links=[Span.Link(trace_id=b"\x81" * 16, span_id=b"\x02" * 8)],
            status=SpanStatus(code=SpanStatus.STATUS_CODE_ERROR, message="peer gone"),
        )
        for number in span_ids
    ]
    resource = Resource(attributes=[attribute("dl.rank", int_value=3), attribute("service.name", string_value="job")])
    scope = InstrumentationScope(name="otel_dltrace.torch", version="0.1.0")
    return ExportTraceServiceRequest(
        resource_spans=[ResourceSpans(resource=resource, scope_spans=[ScopeSpans(scope=scope, spans=spans)])]
    )


def body_of(*span_ids):
    return request_of(*span_ids).SerializeToString()


def traces_with(data, span_id):
    """Return the part of *data* that arrived together with *span_id*."""
    whole = [r for r in data.resource_spans if span_id in {s.span_id for scope in r.scope_spans for s in scope.spans}]
    return TracesData(resource_spans=whole)


def ids(spans):
    return {int.from_bytes(span.span_id, "big") for span in spans}

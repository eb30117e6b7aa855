"""The SDK bridge: rows as the ReadableSpan objects that any OpenTelemetry SpanExporter takes."""

from functools import lru_cache

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, TraceFlags
from opentelemetry.trace.status import Status, StatusCode

from otel_dltrace._version import __version__
from otel_dltrace.export.plain_spans import PlainSpan, clean_values, plain_spans
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.attributes import resource_attributes
from otel_dltrace.model.spans import Process, SpanBatch

_SCOPE = InstrumentationScope("otel_dltrace", __version__)
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_UNSET = Status()


def readable_spans(batch: SpanBatch, trace_ids: Column, left_out: Column | None = None) -> list[ReadableSpan]:
    """Return the spans of *batch* as the SDK's own objects, in the order of its rows.

    Args:
        batch: The spans; those of one process share one resource object.
        trace_ids: For each row its trace's id, shape (n, 16), uint8.
        left_out: For each row, how many spans of its rank's step were left out (0: says nothing).
    """
    resource = _resource(batch.process)
    return [_readable(span, resource) for span in plain_spans(batch, trace_ids, left_out)]


@lru_cache(maxsize=256)
def _resource(process: Process) -> Resource:
    return Resource(clean_values(dict(resource_attributes(process))))


def _readable(span: PlainSpan, resource: Resource) -> ReadableSpan:
    constant = span.constant
    trace = int.from_bytes(span.trace_id, "big")
    parent = SpanContext(trace, span.parent_id, constant.under_root, _SAMPLED) if span.parent_id else None
    return ReadableSpan(
        name=constant.name,
        context=SpanContext(trace, span.span_id, is_remote=False, trace_flags=_SAMPLED),
        parent=parent,
        resource=resource,
        attributes={**constant.attributes, **span.own},
        status=Status(StatusCode.ERROR, constant.message) if constant.failed else _UNSET,
        start_time=span.start,
        end_time=span.end,
        links=[Link(SpanContext(*span.launcher, is_remote=True, trace_flags=_SAMPLED))] if span.launcher else (),
        instrumentation_scope=_SCOPE,
    )

"""What is sent over OTLP: a span of each kind, and the type of each of its attributes."""

from collections.abc import Mapping

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue

from otel_dltrace.export.rundir.traces import trace_id_column
from otel_dltrace.model import semconv as s
from otel_dltrace.model.attributes import resource_attributes
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import Flag, Level
from otel_dltrace.model.spans import Process, SpanBatch, empty_rows
from tests.support.processes import requests_of

TYPES = {"string_value": "string", "int_value": "int", "bool_value": "bool", "double_value": "float"}
BIND = Bind("job-7", "2.00ff", rank=3, world_size=8)


def everything() -> SpanBatch:
    """Return a span of each kind, every field of its record set."""
    kinds = (s.STEP, s.STAGE, s.COLLECTIVE, s.P2P, s.PHASE, s.TICK)
    constant = {"group": "0", "group_size": 8, "backend": "gloo", "tensor": "fc", "key": 7, "dtype": "float32"}
    table = [Descriptor(kind, "isend", **constant, queue_type="PUSH", activity="QUEUE") for kind in kinds]
    rows = empty_rows(len(kinds))
    rows["descriptor"] = np.arange(len(kinds))
    rows["step"], rows["size"], rows["a"], rows["b"], rows["seq"], rows["error"] = 120, 4096, 1, 1, 9, 1
    rows["level"], rows["flags"], rows["span_id"] = Level.PARTITION, Flag.TRUNCATED, 1 + np.arange(len(kinds))
    return SpanBatch(rows, table, Process(5, BIND, "node-0", "boot-0"), (("", ""), ("RuntimeError", "lost")))


def sent_types() -> dict[str, str]:
    """Return the type of each attribute as OTLP carries it, by its name with its scope."""
    batch = everything()
    (encoded,) = requests_of(
        batch, trace_id_column(batch, BIND), resource_attributes(batch.process), np.full(len(batch), 3)
    )
    (resource_spans,) = ExportTraceServiceRequest.FromString(encoded.body).resource_spans
    spans = resource_spans.scope_spans[0].spans
    return {
        **_types("resource", resource_spans.resource.attributes),
        **{name: kind for span in spans for name, kind in _types("span", span.attributes).items()},
    }


def _types(scope: str, attributes: "list[KeyValue]") -> Mapping[str, str]:
    return {f"{scope}.{a.key}": TYPES[a.value.WhichOneof("value")] for a in attributes}


SENT = sent_types()

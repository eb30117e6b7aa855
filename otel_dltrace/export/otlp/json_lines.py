"""OTLP as JSON lines, as the Collector's file exporter writes them and its otlp_json_file receiver reads them.

A line is one ExportTraceServiceRequest: ids in hexadecimal, 64-bit integers as strings, names in camelCase.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path

from otel_dltrace._version import __version__
from otel_dltrace.export.files import open_whole
from otel_dltrace.export.plain_spans import (
    HAS_IS_REMOTE,
    INTERNAL,
    IS_REMOTE,
    STATUS_ERROR,
    Constant,
    PlainSpan,
    plain_spans,
)
from otel_dltrace.export.rundir.traces import trace_id_column
from otel_dltrace.model.attributes import Launcher, Value, resource_attributes
from otel_dltrace.model.operation import MAX_DESCRIPTORS
from otel_dltrace.model.spans import Process, SpanBatch
from otel_dltrace.model.text import clean

LIMIT = 1_000_000
"""Bytes of a line: the receiver cuts those above 1 MiB."""
_AT_ONCE = 10_000
_END = "]}]}]}\n"


def write_otlp_json(batches: Iterable[SpanBatch], path: Path, progress: Callable[[int], None]) -> int:
    """Write *batches* to *path*, gzipped if it ends in ``.gz``; return the number of spans.

    Batches are written as they come, each forgotten before the next is asked for. The file appears
    when it is complete, or not at all.

    Args:
        batches: The spans, each batch of one process that belongs to a job.
        path: The file; its folder exists.
        progress: Called with the number of spans done since its last call.
    """
    total = 0
    with open_whole(path) as out:
        for batch in batches:
            for line, spans in json_lines(batch):
                out.write(line.encode())
                total += spans
                progress(spans)
    return total


def json_lines(batch: SpanBatch, limit: int = LIMIT) -> Iterator[tuple[str, int]]:
    """Yield the spans of *batch* as lines of at most *limit* bytes, each with the number of its spans.

    A span that alone is longer is alone in its line.
    """
    head = _head(batch.process)
    spans: list[str] = []
    length = room = limit - len(head) - len(_END)
    for span in _spans(batch):
        if spans and len(span) + 1 > room:
            yield head + ",".join(spans) + _END, len(spans)
            spans, room = [], length
        spans.append(span)
        room -= len(span) + 1
    if spans:
        yield head + ",".join(spans) + _END, len(spans)


def _spans(batch: SpanBatch) -> Iterator[str]:
    assert batch.process.bind is not None
    trace_ids = trace_id_column(batch, batch.process.bind)
    for at in range(0, len(batch), _AT_ONCE):
        which = slice(at, at + _AT_ONCE)
        yield from map(_span, plain_spans(batch.take(which), trace_ids[which]))


@lru_cache(maxsize=16)
def _head(process: Process) -> str:
    attributes = _attributes(dict(resource_attributes(process)))
    scope = json.dumps({"name": "otel_dltrace", "version": __version__})
    return f'{{"resourceSpans":[{{"resource":{{"attributes":[{attributes}]}},"scopeSpans":[{{"scope":{scope},"spans":['


def _span(span: PlainSpan) -> str:
    constant, own = _constant(span.constant), _attributes(span.own)
    parent = f'"parentSpanId":"{span.parent_id:016x}",' if span.parent_id else ""
    flags = HAS_IS_REMOTE | (IS_REMOTE if parent and span.constant.under_root else 0)
    attributes = ",".join(filter(None, (own, constant[1])))
    return (
        f'{{"traceId":"{span.trace_id.hex()}","spanId":"{span.span_id:016x}",{parent}"flags":{flags},{constant[0]},'
        f'"startTimeUnixNano":"{span.start}","endTimeUnixNano":"{span.end}","attributes":[{attributes}]'
        f"{_links(span.launcher)}}}"
    )


def _links(launcher: Launcher | None) -> str:
    if launcher is None:
        return ""
    ids = f'"traceId":"{launcher.trace_id:032x}","spanId":"{launcher.span_id:016x}"'
    return f',"links":[{{{ids},"flags":{HAS_IS_REMOTE | IS_REMOTE}}}]'


@lru_cache(maxsize=MAX_DESCRIPTORS)
def _constant(constant: Constant) -> tuple[str, str]:
    """Return name, kind and status of spans, and the attributes that all of them have."""
    status = {"message": constant.message, "code": STATUS_ERROR} if constant.failed else {}
    fields = json.dumps({"name": constant.name, "kind": INTERNAL, "status": status})
    return fields[1:-1], _attributes(constant.attributes)


def _attributes(values: dict[str, Value]) -> str:
    return ",".join([f"{_key(name)}{_any_value(value)}}}" for name, value in values.items()])


@lru_cache(maxsize=1024)
def _key(name: str) -> str:
    return f'{{"key":{json.dumps(clean(name))},"value":'


def _any_value(value: Value) -> str:
    if isinstance(value, bool):
        return '{"boolValue":true}' if value else '{"boolValue":false}'
    if isinstance(value, int):
        return f'{{"intValue":"{value}"}}'
    return f'{{"stringValue":{json.dumps(clean(value))}}}'

"""The text of one span of the OpenTelemetry SDK in a Chrome trace: a slice, and a moment for each of its events."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from otel_dltrace.export.chrome.arrows import Line
from otel_dltrace.export.chrome.lanes import OPERATIONS, PHASES, STAGES, STEPS
from otel_dltrace.export.chrome.marks import CLAMPED, SPAN_ID, colour_of, microseconds
from otel_dltrace.model import semconv as s
from otel_dltrace.record.guard import guarded

TRACE_ID, PARENT_ID, STATUS, LINKS = "trace_id", "parent_id", "status", "links"
_KIND_COLOURS = {
    SpanKind.INTERNAL: "generic_work",
    SpanKind.SERVER: "rail_response",
    SpanKind.CLIENT: "rail_load",
    SpanKind.PRODUCER: "rail_animation",
    SpanKind.CONSUMER: "rail_idle",
}
LATEST = 1 << 62
_HEAD = '{"ph":"%s",%s"pid":%d,"tid":%d,"ts":%d.%04d,'
_LONGEST = 1 << 63
_AS_THEY_ARE = (str, bool, type(None))
_text = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

Key = tuple[int, int]
"""Trace and span id."""


class Row(NamedTuple):
    """A span as it is laid out; times are ns after the trace's base."""

    start: int
    end: int
    family: int
    key: Key
    parent: Key | None
    span: ReadableSpan


@guarded
def slice_line(row: Row, pid: int, tid: int, stamp: tuple[int, int, int, int], cut: int) -> Line:
    """Return the slice of a span; *stamp* is begin and length as `microseconds` has them, *cut* the ns it lacks."""
    span, whole, part, length, rest = row.span, *stamp
    kind = span.kind
    ids = {SPAN_ID: f"{row.key[1]:016x}", TRACE_ID: f"{row.key[0]:032x}"}
    if row.parent is not None:
        ids[PARENT_ID] = f"{row.parent[1]:016x}"
    args: dict[str, Any] = {**ids, **_plain(span.attributes or {}), **ids}
    failed = span.status.status_code is StatusCode.ERROR
    if failed:
        args[STATUS] = f"ERROR {span.status.description or ''}".rstrip()
    if cut:
        args[CLAMPED] = cut
    if span.links:
        args[LINKS] = [f"{link.context.trace_id:032x}:{link.context.span_id:016x}" for link in span.links]
    about = {"name": str(span.name), "cat": kind.name.lower(), "cname": _colour(row, failed), "args": args}
    dur = f'"dur":{length}.{rest:04d},'
    return line(pid, tid, _HEAD % ("X", dur, pid, tid, whole, part) + _text(about)[1:])


def _colour(row: Row, failed: bool) -> str:
    kind = {STEPS: s.STEP, STAGES: s.STAGE, OPERATIONS: s.COLLECTIVE, PHASES: s.PHASE}.get(row.family, "")
    attributes = row.span.attributes or {}
    if kind or failed:
        return colour_of(kind, row.span.name, bool(attributes.get(s.DL_SPAN_TRUNCATED)), failed)
    return _KIND_COLOURS[row.span.kind]


def moments(span: ReadableSpan, pid: int, tid: int, base: int) -> Iterator[Line]:
    """Yield a span's events as moments on its lane."""
    for event in span.events or ():
        moment = _moment(event, pid, tid, base)
        if moment is not None:
            yield moment


@guarded
def _moment(event: Event, pid: int, tid: int, base: int) -> Line:
    at = min(max(0, int(event.timestamp) - base), LATEST)
    (whole,), (part,) = (column.tolist() for column in microseconds(np.array([at])))
    about = {"name": str(event.name), "cat": "event", "args": _plain(event.attributes or {})}
    return line(pid, tid, _HEAD % ("i", '"s":"t",', pid, tid, whole, part) + _text(about)[1:])


def _plain(value: Any) -> Any:
    """Return an attribute's value as JSON has it: no infinities, no numbers that a viewer cannot hold."""
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, int):
        return int(value) if abs(value) < _LONGEST else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(one) for one in value]
    return str(value)


def line(pid: int, tid: int, text: str) -> Line:
    """Return *text* as a line of that lane; a lone surrogate, which no viewer takes, becomes ``?``."""
    return Line(pid, tid, text.encode("utf-8", "replace"))

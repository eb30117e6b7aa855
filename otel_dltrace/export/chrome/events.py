"""From laid out spans to the lines of a Chrome trace, formatted in bulk; each line begins with a comma."""

import json
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from otel_dltrace.export.chrome.flows import FLOW_DTYPE
from otel_dltrace.export.chrome.layout import Layout
from otel_dltrace.export.chrome.marks import CLAMPED, SPAN_ID, colour_of, microseconds, quote
from otel_dltrace.export.chrome.tensors import is_stage
from otel_dltrace.export.chrome.text import Piece, choice, digits, hexadecimal, join, literal, zero_padded
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.attributes import Value, collective_ids, constant_attributes, number_columns
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch

CHUNK = 1 << 12
WIDEST = 1 << 25
"""Bytes that a matrix of text may take: rows with very long names come a few at a time."""
_NUMBERS = 300
"""Bytes of an event that its descriptor does not say, about."""
_STEP_MARK = ',\n{"ph":"i","s":"p","tid":%d,"ts":%d.%04d,"pid":%d,"name":"step %d","cat":"step","args":{"%s":%d}}'
_COUNTER = b',\n{"ph":"C","tid":0,'
_NO_FLOWS = np.zeros(0, FLOW_DTYPE)


class Chunk(NamedTuple):
    """The text of some rows, and what must be known of it.

    Attributes:
        text: The events; each begins with a comma.
        events: How many they are.
        flows: Where their collectives are drawn (``FLOW_DTYPE``).
        tids: The lanes that they are on, each once.
        first: Where the first begins, in ns after the trace's zero.
        last: Where the last ends.
    """

    text: bytes
    events: int
    flows: Column = _NO_FLOWS
    tids: Column = _NO_FLOWS["tid"]
    first: int = 0
    last: int = 0


def span_chunks(batch: SpanBatch, layout: Layout, pid: int, widest: int = WIDEST) -> Iterator[Chunk]:
    """Yield the events of *batch*, in the layout's order, some thousand at a time, of about *widest* bytes at most."""
    texts, which = _constants(batch, pid)
    lengths = np.array([len(text) + _NUMBERS for text in texts])[which] if texts else which
    for first in range(0, len(layout.order), CHUNK):
        for rows in _split(layout.order[first : first + CHUNK], lengths, widest):
            used, of_row = np.unique(which[rows], return_inverse=True)
            constant = choice([texts[i] for i in used.tolist()], of_row)
            yield _chunk(batch.take(rows), layout, rows, pid, constant)


def _split(rows: Column, lengths: Column, widest: int) -> Iterator[Column]:
    if len(rows) > 1 and len(rows) * int(lengths[rows].max()) > widest:
        half = len(rows) // 2
        yield from _split(rows[:half], lengths, widest)
        yield from _split(rows[half:], lengths, widest)
    else:
        yield rows


def _chunk(part: SpanBatch, layout: Layout, rows: Column, pid: int, constant: Column) -> Chunk:
    start, end, tid, cut = (column[rows] for column in (layout.start, layout.end, layout.tid, layout.cut))
    length, ticks, ids = end - start, layout.ticks[rows], collective_ids(part)
    spans = ~ticks if ticks.any() else None
    pieces: list[Piece] = [
        (choice([b',\n{"ph":"X","tid":', b',\n{"ph":"i","s":"t","tid":'], ticks.astype(np.intp)), None),
        (digits(tid), None),
        *_time(b',"ts":', start, None),
        *_time(b',"dur":', length, spans),
        (literal(b","), None),
        *_ready_name(part),
        (constant, None),
        (literal(b'"%s":"' % SPAN_ID.encode()), None),
        (hexadecimal(part["span_id"]), None),
        (literal(b'"'), None),
    ]
    for name, values, mask in number_columns(part):
        pieces += _number(name, values, mask)
    pieces += _quoted(s.DL_COMM_COLLECTIVE_ID, hexadecimal(ids), ids != 0)
    pieces += _number(CLAMPED, cut, cut > 0)
    pieces.append((literal(b"}}"), None))
    joined = (ids != 0) & (length > 0)
    flows = np.zeros(int(joined.sum()), FLOW_DTYPE)
    flows["id"], flows["ns"], flows["pid"], flows["tid"] = ids[joined], start[joined], pid, tid[joined]
    return Chunk(join(len(rows), pieces), len(rows), flows, np.unique(tid), int(start.min()), int(end.max()))


def _ready_name(part: SpanBatch) -> list[Piece]:
    """Return the names of Horovod's ready ticks, which tell the rank as they do in its own timeline."""
    mask = part.lookup(_is_ready, bool)
    if not mask.any():
        return []
    name = b'"name":"%s ' % h.READY.encode()
    return [(literal(name), mask), (digits(np.where(mask, part["a"], 0)), mask), (literal(b'",'), mask)]


def _is_ready(d: Descriptor) -> bool:
    return d.kind == s.TICK and d.name == h.READY and d.backend == h.BACKEND


def _time(key: bytes, ns: Column, mask: Column | None) -> list[Piece]:
    whole, part = microseconds(ns)
    blocks = (literal(key), digits(whole), literal(b"."), zero_padded(part, 4))
    return [(block, mask) for block in blocks]


def _number(name: str, values: Column, mask: Column) -> list[Piece]:
    if not mask.any():
        return []
    key, block = literal(f",{json.dumps(name)}:".encode()), digits(np.where(mask, values, 0))
    return [(key, None), (block, None)] if mask.all() else [(key, mask), (block, mask)]


def _quoted(name: str, block: Column, mask: Column) -> list[Piece]:
    if not mask.any():
        return []
    return [(literal(f",{json.dumps(name)}:".encode() + b'"'), mask), (block, mask), (literal(b'"'), mask)]


def counter_chunks(batch: SpanBatch, base: int, pid: int, widest: int = WIDEST) -> Iterator[Chunk]:
    """Yield the metrics of *batch* as counters, a track for each metric of the process; *widest* as for spans."""
    size = max(1, min(CHUNK, widest // _NUMBERS))
    rows = np.flatnonzero(batch.is_kind(s.METRIC))
    rows = rows[np.argsort(batch["start"][rows], kind="stable")]
    for first in range(0, len(rows), size):
        part = batch.take(rows[first : first + size])
        numbers, which = np.unique(part["descriptor"], return_inverse=True)
        names = [part.descriptors[number] for number in numbers.tolist()]
        start = part["start"] + np.int64(part.wall - base)
        pieces: list[Piece] = [
            (choice([_COUNTER + _counter_text(d, pid).encode() for d in names], which), None),
            *_time(b',"ts":', start, None),
            (choice([b',"args":{%s:' % quote(d.tensor or "value").encode() for d in names], which), None),
            (digits(part["size"].astype(np.int64)), None),
            (literal(b"}}"), None),
        ]
        yield Chunk(join(len(part), pieces), len(part))


def step_marks(batch: SpanBatch, layout: Layout, pid: int) -> Chunk:
    """Return a moment at the begin of each step, which viewers draw across all lanes of the process."""
    rows = np.flatnonzero(batch.is_rank_step & (batch["step"] != NO_STEP))
    columns = (layout.tid[rows], *microseconds(layout.start[rows]), batch["step"][rows])
    every = zip(*(column.tolist() for column in columns), strict=True)
    lines = [_STEP_MARK % (tid, whole, part, pid, step, s.DL_STEP, step) for tid, whole, part, step in every]
    return Chunk("".join(lines).encode(), len(lines), tids=np.unique(columns[0]))


def _counter_text(d: Descriptor, pid: int) -> str:
    return f'"pid":{pid},"name":{quote(d.name)},"cat":{quote(d.kind)}'


def _constants(batch: SpanBatch, pid: int) -> tuple[list[bytes], Column]:
    """Return the texts that depend on descriptor, source, flags and error alone, and which of them each row has."""
    rows = batch.rows
    key = rows["error"].astype(np.uint64) << np.uint64(43) | rows["descriptor"].astype(np.uint64) << np.uint64(11)
    key |= rows["source"].astype(np.uint64) << np.uint64(3) | (rows["flags"] & 7).astype(np.uint64)
    _, firsts, inverse = np.unique(key, return_index=True, return_inverse=True)
    texts = []
    for row in firsts.tolist():
        error, source = int(rows["error"][row]), min(int(rows["source"][row]), s.Source.BOUND)
        error_type = batch.errors[error][0] if error < len(batch.errors) else ""
        text = constant_text(batch.descriptor_of(row), source, int(rows["flags"][row]), error_type, pid)
        texts.append(text.encode())
    return texts, inverse


def constant_text(d: Descriptor, source: int, flags: int, error_type: str, pid: int) -> str:
    """Return process, name, category, colour and the constant attributes, as the middle of an event."""
    queue_type = d.queue_type if is_stage(d) else ""
    colour = colour_of(d.kind, d.name, bool(flags & s.Flag.TRUNCATED), bool(flags & s.Flag.ERROR), queue_type)
    attributes = constant_attributes(d, source, flags, error_type).items()
    args = "".join(f"{quote(name)}:{_value(value)}," for name, value in attributes)
    name = "" if _is_ready(d) else f'"name":{quote(d.name)},'
    return f'"pid":{pid},{name}"cat":{quote(d.kind)},"cname":"{colour}","args":{{{args}'


def _value(value: Value) -> str:
    return quote(value) if isinstance(value, str) else json.dumps(value)

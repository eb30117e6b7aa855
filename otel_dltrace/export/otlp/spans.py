"""Spans as protobuf bytes, made by numpy: a matrix for each shape of span.

What is constant about a span is encoded once and comes last; what varies has a fixed width (ids
and times by nature, integers as padded varints) and comes first. So all spans of one shape (which
variable parts there are, how long the constant part is) have every byte at the same place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from otel_dltrace.export.otlp.protobuf import (
    BYTES,
    FIXED32,
    FIXED64,
    VARINT,
    attribute,
    attributes,
    nested,
    put_varints,
    tag,
    text,
    varint,
    varint_width,
)
from otel_dltrace.export.plain_spans import HAS_IS_REMOTE, INTERNAL, IS_REMOTE, KNOWN_FLAGS, STATUS_ERROR
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, compact, distinct
from otel_dltrace.model.attributes import Launcher, constant_attributes, number_columns
from otel_dltrace.model.operation import MAX_DESCRIPTORS, Descriptor
from otel_dltrace.model.spans import SpanBatch

_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), "<u2")
_ALIGN = 8


# The parts of fixed width: field key and room for the value, which comes last, and the value's format.
_FIXED = {
    "trace_id": (nested(1, bytes(16)), "V16"),
    "span_id": (nested(2, bytes(8)), ">u8"),
    "parent_id": (nested(4, bytes(8)), ">u8"),
    "start": (tag(7, FIXED64) + bytes(8), "<u8"),
    "end": (tag(8, FIXED64) + bytes(8), "<u8"),
    s.DL_COMM_COLLECTIVE_ID: (attribute(9, s.DL_COMM_COLLECTIVE_ID, nested(1, bytes(16))), "V16"),
}


@dataclass(frozen=True)
class _Varying:
    """What varies from row to row; bit i of *present* says that the row carries *optional* i."""

    rows: Column
    trace_ids: Column
    optional: list[tuple[str, Column]]
    present: Column


def encode_spans(
    batch: SpanBatch,
    trace_ids: Column,
    collectives: Column,
    left_out: Column | None = None,
    launchers: Sequence[Launcher | None] = (None,),
    launcher: Column | None = None,
) -> Iterator[tuple[Column, Column]]:
    """Yield the spans of *batch*, shape by shape: which rows, in order, and a matrix (uint8; a row is a span, framed).

    Args:
        batch: The spans as `Merger` returns them: times are Unix ns, and every descriptor is in the table.
        trace_ids: For each row its trace's id, shape (n, 16), uint8.
        collectives: For each row the id of its operation, 0 for none.
        left_out: For each row, how many spans of its rank's step were left out (0: says nothing).
        launchers: Spans that rows link to.
        launcher: For each row which of these; by default each links to the first.
    """
    varying = _varying(batch, trace_ids, collectives, left_out)
    which, constants = _constants(batch, launchers, np.zeros(len(batch), np.uint8) if launcher is None else launcher)
    lengths, of_length = distinct(np.array([len(constant) for constant in constants]))
    masks, of_mask = distinct(varying.present)
    shapes, of_shape = compact(of_mask * len(lengths) + of_length[which], len(masks) * len(lengths))
    for shape, rows in zip(shapes.tolist(), _rows_of(of_shape, len(shapes)), strict=True):
        yield rows, _matrix(varying, int(masks[shape // len(lengths)]), rows, which[rows], constants)


def _rows_of(group: Column, groups: int) -> list[Column]:
    """Return for each group the rows in it."""
    if groups == 1:
        return [np.arange(len(group))]
    narrow = group.astype(np.uint16) if groups <= 1 << 16 else group  # numpy sorts these by radix
    ends = np.cumsum(np.bincount(group, minlength=groups))
    return np.split(np.argsort(narrow, kind="stable"), ends[:-1])


# -- what varies --------------------------------------------------------------------------------


def _varying(batch: SpanBatch, trace_ids: Column, collectives: Column, left_out: Column | None) -> _Varying:
    parents = batch["parent_id"]
    columns = [("parent_id", parents, parents != 0), (s.DL_COMM_COLLECTIVE_ID, collectives, collectives != 0)]
    columns += number_columns(batch, left_out)
    present = np.zeros(len(batch), np.uint32)
    for bit, (_, _, mask) in enumerate(columns):
        present |= mask.view(np.uint8) * np.uint32(1 << bit)
    ids = np.ascontiguousarray(trace_ids).view("V16")[:, 0]
    return _Varying(batch.rows, ids, [(name, values) for name, values, _ in columns], present)


def _matrix(varying: _Varying, present: int, rows: Column, which: Column, constants: list[bytes]) -> Column:
    """Return the spans of *rows*, all of one shape, shape (n, length)."""
    part = varying.rows.take(rows)  # once as a whole: column by column it is ten times as slow
    values = {"trace_id": varying.trace_ids.take(rows), **{name: part[name] for name in ("span_id", "start", "end")}}
    optional = [column for i, column in enumerate(varying.optional) if present >> i & 1]
    values |= {name: part[name] if name == "parent_id" else column.take(rows) for name, column in optional}
    used, of_row = compact(which, len(constants))
    parts = tuple((name, 0 if name in _FIXED else varint_width(values[name])) for name in values)
    head, dtype = _layout(parts, len(constants[used[0]]))
    templates = np.frombuffer(b"".join([head + constants[i] for i in used.tolist()]), np.uint8)
    matrix: Column = templates.reshape(len(used), -1).take(of_row, axis=0)  # three times as fast as an index
    spans = matrix.view(dtype)[:, 0]
    for name, column in values.items():
        if name not in _FIXED:
            put_varints(column, spans[name])
        elif name == s.DL_COMM_COLLECTIVE_ID:
            spans[name] = _hexadecimal(column)
        else:
            spans[name] = column
    return matrix


@lru_cache(maxsize=1024)
def _layout(parts: tuple[tuple[str, int], ...], constant: int) -> tuple[bytes, np.dtype[Any]]:
    """Return how a span begins that has *parts* (name, width of a varint) and *constant* more bytes, and its dtype."""
    pieces = [_FIXED[name] if name in _FIXED else _number(name, width) for name, width in parts]
    body = b"".join([template for template, _ in pieces])
    key = tag(2, BYTES) + varint(len(body) + constant)
    ends = np.cumsum([len(key)] + [len(template) for template, _ in pieces])[1:]
    formats = [np.dtype(form) for _, form in pieces]
    fields = {
        "names": [name for name, _ in parts],
        "formats": formats,
        "offsets": [int(end) - form.itemsize for end, form in zip(ends, formats, strict=True)],
        "itemsize": len(key) + len(body) + constant,
    }
    return key + body, np.dtype(fields)  # type: ignore[call-overload]  # numpy's stubs want literal keys


def _number(name: str, width: int) -> tuple[bytes, str]:
    return attribute(9, name, tag(3, VARINT) + bytes(width)), f"({width},)u1"


def _hexadecimal(ids: Column) -> Column:
    """Return *ids*, uint64 of shape (n,), as 16 digits each."""
    digits: Column = _HEX[ids.astype(">u8").view(np.uint8).reshape(-1, 8)]
    return digits.view("V16")[:, 0]


# -- what is constant ---------------------------------------------------------------------------


def _constants(batch: SpanBatch, launchers: Sequence[Launcher | None], launcher: Column) -> tuple[Column, list[bytes]]:
    """Return for each row which constant part it has, and these parts."""
    rows = batch.rows
    columns = (
        rows["descriptor"],
        np.minimum(rows["source"], s.Source.BOUND),
        rows["flags"] & np.uint16(KNOWN_FLAGS),
        # All ranks share the root, so to all but one it is another process's.
        batch.is_rank_step & (rows["parent_id"] != 0),
        launcher,
        rows["error"],
    )
    code = np.zeros(len(batch), np.int64)
    for column in columns:
        most = int(column.max())
        if most:
            code = code * (most + 1) + column
    kinds, which = distinct(code)
    sample = np.zeros(len(kinds), np.intp)
    sample[which] = np.arange(len(batch))  # any row will do: they agree in all columns
    samples = zip(*(column[sample].tolist() for column in columns), strict=True)
    return which, [
        _constant(batch.descriptors[d], source, flags, remote, launchers[link], error > 0, *batch.errors[error])
        for d, source, flags, remote, link, error in samples
    ]


@lru_cache(maxsize=MAX_DESCRIPTORS)
def _constant(
    d: Descriptor,
    source: int,
    flags: int,
    remote: bool,
    launcher: Launcher | None,
    has_error: bool,
    error_type: str,
    message: str,
) -> bytes:
    failed = nested(2, text(message)) + tag(3, VARINT) + varint(STATUS_ERROR)
    out = b"".join(
        (
            nested(5, text(d.name)),
            attributes(9, constant_attributes(d, source, flags, error_type)),
            _link(launcher) if launcher else b"",
            nested(15, failed if has_error or flags & s.Flag.ERROR else b""),
            tag(16, FIXED32) + (HAS_IS_REMOTE | (IS_REMOTE if remote else 0)).to_bytes(4, "little"),
            tag(6, VARINT),
        )
    )
    # The kind is padded, so that names of about the same length share a shape.
    return out + varint(INTERNAL, 1 + -(len(out) + 1) % _ALIGN)


def _link(launcher: Launcher) -> bytes:
    ids = nested(1, launcher.trace_id.to_bytes(16, "big")) + nested(2, launcher.span_id.to_bytes(8, "big"))
    return nested(13, ids + tag(6, FIXED32) + (HAS_IS_REMOTE | IS_REMOTE).to_bytes(4, "little"))

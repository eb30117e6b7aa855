"""From the ring's 64-byte records to rows, in bulk."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from otel_dltrace.model.spans import Column, empty_rows
from otel_dltrace.record.ring import AMEND, AMEND_ERROR, BEGIN, COUNTER, RECORD, SPAN

RECORD_DTYPE = np.dtype(
    [
        ("span_no", "<u4"),
        ("step", "<u4"),
        ("descriptor", "<u4"),
        ("kind", "u1"),
        ("level_source", "u1"),
        ("flags", "<u2"),
        ("start", "<u8"),
        ("end", "<u8"),
        ("size", "<u8"),
        ("parent_no", "<u4"),
        ("seq", "<u4"),
        ("a", "<i4"),
        ("b", "<i4"),
        ("partition", "<u2"),
        ("spare", "<u2"),
        ("commit", "<u4"),
    ]
)
_SAME = ("span_no", "step", "descriptor", "flags", "start", "end", "size", "parent_no", "seq", "a", "b", "partition")


@dataclass(frozen=True)
class ErrorAmend:
    """What a later record says of a span that failed."""

    span_no: int
    type_string: int
    message: str


@dataclass(frozen=True)
class Decoded:
    """Records by kind; *begun* and *spans* are rows of ``SPAN_DTYPE`` without ids."""

    spans: Column
    begun: Column
    counters: Column
    errors: list[ErrorAmend]


def decode(records: bytes) -> Decoded:
    """Return the records, one after the other, by kind; those of an unknown kind (a newer writer's) are left out."""
    table = np.frombuffer(records, RECORD_DTYPE)
    kind = table["kind"]
    return Decoded(
        _rows(table[kind == SPAN]),
        _rows(table[kind == BEGIN]),
        _rows(table[kind == COUNTER]),
        [_error(record) for record in table[kind == AMEND] if _amend_type(record) == AMEND_ERROR],
    )


def _amend_type(record: Any) -> int:
    return int(record.tobytes()[RECORD - 8])


def _error(record: Any) -> ErrorAmend:
    payload = record.tobytes()[16:56]
    message = payload[4:].rstrip(b"\0").decode("utf-8", "ignore")
    return ErrorAmend(int(record["span_no"]), int.from_bytes(payload[:4], "little"), message)


def _rows(table: Column) -> Column:
    rows = empty_rows(len(table))
    for name in _SAME:
        rows[name] = table[name]
    rows["level"] = table["level_source"] >> 4
    rows["source"] = table["level_source"] & 15
    return rows

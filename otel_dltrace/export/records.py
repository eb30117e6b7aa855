"""From the ring's 64-byte records to rows, in bulk."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from otel_dltrace.model.spans import SPAN_DTYPE, Column
from otel_dltrace.record.ring import AMEND, AMEND_ERROR, BEGIN, RECORD, SPAN

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
    errors: list[ErrorAmend]


def decode(records: Column) -> Decoded:
    """Return *records* by kind; those of an unknown kind (a newer writer's) are left out."""
    kind = records["kind"]
    rows = _rows(records)
    amends = records.compress(kind == AMEND)
    return Decoded(
        rows.compress(kind == SPAN),
        rows.compress(kind == BEGIN),
        [_error(record.tobytes()) for record in amends if _amend_type(record) == AMEND_ERROR],
    )


def _amend_type(record: Any) -> int:
    return int(record.tobytes()[RECORD - 8])


def _error(record: bytes) -> ErrorAmend:
    payload = record[16:56]
    message = payload[4:].rstrip(b"\0").decode("utf-8", "ignore")
    return ErrorAmend(int.from_bytes(record[:4], "little"), int.from_bytes(payload[:4], "little"), message)


def _rows(records: Column) -> Column:
    """Return *records* as rows: their 64 bytes are a row's first (`SPAN_DTYPE`)."""
    whole = np.zeros((len(records), SPAN_DTYPE.itemsize), np.uint8)
    whole[:, :RECORD] = records.view(np.uint8).reshape(-1, RECORD)
    rows = whole.view(SPAN_DTYPE)[:, 0]
    rows["level"], rows["source"] = records["level_source"] >> 4, records["level_source"] & 15
    rows["error"] = 0
    return rows

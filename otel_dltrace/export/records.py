"""From the ring's 64-byte records to rows, in bulk."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from otel_dltrace.model.spans import SPAN_DTYPE, Column
from otel_dltrace.record.ring import AMEND, AMEND_DEVICE, AMEND_ERROR, AMEND_PARENT, BEGIN, COUNTER, RECORD, SPAN

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
PARENT_DTYPE = np.dtype(
    {
        "names": ["span_no", "span", "step", "rank"],
        "formats": ["<u4", ">u8", "<u4", "<u4"],
        "offsets": [0, 32, 40, 44],
        "itemsize": RECORD,
    }
)
"""What an AMEND says of a span whose parent is in another process; the trace (bytes 16 to 31) is that of the step."""
DEVICE_DTYPE = np.dtype(
    {
        "names": ["span_no", "source", "start", "end", "residual", "total"],
        "formats": ["<u4", "u1", "<u8", "<u8", "<u4", "<u8"],
        "offsets": [0, 13, 16, 24, 32, 36],
        "itemsize": RECORD,
    }
)
"""What an AMEND says of when a device was at a span; the upper half of the byte *source* is the level."""
_AMEND_TYPE_AT = RECORD - 8


@dataclass(frozen=True)
class ErrorAmend:
    """What a later record says of a span that failed."""

    span_no: int
    type_string: int
    message: str


@dataclass(frozen=True)
class Decoded:
    """Records by kind; *begun* and *spans* are rows of ``SPAN_DTYPE`` without ids, *parents* of `PARENT_DTYPE`.

    *devices* are of `DEVICE_DTYPE`. *counters* are records as they are: their size is the value of the metric that
    their descriptor names.
    """

    spans: Column
    begun: Column
    errors: Sequence[ErrorAmend] = ()
    parents: Column = field(default_factory=lambda: np.zeros(0, PARENT_DTYPE))
    devices: Column = field(default_factory=lambda: np.zeros(0, DEVICE_DTYPE))
    counters: Column = field(default_factory=lambda: np.zeros(0, RECORD_DTYPE))


def decode(records: Column) -> Decoded:
    """Return *records* by kind; those of an unknown kind (a newer writer's) are left out."""
    kind = records["kind"]
    rows = _rows(records)
    if kind.max(initial=0) <= SPAN:
        return Decoded(rows.compress(kind == SPAN), rows.compress(kind == BEGIN))
    amends = records.compress(kind == AMEND)
    types = amends.view(np.uint8).reshape(-1, RECORD)[:, _AMEND_TYPE_AT]
    return Decoded(
        rows.compress(kind == SPAN),
        rows.compress(kind == BEGIN),
        [_error(record.tobytes()) for record in amends.compress(types == AMEND_ERROR)],
        amends.compress(types == AMEND_PARENT).view(PARENT_DTYPE),
        amends.compress(types == AMEND_DEVICE).view(DEVICE_DTYPE),
        records.compress(kind == COUNTER),
    )


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

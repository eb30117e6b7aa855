"""From the ring's 64-byte records to rows, in bulk."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from otel_dltrace.model.arrays import Column
from otel_dltrace.model.semconv import Level
from otel_dltrace.model.spans import SPAN_DTYPE
from otel_dltrace.record.ring_file import AMEND, AMEND_DEVICE, AMEND_ERROR, AMEND_PARENT, BEGIN, COUNTER, RECORD, SPAN

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
_BEGINNING = np.dtype({"names": ["record"], "formats": [f"V{RECORD}"], "offsets": [0], "itemsize": SPAN_DTYPE.itemsize})
"""What a row begins with."""


class ErrorAmend(NamedTuple):
    """What a later record says of a span that failed."""

    span_no: int
    type_string: int
    message: str


class Decoded(NamedTuple):
    """Records by kind; *own*, *spans* and *begun* are rows of ``SPAN_DTYPE`` without ids, *parents* of `PARENT_DTYPE`.

    *own* are the process's steps and their stages, of which *early* are among the records that came first.
    *devices* are of `DEVICE_DTYPE`. *counters* are records as they are: their size is the value of the metric that
    their descriptor names.
    """

    own: Column
    spans: Column
    begun: Column
    errors: Sequence[ErrorAmend] = ()
    parents: Column = np.zeros(0, PARENT_DTYPE)
    devices: Column = np.zeros(0, DEVICE_DTYPE)
    counters: Column = np.zeros(0, RECORD_DTYPE)
    early: int = 0


def decode(records: Column, first: int = 0) -> Decoded:
    """Return *records*, *first* of which came first, by kind; unknown ones (of a newer writer) are left out."""
    kind, level = records["kind"].copy(), records["level_source"] >> 4  # close together, to be compared often
    is_span = kind == SPAN
    is_own = is_span & (level == Level.STEP)
    rows = _rows(records, level)
    by_kind = (rows.compress(is_own), rows.compress(is_span & ~is_own), rows.compress(kind == BEGIN))
    early = int(np.count_nonzero(is_own[:first]))
    if kind.max(initial=0) <= SPAN:
        return Decoded(*by_kind, early=early)
    amends = records.compress(kind == AMEND)
    types = amends.view(np.uint8).reshape(-1, RECORD)[:, _AMEND_TYPE_AT]
    return Decoded(
        *by_kind,
        [_error(record.tobytes()) for record in amends.compress(types == AMEND_ERROR)],
        amends.compress(types == AMEND_PARENT).view(PARENT_DTYPE),
        amends.compress(types == AMEND_DEVICE).view(DEVICE_DTYPE),
        records.compress(kind == COUNTER),
        early,
    )


def _error(record: bytes) -> ErrorAmend:
    payload = record[16:56]
    message = payload[4:].rstrip(b"\0").decode("utf-8", "ignore")
    return ErrorAmend(int.from_bytes(record[:4], "little"), int.from_bytes(payload[:4], "little"), message)


def _rows(records: Column, level: Column) -> Column:
    """Return *records* as rows: their 64 bytes are a row's first (`SPAN_DTYPE`)."""
    rows = np.zeros(len(records), SPAN_DTYPE)
    rows.view(_BEGINNING)["record"] = records.view(f"V{RECORD}")
    rows["level"], rows["source"] = level, records["level_source"] & 15
    rows["error"] = 0
    return rows

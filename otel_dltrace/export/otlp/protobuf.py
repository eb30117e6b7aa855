"""The wire format of protobuf, as far as OTLP needs it: bytes of single values, and columns of padded integers."""

from collections.abc import Mapping

import numpy as np

from otel_dltrace.model.arrays import Column
from otel_dltrace.model.attributes import Value

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF


def varint(value: int, width: int = 1) -> bytes:
    """Return *value* (a negative one in two's complement), padded to *width* bytes, which decoders must accept."""
    value &= _MASK64
    out = bytearray()
    while value > 0x7F or len(out) < width - 1:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def varint_width(values: Column) -> int:
    """Return how many bytes the longest of *values* (int64) needs."""
    return max(1, -(-int(np.bitwise_or.reduce(values.view(np.uint64), initial=0)).bit_length() // 7))


def put_varints(values: Column, out: Column) -> None:
    """Write *values*, int64 of shape (n,), as varints into *out*, uint8 of shape (n, width)."""
    rest = values.view(np.uint64)
    last = out.shape[1] - 1
    for i in range(last):
        np.bitwise_or(rest.astype(np.uint8), np.uint8(0x80), out=out[:, i])
        rest = rest >> np.uint64(7)
    out[:, last] = rest


def tag(number: int, wire: int) -> bytes:
    """Return the key that precedes field *number* of wire type *wire*."""
    return varint(number << 3 | wire)


def nested(number: int, payload: bytes) -> bytes:
    """Return field *number* holding *payload*: bytes, text or a message."""
    return tag(number, BYTES) + varint(len(payload)) + payload


def text(string: str) -> bytes:
    """Return *string* as UTF-8; lone surrogates (file names read as bytes) become question marks."""
    return string.encode("utf-8", "replace")


def attribute(number: int, name: str, any_value: bytes) -> bytes:
    """Return field *number* holding a KeyValue whose value is the encoded message *any_value*."""
    return nested(number, nested(1, text(name)) + nested(2, any_value))


def attributes(number: int, values: Mapping[str, Value]) -> bytes:
    """Return *values* as repeated KeyValue of field *number*."""
    return b"".join([attribute(number, name, _any_value(value)) for name, value in values.items()])


def _any_value(value: Value) -> bytes:
    if isinstance(value, bool):
        return tag(2, VARINT) + varint(value)
    if isinstance(value, int):
        return tag(3, VARINT) + varint(value)
    return nested(1, text(value))

"""Columns as text, many rows at once: a matrix of bytes in which a NUL stands for no character.

Text that Python formats line by line takes some us a line; here each field is a block of the matrix, filled by
column, and at the end the NULs are dropped, which JSON never contains.
"""

from collections.abc import Sequence

import numpy as np

from otel_dltrace.model.arrays import Column

_POWERS = 10 ** np.arange(19, dtype=np.int64)
_FOUR = np.frombuffer(b"".join(b"%04d" % number for number in range(10_000)), "<u4")
_HEX = np.frombuffer(b"".join(b"%02x" % byte for byte in range(256)), "<u2")
_MINUS = 45

Piece = tuple[Column, Column | None]
"""A block of text, shape (n, width) or (1, width), and which rows have it (None: all)."""


def literal(text: bytes) -> Column:
    """Return *text* as a block that is the same in every row."""
    return np.frombuffer(text, np.uint8)[np.newaxis]


def choice(texts: Sequence[bytes], which: Column) -> Column:
    """Return the block that has ``texts[which]`` in each row."""
    width = max(map(len, texts), default=0)
    table = np.frombuffer(b"".join(text.ljust(width, b"\0") for text in texts), np.uint8)
    block: Column = table.reshape(len(texts), width)[which]
    return block


def zero_padded(values: Column, width: int) -> Column:
    """Return *values*, int64 in 0 .. 10^width - 1, as *width* digits each."""
    groups = -(-width // 4)
    out = np.empty((len(values), groups), "<u4")
    rest = values
    for group in range(groups - 1, 0, -1):
        above = rest // 10_000
        out[:, group] = _FOUR[rest - above * 10_000]
        rest = above
    out[:, 0] = _FOUR[rest]
    return out.view(np.uint8)[:, 4 * groups - width :]


def digits(values: Column) -> Column:
    """Return *values*, of any signed type, as decimal numbers."""
    size = np.abs(values.astype(np.int64, copy=False))
    # The least int64 has no counterpart: it is shown 1 too high, and no time or count is that long.
    size = np.where(size < 0, np.iinfo(np.int64).max, size)
    lengths = np.maximum(1, np.searchsorted(_POWERS, size, "right"))
    width = int(lengths.max(initial=1))
    block = zero_padded(size, width)
    if int(lengths.min(initial=width)) < width:
        block = block * (np.arange(width) >= (width - lengths)[:, np.newaxis])
    if (values < 0).any():
        block = np.hstack([(_MINUS * (values < 0)).astype(np.uint8)[:, np.newaxis], block])
    return block


def hexadecimal(ids: Column) -> Column:
    """Return *ids*, uint64, as 16 digits each."""
    pairs: Column = _HEX[ids.astype(">u8").view(np.uint8).reshape(-1, 8)]
    return pairs.view(np.uint8)


def join(n: int, pieces: Sequence[Piece]) -> bytes:
    """Return *n* rows of text, one after the other, each the concatenation of its pieces."""
    matrix = np.empty((n, sum(block.shape[1] for block, _ in pieces)), np.uint8)
    at = 0
    for block, mask in pieces:
        place = matrix[:, at : at + block.shape[1]]
        if mask is None:
            place[:] = block
        else:
            np.multiply(block, mask[:, np.newaxis], out=place)
        at += block.shape[1]
    flat = matrix.ravel()
    return bytes(flat[flat != 0].data)

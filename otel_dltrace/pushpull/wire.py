"""The bytes between worker and server: a head that says what it is about, then the partition's bytes, if any."""

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from otel_dltrace.pushpull.errors import MismatchError, shown

Values = NDArray[np.generic]
VERSION: Final = 1
DTYPES: Final = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64")
"""In the order of BytePS's codes."""

_HEAD = struct.Struct("<BBBBHHIQQQ")
_MAX_NAME = 65_535


@dataclass(frozen=True, slots=True)
class Request:
    """Which partition a push or pull is about, who sends it, and how the values are packed."""

    key: int
    round: int
    """How often this tensor was pushed before, from 0: alike on all workers."""
    worker: int
    rank: int
    name: str
    dtype: str
    nbytes: int
    """Size of the partition as it was before compression."""
    packing: int = 0
    asynchronous: bool = False

    @property
    def count(self) -> int:
        """How many elements the partition has."""
        return self.nbytes // np.dtype(self.dtype).itemsize


def name_bytes(name: str) -> bytes:
    """Return a tensor's *name* as it travels.

    Raises:
        MismatchError: It is too long, or no text.
    """
    try:
        found = name.encode()
    except UnicodeEncodeError:  # bytes that were decoded with surrogateescape
        raise MismatchError(f"a tensor cannot be called {shown(name)}: it cannot be written as UTF-8") from None
    if len(found) > _MAX_NAME:
        raise MismatchError(f"a tensor's name of {len(found)} bytes is too long: the longest has {_MAX_NAME}")
    return found


def encode(request: Request, payload: bytes | memoryview = b"") -> bytes:
    """Return *request* and its *payload* as one message."""
    name = name_bytes(request.name)
    head = _HEAD.pack(
        VERSION,
        request.packing,
        DTYPES.index(request.dtype),
        request.asynchronous,
        request.worker,
        len(name),
        request.rank,
        request.key,
        request.round,
        request.nbytes,
    )
    return b"".join((head, name, payload))


def decode(message: bytes) -> tuple[Request, memoryview]:
    """Return the request in *message*, and its payload without a copy."""
    if len(message) < _HEAD.size:
        raise MismatchError(f"a message of {len(message)} bytes is not a request: its head alone has {_HEAD.size}")
    version, packing, dtype, asynchronous, worker, length, rank, key, round_, nbytes = _HEAD.unpack_from(message)
    if version != VERSION or dtype >= len(DTYPES):
        raise MismatchError(f"the message is of version {version}, dtype {dtype}; do all run the same release?")
    end = _HEAD.size + length
    name = message[_HEAD.size : end].decode(errors="replace")
    request = Request(key, round_, worker, rank, name, DTYPES[dtype], nbytes, packing, bool(asynchronous))
    return request, memoryview(message)[end:]

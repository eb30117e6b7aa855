"""How a partition is packed for the wire: not at all, as half precision, or as its largest elements."""

import math
import struct
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from otel_dltrace.pushpull.errors import MismatchError
from otel_dltrace.pushpull.wire import Request, Values

NONE: Final = 0
FP16: Final = 1
SPARSE: Final = 2
COMPRESSIBLE: Final = ("float32", "float64")

_COUNT = struct.Struct("<I")


class Packer(Protocol):
    """Packs one partition of one tensor, round after round; it may keep what it left out."""

    packing: int

    def pack(self, values: Values) -> bytes:
        """Return *values* packed."""


class Compressor(Protocol):
    """A way to compress a tensor, as a user chooses it."""

    def packer(self) -> Packer:
        """Return what packs one partition."""


@dataclass(frozen=True, slots=True)
class Fp16:
    """Half precision both ways. The server sums in the tensor's own precision."""

    def packer(self) -> Packer:
        """Return what packs one partition."""
        return _HalfPacker()


@dataclass(frozen=True, slots=True)
class TopK:
    """The share *ratio* of the elements that are largest; what is left out is added to the next round's values."""

    ratio: float = 0.01

    def __post_init__(self) -> None:
        """Refuse a ratio that leaves nothing, or more than everything."""
        if not 0 < self.ratio <= 1:
            raise MismatchError(f"TopK({self.ratio}): the ratio must be above 0 and at most 1")

    def packer(self) -> Packer:
        """Return what packs one partition."""
        return _TopKPacker(self.ratio)


class _HalfPacker:
    packing = FP16

    def pack(self, values: Values) -> bytes:
        return _half(values)


@dataclass(slots=True)
class _TopKPacker:
    ratio: float
    packing: int = SPARSE
    _left_out: Values | None = field(default=None, repr=False)

    def pack(self, values: Values) -> bytes:
        wanted: Values = values if self._left_out is None else np.add(values, self._left_out)
        number = max(1, math.ceil(self.ratio * wanted.size))
        largest = np.argpartition(np.abs(wanted), wanted.size - number)[wanted.size - number :]
        indices = np.sort(largest).astype(np.uint32)
        # An infinite gradient is for the GradScaler to find, once: kept, it would spoil the rounds to come.
        self._left_out = np.where(np.isfinite(wanted), wanted, 0)
        self._left_out[indices] = 0
        return _sparse(indices, wanted[indices])


def pack_sum(packing: int, total: Values) -> bytes | memoryview:
    """Return a server's sum packed as its pushes were; of sparse pushes no element is lost."""
    if packing == FP16:
        return _half(total)
    if packing == SPARSE:
        indices = np.flatnonzero(total).astype(np.uint32)
        return _sparse(indices, total[indices])
    return total.data.cast("B")


def unpack(request: Request, payload: bytes | memoryview) -> Values:
    """Return the dense values in *payload*; without compression they are a view of it.

    Raises:
        MismatchError: The payload is not what *request* says.
    """
    if request.packing == SPARSE:
        return _dense(request, payload)
    dtype = "float16" if request.packing == FP16 else request.dtype
    expected = request.count * np.dtype(dtype).itemsize
    if len(payload) != expected or request.packing not in {NONE, FP16}:
        raise MismatchError(
            f"key {request.key}: got {len(payload)} bytes, but packing {request.packing} has {expected}"
        )
    values: Values = np.frombuffer(payload, dtype)
    return values.astype(request.dtype, copy=False)


def _half(values: Values) -> bytes:
    with np.errstate(over="ignore"):  # too large for half precision is infinite, as torch's own half is
        return values.astype(np.float16).tobytes()


def _sparse(indices: NDArray[np.uint32], values: Values) -> bytes:
    return _COUNT.pack(len(indices)) + indices.tobytes() + values.tobytes()


def _dense(request: Request, payload: bytes | memoryview) -> Values:
    number = _COUNT.unpack_from(payload)[0] if len(payload) >= _COUNT.size else -1
    dtype = np.dtype(request.dtype)
    if len(payload) != _COUNT.size + number * (4 + dtype.itemsize):
        raise MismatchError(f"key {request.key}: {len(payload)} bytes are not {number} elements of {dtype}")
    indices = np.frombuffer(payload, np.uint32, number, _COUNT.size)
    if number and int(indices.max()) >= request.count:
        raise MismatchError(f"key {request.key}: element {indices.max()} is outside its {request.count}")
    values = np.zeros(request.count, dtype)
    values[indices] = np.frombuffer(payload, dtype, number, _COUNT.size + 4 * number)
    return values

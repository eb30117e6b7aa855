"""How many bytes of which type an argument of mpi4py means: a buffer, ``[data, count, datatype]``, an object."""

from functools import lru_cache
from math import prod
from operator import index
from typing import Any

Content = tuple[int, Any]
"""Bytes, and what names their type: a dtype, a datatype, "" if nothing does."""
NOTHING: Content = (0, "")
_WITHOUT_BYTES = frozenset((int, float, complex, bool, str, list, tuple, dict, set, type(None)))
"""The usual objects, of which no error need say that they are no buffers."""
_SEQUENCE = (list, tuple)


def content_of(value: Any, *, is_object: bool, ranks: int = 0, is_vector: bool = False) -> Content:
    """Return what *value* holds; an object that is no array has no size before it is pickled.

    Args:
        value: What a call is given.
        is_object: It is to be pickled.
        ranks: How many parts it has, where its count is that of one: a part for each rank; else 0.
        is_vector: Each part may have a count of its own.
    """
    if is_object and type(value) in _WITHOUT_BYTES:
        return NOTHING
    try:
        if not is_object and isinstance(value, _SEQUENCE):
            return _of_specification(value, ranks, is_vector)
        try:
            return value.nbytes, value.dtype
        except AttributeError:
            return _nbytes_of(value, is_object=is_object), getattr(value, "typecode", "")
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError, BufferError):
        return NOTHING  # wrong, or not to be known: that is for the call to say


def _nbytes_of(data: Any, *, is_object: bool = False) -> int:
    """Return how many bytes *data* has, whose memory devices and other libraries may hand out, too."""
    if hasattr(data, "nbytes"):
        return int(data.nbytes)
    try:
        return memoryview(data).nbytes
    except TypeError:
        if is_object:
            raise
    on_device = getattr(data, "__cuda_array_interface__", None)
    if on_device is not None:  # mpi4py warns of some, which it is to do once: in the call
        return int(prod(on_device["shape"])) * _typed_size(on_device)
    from mpi4py import MPI

    return int(MPI.memory.frombuffer(data, readonly=True).nbytes)


def _typed_size(on_device: Any) -> int:
    return int(on_device["typestr"][2:])


def _size_of_one(data: Any) -> int:
    """Return how many bytes an element of *data* has."""
    known = getattr(data, "itemsize", None)
    if known is None:
        on_device = getattr(data, "__cuda_array_interface__", None)
        known = _typed_size(on_device) if on_device else memoryview(data).itemsize
    return int(known)


def _of_specification(value: Any, ranks: int, is_vector: bool) -> Content:
    """Return the content of ``[data]``, ``[data, count, datatype]`` and their like."""
    data, *rest = value
    datatype = rest.pop() if rest and _is_datatype(rest[-1]) else None
    if isinstance(datatype, _SEQUENCE):  # Alltoallw: one type for each rank
        counts = (rest[0][0] if len(rest) == 1 else rest[0]) if rest else [1] * len(datatype)
        return sum(n * _size_of(kind) for n, kind in zip(counts, datatype, strict=True)), datatype[0]
    named = getattr(data, "dtype", "") if datatype is None else datatype
    each = _size_of_one(data) if datatype is None else _size_of(datatype)
    count = rest[0] if rest else None
    offset = rest[1] if len(rest) > 1 else None
    if isinstance(count, tuple if is_vector else _SEQUENCE):
        count, offset = count
    if count is not None:
        return _total(count, ranks) * each, named
    apart = each if datatype is None else _extent_of(datatype)
    start = 0 if is_vector or offset is None else index(offset) * apart
    return (_nbytes_of(data) - start) // apart * each, named


def _is_datatype(value: Any) -> bool:
    if isinstance(value, _SEQUENCE):
        return bool(value) and _is_datatype(value[0])
    return isinstance(value, str) or hasattr(value, "Get_extent")


def _total(count: Any, ranks: int) -> int:
    """Return how many elements *count* means: a number (of numpy as well), or one for each rank."""
    try:
        return index(count) * (ranks or 1)
    except TypeError:
        return int(sum(count))


def _size_of(datatype: Any) -> int:
    return int(_to_ask(datatype).Get_size())


def _extent_of(datatype: Any) -> int:
    """Return how many bytes it is from one element of *datatype* to the next, with what lies between."""
    return int(_to_ask(datatype).Get_extent()[1])


def _to_ask(datatype: Any) -> Any:
    """Return the type that *datatype* is or names, if it is one.

    MPI may end the program for a question about none, or one that was freed: its own error handler is asked then, and
    not that of the communicator, which may have the call merely raise.

    Raises:
        LookupError: It is none.
    """
    known = _of_code(datatype) if isinstance(datatype, str) else datatype
    if not known:
        raise LookupError("a null datatype")
    return known


@lru_cache(maxsize=256)
def _of_code(code: str) -> Any:
    """Return the type that is given by its name or its letter."""
    from mpi4py import MPI

    return MPI._typedict[code]


def name_of(kind: Any) -> str:
    """Return the name of a type, as numpy says it, or as MPI does: ``float64``, ``double``."""
    named = getattr(kind, "name", kind)
    return str(named).removeprefix("MPI_").removeprefix("torch.").lower()

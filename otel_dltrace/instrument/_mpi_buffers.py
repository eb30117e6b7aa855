"""How many bytes of which type an argument of mpi4py means: a buffer, ``[data, count, datatype]``, an object."""

from functools import lru_cache
from typing import Any

Content = tuple[int, Any]
"""Bytes, and what names their type: a dtype, a datatype, "" if nothing does."""
NOTHING: Content = (0, "")
_WITHOUT_BYTES = frozenset((int, float, complex, bool, str, list, tuple, dict, set, type(None)))
"""The usual objects, of which no error need say that they are no buffers."""


def content_of(value: Any, *, is_object: bool) -> Content:
    """Return what *value* holds; an object that is no array has no size before it is pickled."""
    if is_object and type(value) in _WITHOUT_BYTES:
        return NOTHING
    try:
        return value.nbytes, value.dtype
    except AttributeError:
        pass
    try:
        if not is_object and isinstance(value, list | tuple):
            return _of_specification(value)
        return _of_buffer(value), getattr(value, "typecode", "")
    except (TypeError, ValueError, AttributeError, IndexError):
        return NOTHING  # wrong, or not to be known: that is for the call to say


def _of_buffer(data: Any) -> int:
    known = getattr(data, "nbytes", None)
    if known is not None:
        return int(known)
    with memoryview(data) as view:
        return view.nbytes


def _of_specification(value: Any) -> Content:
    """Return the content of ``[data]``, ``[data, count, datatype]`` and their like."""
    data, *rest = value
    datatype = rest.pop() if rest and _is_datatype(rest[-1]) else None
    if isinstance(datatype, list | tuple):  # Alltoallw: one type for each rank
        counts = rest[0][0] if len(rest) == 1 else rest[0]
        return sum(n * _size_of(kind) for n, kind in zip(counts, datatype, strict=True)), datatype[0]
    named = getattr(data, "dtype", "") if datatype is None else datatype
    if not rest or rest[0] is None:
        return _of_buffer(data), named
    each = getattr(data, "itemsize", 1) if datatype is None else _size_of(datatype)
    return _count(rest[0]) * each, named


def _is_datatype(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and _is_datatype(value[0])
    return isinstance(value, str) or hasattr(value, "Get_extent")


def _count(value: Any) -> int:
    """Return how many elements a count means: a number, one for each rank, or these with displacements."""
    if isinstance(value, int):
        return value
    return int(sum(value[0] if hasattr(value[0], "__len__") else value))


def _size_of(datatype: Any) -> int:
    if isinstance(datatype, str):
        return _size_of_code(datatype)
    return int(datatype.Get_size())


@lru_cache(maxsize=256)
def _size_of_code(code: str) -> int:
    """Return the size of a type that is given by its name or its letter."""
    from mpi4py import MPI

    return int(MPI._typedict[code].Get_size())


def name_of(kind: Any) -> str:
    """Return the name of a type, as numpy says it, or as MPI does: ``float64``, ``double``."""
    named = getattr(kind, "name", kind)
    return str(named).removeprefix("MPI_").lower()

"""What numpy lacks, or is slow at, for columns of numbers."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[Any]


def distinct(values: Column) -> tuple[Column, Column]:
    """Return the distinct *values* (integers, shape (n,)), sorted, and which of them each is.

    `numpy.unique` does the same, and loads `numpy.ma` for it: 75 ms, in which a training may have to wait.
    """
    if not len(values):
        return values, np.zeros(0, np.intp)
    low = values.min()
    span = int(values.max()) - int(low) + 1
    if span > 4 * len(values) + 64:
        return _distinct_by_sorting(values)
    found, which = compact((values - low).astype(np.intp), span)  # few possible values: nothing needs to be sorted
    return found.astype(values.dtype) + low, which


def compact(codes: Column, span: int) -> tuple[Column, Column]:
    """Return what `distinct` does of *codes* that are all in range(*span*), of the type that numpy indexes with."""
    table = np.zeros(span, np.intp)
    table[codes] = 1
    found = table.nonzero()[0]
    table[found] = np.arange(len(found))
    return found, table[codes]


def _distinct_by_sorting(values: Column) -> tuple[Column, Column]:
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    is_first = np.ones(len(values), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_first[1:])
    which = np.empty(len(values), np.intp)
    which[order] = is_first.cumsum() - 1
    return ordered[is_first], which


def grouped(keys: Column, rows: Column) -> Iterator[tuple[int, Column]]:
    """Yield each of *keys* (integers, shape (n,)), ascending, with those of *rows* that have it, in their order."""
    order = np.argsort(keys, kind="stable")
    each, begins = np.unique(keys[order], return_index=True)
    yield from zip(each.tolist(), np.split(rows[order], begins[1:]), strict=False)  # nothing is split into one part


def places_in(values: Column, known: Column) -> Column:
    """Return for each of *values* where it first is among *known*, -1 for nowhere."""
    if not len(known):
        return np.full(len(values), -1)
    order = np.argsort(known, kind="stable")
    at = order[np.minimum(np.searchsorted(known[order], values), len(order) - 1)]
    return np.where(known[at] == values, at, -1)


def is_among(values: Column, known: Column) -> Column:
    """Return a mask of the *values* that are in *known*; for small arrays, where `numpy.isin` is slow."""
    if not len(known):
        return np.zeros(len(values), bool)
    ordered = np.sort(known)
    mask: Column = ordered[np.minimum(np.searchsorted(ordered, values), len(ordered) - 1)] == values
    return mask


def latest(keys: Sequence[Column], at: Column) -> tuple[Column, Column]:
    """Return the distinct combinations of *keys* (each (n,)), shape (k, m), and the largest of *at* in each, (m,)."""
    order = np.lexsort((at, *keys))
    ordered = np.stack(keys)[:, order]
    is_last = np.ones(len(order), bool)
    is_last[:-1] = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    return ordered[:, is_last], at[order][is_last]

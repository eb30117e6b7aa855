"""Sets of intervals of time as columns."""

import numpy as np

from otel_dltrace.model.arrays import Column

Intervals = tuple[Column, Column]
"""Begins and ends, shape (k,)."""


def merged(begin: Column, end: Column) -> Intervals:
    """Return the union of intervals as disjoint ones, sorted."""
    if not len(begin):
        return begin, end
    order = np.argsort(begin, kind="stable")
    begin, reached = begin[order], np.maximum.accumulate(end[order])
    first = np.flatnonzero(np.append(True, begin[1:] > reached[:-1]))
    return begin[first], reached[np.append(first[1:] - 1, len(reached) - 1)]


def covered(by: Intervals, begin: Column, end: Column) -> Column:
    """Return how much of each interval from *begin* to *end*, shape (n,), is covered *by* disjoint, sorted ones."""
    length: Column = _before(by, end) - _before(by, begin)
    return length


def _before(intervals: Intervals, at: Column) -> Column:
    """Return how much of *intervals* lies before each time."""
    begin, end = intervals
    if not len(begin):
        return np.zeros(len(at), np.int64)
    lengths = np.concatenate(([0], np.cumsum(end - begin)))
    index = np.searchsorted(begin, at, "right")
    beyond = np.where(index > 0, np.maximum(end[np.maximum(index - 1, 0)] - at, 0), 0)
    before: Column = lengths[index] - beyond
    return before

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


def union(start: Column, end: Column) -> int:
    """Return how much time the extents from *start* to *end*, shape (n,), cover together."""
    return int(unions(np.zeros(len(start), np.int64), start, end, 1)[0])


def unions(group: Column, start: Column, end: Column, groups: int) -> Column:
    """Return how much time the extents of each group, 0 to *groups* - 1, cover together, shape (groups,)."""
    covered = np.zeros(groups, np.int64)
    if not len(group):
        return covered
    # Each group gets a stretch of time of its own, so that one pass over all of them does.
    first, last = np.full(groups, np.iinfo(np.int64).max), np.full(groups, np.iinfo(np.int64).min)
    np.minimum.at(first, group, start)
    np.maximum.at(last, group, end)
    lengths = np.where(first <= last, last - first + 1, 0)
    base = np.cumsum(lengths) - lengths - first
    begin, end = (times + base[group] for times in (start, end))
    order = np.argsort(begin, kind="stable")
    begin, end = begin[order], end[order]
    reached = np.maximum.accumulate(end)
    before = np.append(begin[0], reached[:-1])
    np.add.at(covered, group[order], np.maximum(reached - np.maximum(begin, before), 0))
    return covered


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

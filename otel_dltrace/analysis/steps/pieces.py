"""Which stage of several pieces (accumulation) holds a time: only the first begin and the last end are known."""

import numpy as np

from otel_dltrace.model.arrays import Column


def piece_at(at: Column, first: Column, last: Column, total: Column, pieces: Column) -> Column:
    """Return which of S stages most likely holds each time *at* (n,), S where none does.

    It is the one whose pieces fill most of its extent. Where a second one has as many, the pieces of the two
    alternate, and what both extents hold is theirs in turn.

    Args:
        at: The times.
        first: When the first piece of each stage begins, shape (n, S).
        last: When its last one ends.
        total: How long all of them take together.
        pieces: How many they are; stages of one piece do not count.
    """
    holds = (pieces > 1) & (first <= at[:, None]) & (at[:, None] < last)
    column, num_stages = np.full(len(at), first.shape[1]), first.shape[1]
    row = np.flatnonzero(holds.any(axis=1))
    if num_stages < 2 or not len(row):
        column[row] = 0
        return column
    filled = np.where(holds, np.minimum(total / np.where(holds, last - first, 1), 1), -1.0)
    pair = np.argsort(-filled[row], axis=1, kind="stable")[:, :2]
    column[row] = pair[:, 0]
    at_two = holds[row[:, None], pair].all(axis=1) & (np.ptp(pieces[row[:, None], pair], axis=1) == 0)
    row, pair = row[at_two], np.sort(pair[at_two], axis=1)
    is_second = _is_second(at[row], *(values[row[:, None], pair] for values in (first, last, total, pieces)))
    column[row] = pair[np.arange(len(row)), is_second.astype(np.int64)]
    return column


def _is_second(at: Column, first: Column, last: Column, total: Column, pieces: Column) -> Column:
    """Return whether each time *at* (k,) is in a piece of the second stage; the others have the shape (k, 2).

    Before both extents hold it there was the first stage's first piece, and after it comes the second one's last. What
    is left of the two is taken to have come in equal turns, the second one's piece before the first one's.
    """
    begin, end = first[:, 1], last[:, 0]
    turn = np.maximum((end - begin) / (pieces[:, 0] - 1), 1)
    of_first = np.maximum(total[:, 0] - (begin - first[:, 0]), 0)
    of_second = np.maximum(total[:, 1] - (last[:, 1] - end), 0)
    second: Column = (at - begin) % turn * (of_first + of_second) <= of_second * turn
    return second

"""For how long a rank is blocked by others in each stage of a step.

Blocked is the time in ``wait`` phases and in blocking operations, and, in each backward in which DDP
launches its buckets, the time after the last launch: launch times are exact, and from there on
the backward only waits for the slowest rank's buckets: to its own end, which is a bound, where theirs are not known.
A device comes to a bucket long after the host has launched it: without the device's times of it no wait is known.
"""

import numpy as np

from otel_dltrace.analysis.intervals import Intervals, merged
from otel_dltrace.analysis.once import once
from otel_dltrace.analysis.steps.table import NEVER_ENDED, StepTable
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, latest
from otel_dltrace.model.buckets import backwards, bucket_number, first_calls, is_hooked


@once
def blocked(t: StepTable) -> Column:
    """Return the time for which the rank is blocked in communication in each column, (n, S + 2)."""
    if not len(t.steps):
        return np.zeros((0, len(t.stages) + 2), np.int64)
    row, stage, last, until = _last_launches(t)
    on_device = t.device[row, stage]
    launches = last[~on_device]
    time = _in_columns(t, _at(t, launches, until[~on_device]), launches)
    loose = _in_columns(t, merged(*_rows(t, _blocking(t) & _is_of_message(t))), launches[:0])
    # A device may be at it when the host is steps beyond: its time is not the host's.
    np.add.at(time, (row[on_device], stage[on_device] + 1), (until - last)[on_device])
    return _within_their_pieces(t, _outside_their_pieces(t, time, np.minimum(loose, time)))


def blocked_at(t: StepTable) -> Intervals:
    """Return when the rank's host is blocked in communication."""
    row, stage, last, until = _last_launches(t)
    by_host = ~t.device[row, stage]
    return _at(t, last[by_host], until[by_host])


def _at(t: StepTable, launches: Column, until: Column) -> Intervals:
    begin, end = _rows(t, _blocking(t))
    return merged(np.append(begin, launches), np.append(end, until))


def _in_columns(t: StepTable, intervals: Intervals, launches: Column) -> Column:
    """Return how long *intervals* are, by where they begin, (n, S + 2); at *launches* of DDP's, in its backward."""
    time = np.zeros((len(t.steps), len(t.stages) + 2), np.int64)
    begin, end = intervals
    at, column = _place(t, begin, launches)
    column = _of_metrics(t, at, column, begin, end - begin)
    known = column >= -1
    np.add.at(time, (at[known], column[known] + 1), (end - begin)[known])
    return time


def _of_metrics(t: StepTable, row: Column, column: Column, begin: Column, length: Column) -> Column:
    """Return *column*, where what may be in ``reduce_metrics`` or in another stage of several pieces is in the former.

    That stage does little but communicate. It takes what comes first, until its pieces are full.
    """
    if s.REDUCE_METRICS not in t.stages:
        return column
    metrics = t.stages.index(s.REDUCE_METRICS)
    first, last, room = (c[row, metrics] for c in (t.first, t.last, t.total))
    several = np.column_stack((t.pieces > 1, np.zeros((len(t.steps), 2), bool)))  # two more that are no stages
    may_be = several[row, column] & several[row, metrics] & (first <= begin) & (begin < last) & (length <= room)
    taken = np.cumsum(np.where(may_be, length, 0))
    before = np.append(0, taken)[np.searchsorted(row, row)]
    return np.where(may_be & (taken - before <= room), metrics, column)


def _outside_their_pieces(t: StepTable, time: Column, loose: Column) -> Column:
    """Return *time* (n, S + 2) with what of it is *loose* in stages of several pieces between these, if there are gaps.

    So a pipeline waits for a message before each piece. What a sharded model waits for is in its pieces.
    """
    loose = np.where((t.pieces > 1) & ~t.device & ~t.outside, loose[:, 1:-1], 0)
    whole = loose.sum(axis=1)
    moved = np.where(t.device.any(axis=1), 0, np.minimum(whole, t.gaps))
    time[:, 1:-1] -= np.rint(loose * (moved / np.maximum(whole, 1))[:, None]).astype(np.int64)
    time[:, -1] += moved
    return time


def _within_their_pieces(t: StepTable, time: Column) -> Column:
    """Return *time* (n, S + 2) without more in a stage of several pieces than these can hold.

    What is over lay between the pieces; and what that has no room for, in another such stage.
    """
    several = (t.pieces > 1) & ~t.device
    within, outside = time[:, 1:-1], time[:, -1]
    over = np.where(several, np.maximum(within - t.total, 0), 0)
    within -= over
    room = np.where(several, t.total - within, 0)
    left = over.sum(axis=1)
    others = np.minimum(left - np.minimum(left, np.maximum(t.residual - outside, 0)), room.sum(axis=1))
    within += np.rint(room * (others / np.maximum(room.sum(axis=1), 1))[:, None]).astype(np.int64)
    outside += left - others
    return time


def is_issued(t: StepTable) -> Column:
    """Return a mask of what is only known to have been issued: the device comes to it when it does."""
    issued: Column = t.batch["source"] == s.Source.HOST_ISSUE
    return issued


def _last_launches(t: StepTable) -> tuple[Column, Column, Column, Column]:
    """Return (row, stage, when, until) of the last launch of DDP's buckets in each backward of each step.

    That of one with a communication hook is the hook's first call. For what a program launches itself it waits itself,
    in ``wait``.
    """
    batch = t.batch
    has_launch = (batch["source"] == s.Source.BOUND) | (batch["flags"] & s.Flag.ASYNC != 0)
    buckets = batch.take(batch.is_bucket & has_launch & ~is_issued(t) & np.isin(batch["step"], t.steps))
    row = np.searchsorted(t.steps, buckets["step"])
    stage = _backward_at(t, row, buckets["start"])
    inside = stage < len(t.stages)
    buckets, row, stage = buckets.take(inside), row[inside], stage[inside]
    at, end, is_seen = buckets["start"], buckets["end"], buckets["source"] == s.Source.HOST_DONE
    # Where steps have several backwards, bounds tell where each of them ends, and buckets that are seen to be done.
    tells = (buckets["source"] == s.Source.BOUND) & ~t.device[row, stage]
    until = np.where(tells, end, t.last[row, stage])
    done, unseen = np.full_like(t.last, NEVER_ENDED), np.zeros(t.last.shape, bool)
    np.maximum.at(done, (row, stage), end)
    unseen[row[~is_seen], stage[~is_seen]] = True
    seen = ~(unseen | t.device)[row, stage]
    number = buckets.lookup(bucket_number, np.int64)
    begins, ends = backwards(number[seen], at[seen], end[seen])
    until[seen] = np.where(_is_told(t, row[seen], stage[seen], begins), ends, until[seen])
    at = np.where(buckets.lookup(is_hooked, bool), first_calls(at, end, _calls(t)), at)
    (row, stage, until), last = latest((row, stage, until), at)
    return row, stage, last, np.where(unseen[row, stage], until, np.minimum(until, done[row, stage]))


def _calls(t: StepTable) -> Column:
    """Return when what the program communicates itself, its hooks too, begins."""
    begins: Column = t.batch["start"][t.batch.is_kind(s.COLLECTIVE, s.P2P) & ~t.batch.is_bucket]
    return begins


def _is_told(t: StepTable, row: Column, stage: Column, begins: Column) -> Column:
    """Return of each bucket in a *row* and *stage* whether what *begins* there is no more backwards than it has.

    Else one backward goes through several models, whose buckets are done one after the other.
    """
    told = np.zeros_like(t.pieces)
    np.add.at(told, (row[begins], stage[begins]), 1)
    is_told: Column = (told <= t.pieces)[row, stage]
    return is_told


def _backward_at(t: StepTable, row: Column, at: Column) -> Column:
    """Return in which stage of each *row* a bucket is launched: in the backward, whatever has pieces around it."""
    stage = t.stage_at(row, at)
    if s.BACKWARD not in t.stages:
        return stage
    backward = t.stages.index(s.BACKWARD)
    there = (t.pieces[row, backward] > 0) & (t.first[row, backward] <= at) & (at < t.last[row, backward])
    return np.where(there, backward, stage)


def _blocking(t: StepTable) -> Column:
    batch = t.batch
    calls = batch.is_kind(s.COLLECTIVE, s.P2P) & (batch["flags"] & s.Flag.ASYNC == 0)
    returned = (batch["source"] == s.Source.HOST_DONE) | is_issued(t)
    blocking: Column = batch.is_wait | (calls & returned)
    return blocking


def _is_of_message(t: StepTable) -> Column:
    """Return a mask of messages and of the waits for them."""
    messages = t.batch.is_kind(s.P2P)
    return messages | np.isin(t.batch["parent_id"], t.batch["span_id"][messages])


def _rows(t: StepTable, which: Column) -> Intervals:
    return t.batch["start"][which], t.batch["end"][which]


def _place(t: StepTable, at: Column, launches: Column) -> tuple[Column, Column]:
    """Return (row, column) of each time: which step, and which of its stages; of *launches* of DDP's, its backward.

    Column S is the residual, -1 the time before the step; -2 where there is no such step.
    """
    row = np.searchsorted(t.start, at, "right") - 1
    after = (row < 0) | (at >= t.end[row])
    row = np.where(after, row + 1, row)
    there = row < len(t.steps)
    row = np.minimum(row, len(t.steps) - 1)
    stage, is_launch = t.stage_at(row, at), np.isin(at, launches)
    stage[is_launch] = _backward_at(t, row[is_launch], at[is_launch])
    column = np.where(after & (stage == len(t.stages)), -1, stage)
    return row, np.where(there, column, -2)

"""BytePS's worker timeline as spans and back: an operation for each total, below it the stages of its partitions.

The file has no steps. BytePS counts how often each tensor was completed, from 1; the n-th occurrence of every tensor is
put into step n - 1, and a step span is drawn around what is in it. Which occurrence comes first in the file is not in
it either: it is the BYTEPS_TRACE_START_STEP of the run.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from otel_dltrace.formats.comm_json import NO_KEY, Comm, Series
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, is_among
from otel_dltrace.model.identity import NO_USER_STEP
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.spans import SpanBatch, empty_rows, stack_rows

BACKEND = "byteps"
_NONE = np.zeros(0, np.uint64)
_US = 1000
_MOST_WAIT = (1 << 31) - 1


class Rows(NamedTuple):
    """Rows without ids (``fill_ids``), their descriptors, and what was found odd, a sentence each."""

    rows: Column
    descriptors: list[Descriptor]
    notes: tuple[str, ...] = ()


# -- from the file ------------------------------------------------------------------------------


def rows_of(comm: Comm, first: int = 1) -> Rows:
    """Return *comm* as rows in the file's order, behind them a row for each step; times are Unix ns.

    Args:
        comm: The events.
        first: Which occurrence of each tensor the file begins with, from 1 (BYTEPS_TRACE_START_STEP).
    """
    table, numbers = _descriptors(comm.series)
    nth, parent, lone = _occurrences(comm)
    rows = empty_rows(len(comm))
    is_stage = np.array([bool(series.stage) for series in comm.series], bool)[comm.which]
    keys = np.array([max(series.key, 0) for series in comm.series], np.int64)
    rows["span_no"] = np.arange(1, len(comm) + 1)
    rows["descriptor"] = numbers[comm.which]
    rows["start"], rows["end"] = comm.ts * _US, (comm.ts + comm.dur) * _US
    rows["seq"], rows["step"] = nth + first, nth + first - 1
    rows["parent_no"] = parent + 1
    rows["partition"] = keys[comm.which] & 0xFFFF
    rows["level"] = np.where(is_stage, s.Level.PARTITION, s.Level.COLLECTIVE)
    rows["a"], rows["b"] = _queue_waits(comm, nth, parent, is_stage), -1
    backwards = int((comm.dur < 0).sum())
    odd = {
        f"stages outside all totals of their tensor, so without an operation: {lone:,}": lone,
        f"events that end before they begin, because the clock was set back: {backwards:,}": backwards,
    }
    notes = tuple(sentence for sentence, count in odd.items() if count)
    return Rows(stack_rows((rows, _steps(rows, len(table)))), [*table, RANK_STEP], notes)


def _descriptors(series: Sequence[Series]) -> tuple[list[Descriptor], Column]:
    """Return the descriptors of *series*, and the number of each one's; partitions share theirs."""
    declared: dict[str, int] = {}
    for one in series:
        if one.stage:
            declared.setdefault(one.tensor, one.key >> 16)
    known: dict[tuple[str, int, str], int] = {}
    numbers = []
    for tensor, key, stage in series:
        of_tensor = key >> 16 if stage else declared.get(tensor, NO_KEY)
        numbers.append(known.setdefault((tensor, of_tensor, stage), len(known)))
    return [_descriptor(*one) for one in known], np.array(numbers, np.int64)


def _descriptor(tensor: str, key: int, stage: str) -> Descriptor:
    if stage:
        return Descriptor(s.PHASE, stage, backend=BACKEND, tensor=tensor, key=key, queue_type=stage)
    return Descriptor(s.COLLECTIVE, s.PUSH_PULL, backend=BACKEND, tensor=tensor, key=key)


def _occurrences(comm: Comm) -> tuple[Column, Column, int]:
    """Return for each event which total of its tensor it belongs to, that one's row (-1: none), and how many have none.

    The n-th event of a stage belongs to the n-th total, if there are as many and each begins within it; in a file that
    was cut, or where the clock was set, to the last total that began before it.
    """
    counts = np.bincount(comm.which, minlength=len(comm.series))
    begins = np.cumsum(counts) - counts
    order = np.argsort(comm.which, kind="stable")
    nth = np.empty(len(comm), np.int64)
    nth[order] = np.arange(len(comm)) - begins[comm.which[order]]
    total = _totals(comm.series)
    as_many = (total >= 0) & (counts[total] == counts)
    matched = as_many[comm.which]
    parent = np.full(len(comm), -1, np.int64)
    parent[matched] = order[begins[total[comm.which[matched]]] + nth[matched]]
    within = (comm.ts[parent] <= comm.ts) & (comm.ts <= comm.ts[parent] + comm.dur[parent])
    is_total = np.array([not series.stage for series in comm.series], bool)
    outside = np.bincount(comm.which[matched & ~within], minlength=len(comm.series)) > 0
    for number in np.flatnonzero(~is_total & (outside | ~as_many)).tolist():
        events = order[begins[number] : begins[number] + counts[number]]
        found = _by_time(comm, events, order, begins, counts, int(total[number]))
        nth[events] = np.where(found >= 0, nth[found], nth[events])
        parent[events] = found
    parent[is_total[comm.which]] = -1
    return nth, parent, int(np.count_nonzero((parent < 0) & ~is_total[comm.which]))


def _totals(series: Sequence[Series]) -> Column:
    """Return for each series that of its tensor's totals, -1 for none."""
    totals = {one.tensor: number for number, one in enumerate(series) if not one.stage}
    return np.array([totals.get(one.tensor, -1) for one in series], np.int64)


def _by_time(comm: Comm, events: Column, order: Column, begins: Column, counts: Column, total: int) -> Column:
    if total < 0:
        return np.full(len(events), -1, np.int64)
    totals = order[begins[total] : begins[total] + counts[total]]
    totals = totals[np.argsort(comm.ts[totals], kind="stable")]
    place = np.searchsorted(comm.ts[totals], comm.ts[events], "right") - 1
    found: Column = np.where(place >= 0, totals[place], -1)
    return found


def _queue_waits(comm: Comm, nth: Column, parent: Column, is_stage: Column) -> Column:
    """Return how long, in us, each stage waited in its queue: start - end of the stage before it, of the same key.

    The first stage of a partition waits from its operation's start. Bars of BytePS begin when a task leaves the queue.
    """
    waits = np.zeros(len(comm), np.int64)
    rows = np.flatnonzero(is_stage)
    if not len(rows):
        return waits
    whose = {key: i for i, key in enumerate(dict.fromkeys(series[:2] for series in comm.series))}
    places = np.array([whose[series[:2]] for series in comm.series], np.int64)
    chain = (places[comm.which] * (int(nth.max()) + 1) + nth)[rows]
    ts, end = comm.ts[rows], (comm.ts + comm.dur)[rows]
    order = np.lexsort((end, ts, chain))
    rows, chain, ts, end = rows[order], chain[order], ts[order], end[order]
    before = np.empty(len(rows), np.int64)
    before[1:] = end[:-1]
    is_first = np.append(True, chain[1:] != chain[:-1])
    known = parent[rows] >= 0
    before[is_first] = np.where(known, comm.ts[parent[rows]], ts)[is_first]
    waits[rows] = np.clip(ts - before, 0, _MOST_WAIT)
    return waits


def _steps(rows: Column, descriptor: int) -> Column:
    """Return a row for each step, around what is in it."""
    ordinals, which = np.unique(rows["step"], return_inverse=True)
    steps = empty_rows(len(ordinals))
    steps["step"], steps["descriptor"], steps["level"] = ordinals, descriptor, s.Level.STEP
    steps["span_no"] = len(rows) + 1 + np.arange(len(ordinals))
    steps["size"], steps["b"] = NO_USER_STEP, -1
    start = np.full(len(ordinals), np.iinfo(np.int64).max)
    end = np.full(len(ordinals), np.iinfo(np.int64).min)
    np.minimum.at(start, which, rows["start"])
    np.maximum.at(end, which, np.maximum(rows["start"], rows["end"]))
    steps["start"], steps["end"] = start, end
    return steps


# -- to the file --------------------------------------------------------------------------------


def unfinished_in(batch: SpanBatch) -> Column:
    """Return the ids of the push_pulls in *batch* that failed or were cut off: BytePS counts them as no completion."""
    has_failed = batch["flags"] & (s.Flag.TRUNCATED | s.Flag.ERROR) != 0
    ids: Column = batch["span_id"][batch.lookup(_is_total, bool) & has_failed]
    return ids


def completions_in(batch: SpanBatch) -> Column:
    """Return which push_pull of its tensor each one in *batch* is, counted from 1, but for those in `unfinished_in`."""
    whole = batch.lookup(_is_total, bool) & ~is_among(batch["span_id"], unfinished_in(batch))
    nths: Column = batch["seq"][whole]
    return nths


def comm_of(batch: SpanBatch, unfinished: Column = _NONE) -> Comm:
    """Return what of *batch* a ``comm.json`` holds: complete operations and stages of tensors with a declared key.

    Args:
        batch: The spans.
        unfinished: The ids of push_pulls of which nothing is held, nor of their stages.
    """
    is_of_them = is_among(batch["span_id"], unfinished) | is_among(batch["parent_id"], unfinished)
    held = batch.take(batch.lookup(_is_held, bool) & ~is_of_them)
    is_stage = held.is_kind(s.PHASE)
    partition = np.where(is_stage, held["partition"], 0).astype(np.int64)
    pairs, which = np.unique(held["descriptor"].astype(np.int64) << 16 | partition, return_inverse=True)
    series = [_series(held.descriptors[pair >> 16], pair & 0xFFFF) for pair in pairs.tolist()]
    start, end = ((held[name] + np.int64(held.wall)) // _US for name in ("start", "end"))
    distinct = {one: i for i, one in enumerate(dict.fromkeys(series))}
    places = np.array([distinct[one] for one in series], np.int32)
    return Comm(list(distinct), places[which], start, end - start)


def _is_total(d: Descriptor) -> bool:
    return d.kind == s.COLLECTIVE and d.name == s.PUSH_PULL


def _is_held(d: Descriptor) -> bool:
    return _is_total(d) or (d.kind == s.PHASE and bool(d.queue_type) and d.key >= 0)


def _series(d: Descriptor, partition: int) -> Series:
    return Series(d.tensor, d.key << 16 | partition, d.queue_type) if d.kind == s.PHASE else Series(d.tensor)

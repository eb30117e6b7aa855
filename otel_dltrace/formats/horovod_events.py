"""Spans of Horovod's timeline as the events of its file again, in the order of their times."""

from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np

from otel_dltrace.formats.horovod_json import BEGIN, MARK, OVER, START, TICK, Event
from otel_dltrace.formats.horovod_spans import unfold
from otel_dltrace.formats.in_order import NEVER, InOrder
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch

_US = 1000
_Y2000 = 946_684_800_000_000
_Kind = tuple[str, str, str | None, str]


def count_timelines(pieces: Iterable[SpanBatch]) -> int:
    """Return how many timelines `timelines_of` makes of *pieces*."""
    starts, first = [NEVER], NEVER
    for held in map(_held, pieces):
        begin, _ = _times(held)
        starts += begin[held.lookup(_is_start, bool)].tolist()
        first = min(first, int(begin.min(initial=NEVER)))
    return len(starts) - 1 + (first < min(starts))


def timelines_of(pieces: Iterable[SpanBatch]) -> Iterator[Iterator[Event]]:
    """Yield the timelines that *pieces*, which are gone through twice, are of, each from its START on."""
    number = 0

    def which(event: Event) -> int:
        nonlocal number
        number += event.phase == START
        return number

    return (events for _, events in groupby(events_of(pieces), which))


def events_of(pieces: Iterable[SpanBatch]) -> Iterator[Event]:
    """Yield the events that timelines hold of *pieces*, which are gone through twice, in the order of their times."""
    moments = InOrder(pieces, _held, _times)
    origin, is_told = 0, moments.first // _US <= _Y2000
    kinds: dict[int, _Kind] = {}
    for spans, times, are_ends, _ in moments:
        columns = (spans[name].tolist() for name in ("descriptor", "seq", "a"))
        for time, is_end, number, seq, rank in zip(times.tolist(), are_ends.tolist(), *columns, strict=True):
            us = time // _US
            known = kinds.get(number)
            if known is None:
                known = kinds[number] = _kind(spans.descriptors[number])
            phase, tensor, name, args = known
            if phase == START:
                origin, is_told = (time + 1) // _US - int(args or 0), True
                yield Event(START, origin)
                continue
            if not is_told:
                origin, is_told = us, True
                yield Event(START, us)
            if is_end or phase == OVER:
                yield Event(OVER, us - origin, unfold(tensor, seq), "", args)
            else:
                yield Event(phase, us - origin, unfold(tensor, seq), str(rank) if name is None else name)


def _held(batch: SpanBatch) -> SpanBatch:
    return batch.take(batch.lookup(_is_held, bool))


def _times(held: SpanBatch) -> tuple[Column, Column]:
    """Return when rows begin, and when those end that are bars and complete; a START is before what it begins."""
    begin, end = (held[name] + np.int64(held.wall) for name in ("start", "end"))
    begin -= held.lookup(_is_start, bool)
    is_whole = held.is_kind(s.PHASE) & (held["flags"] & s.Flag.TRUNCATED == 0)
    return begin, np.where(is_whole, end, NEVER)


def _is_held(d: Descriptor) -> bool:
    return d.backend == h.BACKEND and (d.kind == s.TICK or (d.kind == s.PHASE and bool(d.activity)))


def _is_start(d: Descriptor) -> bool:
    return d.kind == s.TICK and d.name == h.TIMELINE_START


def _kind(d: Descriptor) -> _Kind:
    """Return the phase, the tensor, the name and what an end says of rows of *d*; a ready tick has no name of its own.

    A row of a phase is a begin, and an end where it is complete.
    """
    if d.kind == s.PHASE:
        return BEGIN, d.tensor, d.activity, d.dtype
    if d.name == h.READY:
        return TICK, d.tensor, None, ""
    if d.name == h.END:
        return OVER, d.tensor, "", d.dtype
    if _is_start(d):
        return START, "", "", d.activity
    return (TICK if d.tensor else MARK), d.tensor, d.activity if d.name == h.MARK else d.name, ""

"""Begins and ends of a process's spans in the order of their times, as files that are written so want them.

Spans come nearly in that order already. What is held is a piece of them, what of it ends after the next one begins, and
what comes far behind its time: in a compacted run, all that is outside any step.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from otel_dltrace.model.arrays import Column
from otel_dltrace.model.spans import SpanBatch, concatenate

NEVER = int(np.iinfo(np.int64).max)
_AT_ONCE = 1 << 14
_Times = Callable[[SpanBatch], tuple[Column, Column]]


class Moments(NamedTuple):
    """n begins and ends: the spans, a row each, when it is, and whether it is the end, shape (n,).

    *number* is that of the span among those of all pieces.
    """

    spans: SpanBatch
    time: Column
    is_end: Column
    number: Column

    def take(self, which: Column | slice) -> "Moments":
        """Return those that *which* selects."""
        return Moments(self.spans.take(which), self.time[which], self.is_end[which], self.number[which])


class InOrder:
    """The begins and ends in *pieces*, of one process; begins first of one time, and else as the pieces have them.

    Args:
        pieces: Gone through now, and again whenever this is iterated over.
        held: Returns what of a piece is of interest.
        times: Returns when the spans of that begin and end, shape (n,) each; `NEVER` for no end.

    Attributes:
        first: The time of the first, `NEVER` if there is none.
    """

    def __init__(self, pieces: Iterable[SpanBatch], held: Callable[[SpanBatch], SpanBatch], times: _Times) -> None:
        self.first = NEVER
        self._pieces, self._held, self._times = pieces, held, times
        self._late: list[Moments] = []
        self._floors = [-NEVER]  # what is before in a piece is late: all else of an earlier one is after
        for moments in self._read():
            self.first = min(self.first, int(moments.time.min(initial=NEVER)))
            is_late = moments.time < self._floors[-1]
            if is_late.any():
                self._late.append(moments.take(is_late))
            in_time = moments.time[~is_late]
            self._floors.append(int(in_time.min()) if len(in_time) else self._floors[-1])

    def __iter__(self) -> Iterator[Moments]:
        """Yield them, some at a time."""
        late = _sorted(self._late) if self._late else None
        waiting: list[Moments] = []
        next_floors = [*self._floors[2:], NEVER]
        for moments, floor, end in zip(self._read(), self._floors, next_floors, strict=False):
            waiting.append(moments.take(moments.time >= floor))
            if late is not None:
                due = int(np.searchsorted(late.time, end))
                waiting.append(late.take(slice(due)))
                late = late.take(slice(due, None))
            together = _sorted(waiting)
            over = int(np.searchsorted(together.time, end))
            waiting = [together.take(slice(over, None))]
            for at in range(0, over, _AT_ONCE):
                yield together.take(slice(at, min(at + _AT_ONCE, over)))

    def _read(self) -> Iterator[Moments]:
        known = 0
        for piece in self._pieces:
            spans = _without_errors(self._held(piece))
            begin, end = self._times(spans)
            ended = np.flatnonzero(end != NEVER)
            which = np.concatenate((np.arange(len(spans)), ended))
            is_end = np.arange(len(which)) >= len(spans)
            yield Moments(spans.take(which), np.concatenate((begin, end[ended])), is_end, known + which)
            known += len(spans)


def _without_errors(spans: SpanBatch) -> SpanBatch:
    """Return *spans* without the texts of their errors, of which each piece has all: no such file tells of them."""
    rows = spans.rows.copy()
    rows["error"] = 0
    return replace(spans, rows=rows, errors=(("", ""),))


def _sorted(parts: Sequence[Moments]) -> Moments:
    spans = concatenate(part.spans for part in parts)
    assert spans is not None
    time, is_end, number = (np.concatenate(columns) for columns in list(zip(*parts, strict=True))[1:])
    return Moments(spans, time, is_end, number).take(np.lexsort((number, is_end, time)))

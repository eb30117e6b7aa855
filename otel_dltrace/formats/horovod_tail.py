"""Horovod's timeline while Horovod writes it: read piece by piece, and made rows of without steps of its own."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from otel_dltrace.formats.horovod_json import BETWEEN, NEXT, RECORD, START, Event, Reader
from otel_dltrace.formats.horovod_spans import Builder, Row, fold

MOST_WAITING = 1 << 16
"""Bytes of a record that is not whole; with more behind it, it never will be."""
MOST_OVER = 1 << 14
"""Unnamed tensors that are remembered when they are over: those in Horovod's cache come again when a rank joins."""


class TailReader(Reader):
    """Takes a timeline's bytes as they come; the `]` behind the last event is a comma once there is another."""

    def __init__(self) -> None:
        super().__init__(b"")
        self._rest, self._passed = b"", 0
        self._unnamed: deque[Any] = deque()

    def feed(self, data: bytes, *, final: bool = False) -> Iterator[Event]:
        """Yield the events that *data* completes; *final*: nothing comes after it."""
        self.data = data = self._rest + data
        at = 0
        while True:
            while (match := RECORD.match(data, at)) is not None:
                yield self._record(match)
                at = match.end()
            between = BETWEEN.match(data, at)
            if between is not None and between.end() > at:
                at = between.end()
                continue
            read = self._other(at) if at < len(data) else None
            if read is not None:
                event, at = read
                if event is not None:
                    yield event
                continue
            following = NEXT.search(data, at + 1)
            is_lost = at < len(data) and (final or len(data) - at > MOST_WAITING)
            if is_lost:
                self._damaged.append(self._passed + at)
            if following is None or not is_lost:
                break
            at = following.start()
        self._rest = data[at:] if len(data) - at <= MOST_WAITING else b""
        self._passed += len(data) - len(self._rest)

    def _name(self, pid: Any, name: str) -> None:
        super()._name(pid, name)
        if fold(name)[1] is not None:
            self._unnamed.append(pid)
            if len(self._unnamed) > MOST_OVER:
                self._names.pop(self._unnamed.popleft(), None)


class TailBuilder(Builder):
    """Makes rows of events whose steps others know: all are of the same one, and nothing is kept of what is over.

    Args:
        draw: Draws the numbers of spans.
        before: What read the file before it was begun anew: rows of both are described by one table.
    """

    def __init__(self, draw: Iterator[int], before: "TailBuilder | None" = None) -> None:
        super().__init__()
        self._numbers = draw
        if before is not None:
            self.descriptors, self._known = before.descriptors, before._known
        self._most = MOST_OVER
        self._begins = False

    def add(self, event: Event) -> None:
        """Take the next event."""
        if event.phase == START:
            # All that a program starts count from `hvd.init`; where each begins, its first event says.
            self._origin, self._begins = event.ts, True
            return
        if self._begins:
            self._begins = False
            self._start(event.ts)
        super().add(event)

    def take(self) -> list[Row]:
        """Return the rows that are complete, and forget them."""
        if len(self._lanes) > self._most:
            self._forget_unnamed()
        rows, self._rows = self._rows, []
        return rows

    def cut_off(self) -> list[Row]:
        """Return the last rows: what is still open, as cut off at the last event."""
        self._end_all()
        return self.take()

    def _draw(self) -> int:
        return next(self._numbers)

    def _extend(self, step: int, start: int, end: int) -> None:
        """Keep no steps."""

    def _forget_unnamed(self) -> None:
        """Forget unnamed tensors that are over; the others may be more than usual."""
        over = [tensor for tensor, lane in self._lanes.items() if lane.is_numbered and not lane.bars]
        for tensor in over[: -MOST_OVER // 2]:
            self._release(self._lanes.pop(tensor), 0)
        self._most = len(self._lanes) + MOST_OVER

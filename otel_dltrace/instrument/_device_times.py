"""When the device was at the stages and operations of a process: found out later, and nobody waits for it."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._device_clock import Device, DeviceClock, Event, Moment
from otel_dltrace.model.semconv import Level, Source
from otel_dltrace.record.guard import failed, tried
from otel_dltrace.record.recorder import Recorder

MAX_EVENTS = 1024
"""Events of one device; what comes when all are in use has the host's times."""
MAX_PENDING = 4096
AT_A_STAGE = 4
"""How many spans are looked at when a stage ends; at the end of a step it is all that are done."""
_DEVICE, _BOUND = int(Source.DEVICE), int(Source.BOUND)
WAITED_NS = 10_000
"""A device that stood still for less, when it was asked to wait, had nothing to wait for."""


class Mark:
    """An event that the device passes; it goes back to its pool when nobody needs it any more."""

    __slots__ = ("anchor", "event", "host", "used")

    def __init__(self, event: Event, host: int, used: "_Used", anchor: Moment) -> None:
        self.event, self.host, self.used, self.anchor = event, host, used, anchor

    def __del__(self) -> None:
        self.used.pool.append(self.event)

    @property
    def time(self) -> float:
        """When the device passed it, by its own clock."""
        return self.used.clock.time_of(self.event, self.anchor)


class _Used:
    """A device that the process uses: its clock, and its own events, for an event stays with its first device."""

    def __init__(self, device: Device, clock: DeviceClock, most: int) -> None:
        self._device, self.clock, self._left = device, clock, most
        self.pool: list[Event] = []

    def event(self) -> Event | None:
        """Return an event that nobody needs, or a new one; None where there are too many."""
        try:
            return self.pool.pop()
        except IndexError:  # not looked at before: other threads take from it, too
            if self._left <= 0:
                return None
        self._left -= 1
        return self._device.event()


@dataclass(slots=True)
class _Span:
    """A span whose device times are to come; *asked* is where the device was told to wait for it, if it was."""

    number: int
    step: int
    level: int
    pieces: list[tuple[Mark, Mark]] = field(default_factory=list)
    asked: Mark | None = None
    is_whole: bool = True

    def drop(self) -> None:
        """Follow it no more; others need its events."""
        self.is_whole = False
        self.pieces.clear()

    def is_over(self) -> bool:
        # Each is in the stream that was current: none tells of another.
        return all(ended.event.query() and begun.event.query() for begun, ended in reversed(self.pieces))


class DeviceMarks:
    """The device times of one process (`record.device.DeviceTimes`).

    Everything is asked with ``query`` alone, where a stage or a step ends. A device that fails is not
    asked again: its error comes to the program itself, at its own next call.

    Stages are those of the thread that trains. Operations begin and end in any (a backward has its
    own), and need no lock: they take an event, or append a span, in one call each.

    Args:
        recorder: Who writes what is found out.
        device: The devices.
        now: The host's clock, monotonic ns.
        most: How many events each of them may have.
    """

    def __init__(
        self, recorder: Recorder, device: Device, now: Callable[[], int] = monotonic_ns, most: int = MAX_EVENTS
    ) -> None:
        self._recorder, self._device, self._now = recorder, device, now
        self._most = most
        self._used: dict[int, _Used] = {}
        self._open: dict[int, _Span] = {}
        self._pending: deque[_Span] = deque(maxlen=MAX_PENDING)
        self._has_failed = False

    def meet(self, model: set[int]) -> None:
        """Know that a *model* is on these devices."""
        self._device.meet(model)

    def mark(self, elsewhere: bool = False) -> Mark | None:
        """Return a mark before what is asked of the device next; None where there can be none now."""
        mark: Mark | None = self._tried(self._mark, elsewhere)
        return mark

    def piece(self, number: int, step: int, nth: int, begun: Mark) -> bool:
        """Know that the *nth* piece of the stage span *number* in *step* ends; return whether it is followed."""
        span = self._open.setdefault(number, _Span(number, step, int(Level.STEP)))
        if span.is_whole:
            ended = self.mark()
            del span.pieces[nth - 1 :]  # a piece around others replaces them
            if ended is not None and ended.used is begun.used and len(span.pieces) == nth - 1:
                span.pieces.append((begun, ended))
            else:
                span.drop()
        self._tried(self._poll, AT_A_STAGE)
        return span.is_whole

    def drop(self, number: int) -> None:
        """Know that a piece of the stage span *number* has no mark: it is not followed."""
        span = self._open.get(number)
        if span is not None:
            span.drop()

    def operation(self, number: int, step: int, begun: Mark) -> bool:
        """Know that the device goes on when the operation span *number* is done; return whether it is followed."""
        ended = self.mark(elsewhere=True)
        if ended is None or ended.used is not begun.used:
            return False
        self._pending.append(_Span(number, step, int(Level.COLLECTIVE), [(begun, ended)]))
        return True

    def waited(self, number: int, step: int, begun: Mark, asked: Mark) -> bool:
        """Know that the device, *asked* to wait for the operation span *number*, goes on when that is done."""
        ended = self.mark(elsewhere=True)
        if ended is None or not ended.used is begun.used is asked.used:
            return False
        self._pending.append(_Span(number, step, int(Level.COLLECTIVE), [(begun, ended)], asked))
        return True

    def is_open(self) -> bool:
        """Return whether a device may be asked anything now."""
        return bool(self._tried(self._device.is_open))

    def when(self, mark: Mark) -> int | None:
        """Return when the device passed *mark*, monotonic ns of the host; None where that is not known yet."""
        at: int | None = self._tried(self._when, mark)
        return at

    def step_ends(self) -> None:
        """Write what has become known; know that the stages of the step so far have no more pieces."""
        spans, self._open = self._open, {}
        self._pending.extend(span for span in spans.values() if span.is_whole)
        self._tried(self._tie)
        self._tried(self._poll, MAX_PENDING)

    def _tried(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._has_failed or not self._recorder.level:
            return None
        result = tried(function, *args)
        if isinstance(result, Exception):
            self._has_failed = True
            self._pending.clear()
            failed("the device's clock", result)
            return None
        return result

    def _when(self, mark: Mark) -> int | None:
        # The device is never before the host that asked it.
        return max(mark.used.clock.host(mark.time), mark.host) if mark.event.query() else None

    def _mark(self, elsewhere: bool) -> Mark | None:
        if not self._device.is_open():
            return None
        index = self._device.index()
        if index is None:
            return None
        used = self._used.get(index)
        if used is None:
            if elsewhere:
                return None
            clock = DeviceClock(self._device, index, self._now)
            used = self._used[index] = _Used(self._device, clock, self._most)
        if used.clock.anchor is None and not elsewhere:
            used.clock.tie()
        anchor = used.clock.anchor
        event = None if anchor is None else used.event()
        if anchor is None or event is None:
            return None
        mark = Mark(event, self._now(), used, anchor)
        event.record()
        return mark

    def _tie(self) -> None:
        if self._device.is_open():
            for used in self._used.values():
                used.clock.tie()

    def _poll(self, most: int) -> None:
        """Write what the device has passed, in the order in which it was asked; up to *most* spans."""
        if not self._device.is_open():  # a query would break the capture of a graph
            return
        for used in self._used.values():
            used.clock.look()
        for _ in range(min(most, len(self._pending))):
            span = self._pending.popleft()  # before it is looked at: another thread may push the first one out
            if not span.is_over():
                self._pending.appendleft(span)
                return
            self._write(span)

    def _write(self, span: _Span) -> None:
        begun, ended = span.pieces[0][0], span.pieces[-1][1]
        clock, first, last, total = begun.used.clock, begun.time, ended.time, 0.0
        if span.level == Level.STEP:
            total = last - first if len(span.pieces) == 1 else sum(end.time - begin.time for begin, end in span.pieces)
        start = clock.host(first)
        end = max(clock.host(last), start)
        # The device is never before the host that asked it; how long it took is known better than when.
        behind = max(0, begun.host - start, ended.host - end)
        is_bound = span.asked is not None and last - span.asked.time < WAITED_NS
        source = _BOUND if is_bound else _DEVICE
        times = (start + behind, end + behind, clock.residual(last), max(0, round(total)))
        self._recorder.device(span.number, span.level, *times, source, span.step)

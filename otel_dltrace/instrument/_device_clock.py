"""Ties a device's clock to the host's: a line through moments that both have seen."""

from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

LOOKS = 100
"""How often a moment that was asked for is looked for at once: some 100 us, once a second. Later it is once a stage."""
FIRST_LOOKS = 1000
"""How often the first one is looked for at once: without it there are no times."""
EVERY_NS = 1_000_000_000
AGAIN_NS = 100_000_000
"""When the next moment is asked for, after one that did not come at once."""
SEEN_NS = 2_000
"""How much later than the device was there a look may still not find it: what it writes comes over a bus."""
MAX_GAP_NS = 60_000_000_000
"""After a longer gap only the last moment before it counts: a line through all says little of either side."""
ROUNDING = 2.0**-24
"""How much of itself an elapsed time may be wrong by."""
REMEMBERED = 64
DRIFT = 1e-4
"""How fast a clock may run away from another, as long as nothing is known of these two."""
LOOSE = 2.0
"""A moment known less well than this many times the best is not used, unless the drift since the last one says less."""


class Event(Protocol):
    """A moment in a device's work; PyTorch's events are some."""

    def record(self, stream: Any = None) -> None:
        """Have the device note the time when it comes here in *stream*, by default the current one."""

    def query(self) -> bool:
        """Return whether it has; never waits."""

    def elapsed_time(self, end_event: Any) -> float:
        """Return the ms to *end_event*; both moments are over."""


class Device(Protocol):
    """The devices of one kind that a process uses."""

    def is_open(self) -> bool:
        """Return whether events may be used now: the program uses a device, and captures no graph."""

    def meet(self, model: set[int]) -> None:
        """Know that a *model* is on these devices."""

    def index(self) -> int | None:
        """Return which device is the current one; None where its times would not be those of the program's work."""

    def event(self) -> Event:
        """Return a new event."""

    def aside(self, index: int) -> Any:
        """Return a stream of the device *index* in which nothing else runs."""


class Moment(NamedTuple):
    """A moment from which others are counted: ns by the device since its first one."""

    event: Event
    at: float


class _Tie(NamedTuple):
    at: float
    host: int
    half: float


class DeviceClock:
    """The clock of one device.

    A moment in a stream where nothing else runs comes at once, however busy the device is: it lies between the last
    look that does not find it over and the first that does. Where several processes share the device, or all streams
    one queue (``CUDA_DEVICE_MAX_CONNECTIONS=1``), it may take longer: it is looked for again at the next occasion,
    and known less well. No stream waits for another.

    Args:
        device: The devices.
        index: Which of them.
        now: The host's clock, monotonic ns.
    """

    def __init__(self, device: Device, index: int, now: Callable[[], int]) -> None:
        self._device, self._index, self._now = device, index, now
        self._ties: deque[_Tie] = deque(maxlen=REMEMBERED)
        self._asked: tuple[Event, int] | None = None
        self._next = 0
        self._slope, self._origin = 1.0, (0.0, 0.0)
        self._residual, self._drift, self._range = 0.0, DRIFT, (0.0, 0.0)
        self.anchor: Moment | None = None

    def tie(self) -> None:
        """Find a moment that both clocks know, if it is time for one; or look for the one that was asked for last."""
        if self._asked is not None:
            self.look()
        elif self._now() >= self._next:
            event, stream = self._device.event(), self._device.aside(self._index)
            event.record(stream)  # the first time an event and its stream are made, which may take milliseconds
            asked = self._now()
            event.record(stream)
            self._asked = (event, asked)
            self.look(FIRST_LOOKS if self.anchor is None else LOOKS)
            self._next = asked + (EVERY_NS if self._asked is None else AGAIN_NS)

    def look(self, most: int = 1) -> None:
        """Look up to *most* times for the moment that was asked for and not found yet, if there is one."""
        if self._asked is None:
            return
        event, since = self._asked
        for _ in range(most):
            before = self._now()
            if event.query():
                self._asked = None
                self._add(event, since, self._now())
                return
            since = max(since, before - SEEN_NS)
        self._asked = (event, since)

    def _add(self, event: Event, before: int, after: int) -> None:
        middle = (before + after) // 2
        if self._ties and middle - self._ties[-1].host > MAX_GAP_NS:
            self._ties = deque([self._ties[-1]], REMEMBERED)
        at = 0.0 if self.anchor is None else self.time_of(event, self.anchor)
        self.anchor = Moment(event, at)
        self._ties.append(_Tie(at, middle, (after - before) / 2))
        self._fit()

    def _fit(self) -> None:
        ties = self._good_ties()
        first = ties[0]
        xs, ys = [tie.at - first.at for tie in ties], [float(tie.host - first.host) for tie in ties]
        x, y = sum(xs) / len(ties), sum(ys) / len(ties)
        spread = sum((one - x) ** 2 for one in xs)
        # Two moments close together say nothing of the drift; all clocks here count ns.
        is_long = ties[-1].at - first.at >= EVERY_NS
        self._slope = sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread if is_long else 1.0
        self._origin = (first.at + x, first.host + y)
        half = max(tie.half for tie in ties)
        rounded = ROUNDING * max((after.at - before.at for before, after in pairwise(ties)), default=0.0)
        self._residual = half + rounded + max(abs(tie.host - self.host(tie.at)) for tie in ties)
        self._drift = min(DRIFT, 2 * half / (ties[-1].at - first.at)) if is_long else DRIFT
        self._range = (first.at, ties[-1].at)

    def _good_ties(self) -> list[_Tie]:
        limit = LOOSE * min(tie.half for tie in self._ties)
        good: list[_Tie] = []
        for tie in self._ties:
            if tie.half <= limit + (self._drift * (tie.at - good[-1].at) if good else 0.0):
                good.append(tie)
        return good

    def time_of(self, event: Event, anchor: Moment) -> float:
        """Return when *event*, which is over, was: ns by the device since its first anchor."""
        return anchor.at + anchor.event.elapsed_time(event) * 1e6

    def residual(self, at: float) -> int:
        """Return by how many ns the host's time at the device's *at* may be wrong: less among the ties than beyond."""
        first, last = self._range
        return round(self._residual + self._drift * max(0.0, first - at, at - last))

    def host(self, at: float) -> int:
        """Return the host's time, monotonic ns, at the device's *at*."""
        since, host = self._origin
        whole = int(host)
        return whole + round((host - whole) + (at - since) * self._slope)

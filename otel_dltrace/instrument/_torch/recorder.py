"""Collectives whose end nobody else knows: PyTorch's Flight Recorder tells how long the device was at them.

With ``TORCH_NCCL_ENABLE_TIMING=1`` PyTorch's watchdog finds out how long each collective of NCCL took, and its Flight
Recorder keeps that. A completion hook of the group would tell the same; but it is deprecated in favour of the recorder,
a group has only one, which the program may want, and keeps it for ever; it takes Python's lock for every collective, on
a thread of the backend, which a process that ends must not meet; and its errors abort the communicators. The recorder
is only read. It gives all that it holds at once, and holds Python's lock for that: so it is read seldom.
"""

import json
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from time import monotonic_ns, time_ns

from otel_dltrace.instrument._sites import version_of
from otel_dltrace.instrument._torch.durations import Active, Measured, ends, measured
from otel_dltrace.model.semconv import Level, Source
from otel_dltrace.record.device import DeviceTimes, Mark
from otel_dltrace.record.guard import failed, tried
from otel_dltrace.record.tracer import Tracer, live

SHARE = 100
"""Reading takes one in so many of the time, or less."""
EVERY_NS, SELDOM_NS = 1_000_000_000, 4_000_000_000
"""How long after a look the next one comes, at least and at most: the drain waits five seconds for times."""
SETTLED_NS = 300_000_000
"""When an operation is looked for: the watchdog looks ten times a second."""
FORGOTTEN_NS = 10_000_000_000
CLOCKS_NS = 50_000_000
"""What two clocks may drift apart between two looks. A group of the same name was there longer ago."""
MOST = 4096
MOST_MARKS = 256
"""So many marks are held at a time: stages want events as well."""


@dataclass(slots=True)
class _Expected:
    """A span whose times are to come; *mark* is where the device came to it, or (*is_end*) went on after it."""

    group: str
    seq: int
    number: int
    step: int
    asked: int
    mark: Mark | None
    is_end: bool
    since: int = 0
    over: int = 0
    is_known: bool = False

    def active(self, entry: Measured | None) -> Active | None:
        """Return when the device was at it, of which the recorder has *entry*; None where that is not known yet."""
        if entry is None or self.mark is not None or entry.launched < self.asked - CLOCKS_NS:
            return None
        since = max(self.since, entry.launched)
        return Active(since, entry.lasted, min(self.over or entry.noticed, entry.noticed), bool(self.over))


class Recorded:
    """The collectives of the process that *tracer* follows of which the Flight Recorder will tell."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.expected: dict[int, _Expected] = {}
        self._marked: deque[_Expected] = deque()
        self._reached: dict[str, int] = {}
        self._next = 0

    @cached_property
    def _dump(self) -> Callable[[bool, bool], bytes] | None:
        c10d = sys.modules.get("torch._C._distributed_c10d")
        # Before 2.6 PyTorch keeps no events: who reads may meet one that is gone.
        version = version_of(sys.modules.get("torch"))
        is_safe = not version or version >= (2, 6)
        return getattr(c10d, "_dump_nccl_trace_json", None) if is_safe and self.tracer.nccl_timing() else None

    def is_on(self) -> bool:
        """Return whether PyTorch measures, and tells."""
        return self._dump is not None

    def follows(
        self, group: str, seq: int, number: int, step: int, asked: int, mark: Mark | None, *, is_end: bool = False
    ) -> bool:
        """Return whether the collective *seq* (0: not known) of *group* is followed: its times will come.

        Its span is *number* in *step*; the host *asked* for it. *mark* is as `_Expected` has it.
        """
        device = self.tracer.steps.device
        # Of one that is captured into a graph the recorder never hears the end.
        if not seq or not self.is_on() or device is None or not device.is_open() or len(self.expected) >= MOST:
            return False
        kept = mark if len(self._marked) < MOST_MARKS else None
        one = self.expected[number] = _Expected(group, seq, number, step, asked, kept, is_end, asked)
        if kept is not None:
            self._marked.append(one)
        return True

    def knows(self, number: int) -> None:
        """Know that the device itself tells when it was at the span *number*."""
        if (one := self.expected.get(number)) is not None:
            one.is_known = True

    def step_ends(self) -> None:
        """Look, for the last time where the recording ends with the step."""
        self.look(is_last=live.tracer is not self.tracer)

    def look(self, *, is_last: bool = False) -> None:
        """Write what has become known, if it is time to read and this is the thread that trains."""
        if self.expected and (is_last or self.tracer.steps.trains_here()):
            result = tried(self._look, is_last)
            if isinstance(result, Exception):
                failed("PyTorch's Flight Recorder", result)
                self._dump = None
                self._forget()

    def leave(self) -> None:
        """Write what is known by now, and forget the rest."""
        self.look(is_last=True)
        self._forget()

    def _forget(self) -> None:
        self.expected.clear()
        self._marked.clear()
        self._reached.clear()

    def _look(self, is_last: bool) -> None:
        device, now = self.tracer.steps.device, monotonic_ns()
        if device is None or not device.is_open():  # the recorder asks the device, too
            return
        self._pass_marks(device)
        if now < self._next and not is_last:
            return
        # Others add to them meanwhile: a backward has its own thread.
        settled = [one for one in list(self.expected.values()) if is_last or now - one.asked >= SETTLED_NS]
        if settled:
            self._read(settled)
        spent = monotonic_ns() - now
        self._next = now + spent + (min(max(EVERY_NS, SHARE * spent), SELDOM_NS) if settled else SETTLED_NS)

    def _pass_marks(self, device: DeviceTimes) -> None:
        """Take the times of the marks that *device* has passed."""
        while self._marked:
            one = self._marked[0]
            at = device.when(one.mark)
            if at is None:
                return
            self._marked.popleft()
            one.mark = None
            if one.is_end:
                one.over = at
            else:
                one.since = max(one.since, at)

    def _read(self, settled: list[_Expected]) -> None:
        assert self._dump is not None
        entries = json.loads(self._dump(True, False)).get("entries", ())
        now = monotonic_ns()
        over, first = measured(entries, time_ns() - now, now)
        for group, members in groupby(sorted(settled, key=lambda one: (one.group, one.seq)), lambda one: one.group):
            found: list[tuple[_Expected, Active]] = []
            for one in members:
                active = one.active(over.get((group, one.seq)))
                if active is not None:
                    found.append((one, active))
                elif one.seq >= first.get(group, 0) and now - one.asked < FORGOTTEN_NS:
                    break  # the device is at it, and will come to those behind it
                self.expected.pop(one.number, None)
            self._write(group, found)
        if not entries:  # it keeps nothing
            self._dump = None
            self._forget()

    def _write(self, group: str, found: list[tuple[_Expected, Active]]) -> None:
        known = ends([active for _, active in found], self._reached.get(group, 0))
        for (one, active), end in zip(found, known, strict=True):
            self._reached[group] = end.earliest
            if not one.is_known:
                times = (end.assumed - active.lasted, end.assumed, max(0, end.latest - end.earliest))
                self.tracer.recorder.device(one.number, Level.COLLECTIVE, *times, 0, Source.RECORDER, one.step)


_recorded: Recorded | None = None


def recorded_of(tracer: Tracer) -> Recorded:
    """Return what the Flight Recorder tells of the process that *tracer* follows."""
    global _recorded  # noqa: PLW0603  -- the one of the live tracer
    if _recorded is None or _recorded.tracer is not tracer:
        _recorded = Recorded(tracer)
    return _recorded

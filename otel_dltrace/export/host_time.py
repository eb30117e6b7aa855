"""A host's clocks as its drain sees them: the offset of all that it sends, which follows a wall clock that is set."""

import time

from otel_dltrace.model.spans import Process
from otel_dltrace.model.time import Anchor, HostClock, tightest_anchor
from otel_dltrace.record.guard import say
from otel_dltrace.record.process_id import boot_id

CLOCK_SET_S = 0.1
"""By how much a wall clock moves that was set by hand; one that is kept in step moves by less at a time."""


class HostTime:
    """The offset between the host's monotonic clock and its wall clock, for processes of this boot."""

    def __init__(self) -> None:
        self._clock = HostClock(self._read())
        self._boot = boot_id().hex()

    @property
    def anchor(self) -> Anchor:
        """The offset of today."""
        return self._clock.anchor

    def anchor_of(self, boot: str) -> Anchor | None:
        """Return the offset of today for a process of *boot* (hex), None if the host has been booted since."""
        return self.anchor if boot == self._boot else None

    def renew(self) -> None:
        """Follow the host's wall clock; one that was set, and did not only drift, is told of once."""
        before = self.anchor.offset
        self._clock.renew(self._read())
        moved = (self.anchor.offset - before) / 1e9
        if abs(moved) >= CLOCK_SET_S:
            way = "back" if moved < 0 else "forward"
            say(
                f"the host's wall clock was set {way} by {abs(moved):.1f} s: what is sent from now on has the new "
                "time; lengths, shares and the report are of a clock that is never set",
                "clock",
            )

    def go_on(self, known: Process | None) -> None:
        """Have the host's offset of the drain before this one, which knew a process as *known*.

        What had been sent and is sent again is then the same to the ns: back ends show it once.
        """
        if known is not None and self.anchor_of(known.boot_id) is not None:
            self._clock.go_on(known.anchor)

    @staticmethod
    def _read() -> Anchor:
        return tightest_anchor(time.monotonic_ns, time.time_ns)

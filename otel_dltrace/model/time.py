"""From the host's monotonic clock to wall time: one offset per host, and how sure it is."""

from collections.abc import Callable
from dataclasses import dataclass

STEP_NS = 1_000_000
"""A wall clock that moved by more than this against the monotonic one was set."""
_READINGS = 5
LONG_NS = 10_000_000_000
"""How long something is open before it is told that it is."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """One paired reading: *wall* ns was seen at *monotonic* ns, give or take *uncertainty* ns."""

    monotonic: int
    wall: int
    uncertainty: int

    @property
    def offset(self) -> int:
        """Wall minus monotonic, in ns."""
        return self.wall - self.monotonic


def tightest_anchor(monotonic: Callable[[], int], wall: Callable[[], int]) -> Anchor:
    """Return the tightest of five paired readings of the two clocks (functions returning ns)."""
    anchors = []
    for _ in range(_READINGS):
        before, at, after = monotonic(), wall(), monotonic()
        anchors.append(Anchor((before + after) // 2, at, (after - before + 1) // 2))
    return min(anchors, key=lambda anchor: anchor.uncertainty)


class HostClock:
    """The host's offset; it stays the same until the wall clock is set, so that spans keep their order."""

    def __init__(self, anchor: Anchor) -> None:
        self.anchor = anchor

    def renew(self, anchor: Anchor) -> bool:
        """Take *anchor* if the wall clock was set since the last one; return whether it was."""
        if self._agrees(anchor):
            return False
        self.anchor = anchor
        return True

    def go_on(self, before: Anchor) -> None:
        """Take *before*, an earlier one that others know, unless the wall clock was set since."""
        if self._agrees(before):
            self.anchor = before

    def _agrees(self, anchor: Anchor) -> bool:
        moved = abs(anchor.offset - self.anchor.offset)
        return moved <= STEP_NS + anchor.uncertainty + self.anchor.uncertainty

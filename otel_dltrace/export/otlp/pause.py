"""How long a collector that took nothing is left alone."""

import random
from time import monotonic


class Pause:
    """The pause after failures in a row.

    Attributes:
        failures: How many there were since a request last got through.
        until: Until when the collector is left alone, in s of the monotonic clock.
        wish_ends: The same, where that is by its own wish.
    """

    def __init__(self) -> None:
        self.failures = 0
        self.until = self.wish_ends = 0.0
        self._random = random.Random()  # the global one is the training program's  # noqa: S311

    def lengthen(self, wish_s: float | None) -> None:
        """Begin the pause after one more failure; the collector asked for *wish_s*, if for anything."""
        self.failures += 1
        self.until = monotonic() + pause_s(self.failures, wish_s, self._random)
        self.wish_ends = self.until if wish_s else 0.0

    def shorten(self) -> None:
        """Leave of it what the collector asked for."""
        self.failures, self.until = min(self.failures, 1), self.wish_ends

    def end(self) -> None:
        """Forget the failures: a request got through."""
        self.failures, self.until, self.wish_ends = 0, 0.0, 0.0


def pause_s(failures: int, wish_s: float | None, rng: random.Random) -> float:
    """Return how long to leave the collector alone after that many failures in a row.

    The jitter is wide, since after an outage every host of a job comes back at once.
    """
    if wish_s:
        return wish_s * rng.uniform(1.0, 1.1)
    return rng.uniform(0.5, min(30.0, 2.0 ** min(failures - 1, 5)))

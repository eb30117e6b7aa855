"""From CPU time that adds up to shares of the time that has passed."""

from collections.abc import Mapping


class Shares:
    """Remembers the last reading of CPU seconds by mode."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._spent: Mapping[str, float] = {}

    def since_last(self, now: float, spent: Mapping[str, float], cpus: float) -> dict[str, float]:
        """Return for each mode which share of *cpus* CPUs' time has gone into it since the last call.

        Nothing the first time, and where no time has passed. The kernel's idle times may go back a little: that is 0.

        Args:
            now: Seconds of the monotonic clock.
            spent: CPU seconds so far.
            cpus: How many there are.
        """
        last, before = self._at, self._spent
        self._at, self._spent = now, dict(spent)
        if last is None or now <= last:
            return {}
        return {mode: max(0.0, spent[mode] - before.get(mode, spent[mode])) / (now - last) / cpus for mode in spent}

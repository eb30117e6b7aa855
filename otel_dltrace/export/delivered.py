"""What became of each run's spans on their way out, of a drain that serves one run after another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

_NOW = ("waiting", "spilled")
"""Of what is there now; all else counts what has happened."""


class Delivered:
    """The figures of all ways out, from a run's beginning to its end; of runs at once each has those of all.

    Args:
        figures: Returns those since the drain began; numbers, at any depth, count up, but for what is there now.
    """

    def __init__(self, figures: Callable[[], dict[str, Any]]) -> None:
        self._figures = figures
        self._before: dict[Path, dict[str, Any]] = {}
        self._over: dict[Path, dict[str, Any]] = {}

    def begin(self, run: Path) -> None:
        """Count for *run* from now on, or go on where it was over."""
        if run in self._over:
            self._before[run] = _less(self._figures(), self._over.pop(run))
        elif run not in self._before:
            self._before[run] = self._figures()

    def end(self, run: Path) -> None:
        """Count no more for *run*: all of it has been delivered or spilled."""
        self._over[run] = self.of(run)

    def of(self, run: Path) -> dict[str, Any]:
        """Return the figures of *run*."""
        return self._over.get(run) or _less(self._figures(), self._before.get(run, {}))


def _less(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return *now* with what its numbers count less what those of *before* did."""
    return {name: value if name in _NOW else _change(value, before.get(name)) for name, value in now.items()}


def _change(now: Any, before: Any) -> Any:
    if isinstance(now, dict):
        return _less(now, before or {})
    return now - (before or 0) if isinstance(now, int) else now

"""What became of each run's spans on their way out, of a drain that serves one run after another."""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from otel_dltrace.export.files import read_object, write_json

_NOW = frozenset(("waiting", "spilled"))
"""Of what is there now; all else counts what has happened."""


class Delivered:
    """The figures of all ways out, from a run's beginning to its end; of runs at once each has those of all.

    So has one that begins while requests of an earlier one wait. Those of the last run go on behind its end, till
    another begins: what waits on disk may yet be delivered.

    Args:
        figures: Returns those since the drain began, of what is there now those of a run; other numbers, at any depth,
            count up.
    """

    def __init__(self, figures: Callable[[Path], dict[str, Any]]) -> None:
        self._figures = figures
        self._before: dict[Path, dict[str, Any]] = {}
        self._over: dict[Path, dict[str, Any]] = {}
        self._last: Path | None = None
        self._shared: set[Path] = set()

    def begin(self, run: Path) -> None:
        """Count for *run* from now on, or go on where it was over."""
        if self._last not in (None, run):
            self._over[self._last] = self.of(self._last)
        self._last = None
        if run in self._over:
            self._before[run] = _less(self._figures(run), self._over.pop(run))
        elif run not in self._before:
            self._before[run] = self._figures(run)
        if others := self._before.keys() - self._over.keys() - {run}:
            self._shared |= {run, *others}
        elif any(map(self._waits, self._over)):
            self._shared.add(run)

    def _waits(self, run: Path) -> bool:
        otlp = self._figures(run).get("otlp", {})
        return any(otlp.get(name) for name in _NOW)

    def end(self, run: Path) -> None:
        """Count no more for *run*, if others go on: all of it has been delivered or spilled."""
        if self._before.keys() - self._over.keys() - {run}:
            self._over[run] = self.of(run)
        else:
            self._last = run

    def forget(self, run: Path) -> None:
        """Let go of *run*, whose figures stand in its folder: if it begins again, those that follow are added there."""
        for known in (self._before, self._over):
            known.pop(run, None)
        self._shared.discard(run)
        if self._last == run:
            self._last = None

    def of(self, run: Path) -> dict[str, Any]:
        """Return the figures of *run*; a request holds spans of all processes of a host, whichever their run."""
        now = _less(self._figures(run), self._before.get(run, {}))
        told = _there_now(self._over[run], now) if run in self._over else now
        if run in self._shared and "otlp" in told:
            told["otlp"]["shared"] = True
        return told


def _less(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return *now* with what its numbers count less what those of *before* did."""
    return {name: value if name in _NOW else _change(value, before.get(name)) for name, value in now.items()}


def _there_now(over: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the figures *over* with what is there *now*: what waited has been sent since, if that much was."""
    told = {name: _there_now(it, now.get(name, {})) if isinstance(it, dict) else it for name, it in over.items()}
    if waited := _NOW & over.keys():
        told |= {name: now.get(name, 0) for name in waited}
        gone = sum(over[name] - told[name] for name in waited)
        told["accepted"] += min(gone, now.get("accepted", 0) - over["accepted"])  # else it was given up
    return told


def _change(now: Any, before: Any) -> Any:
    if isinstance(now, dict):
        return _less(now, before or {})
    return now - (before or 0) if isinstance(now, int) else now


def add_delivered(folder: Path, figures: dict[str, Any]) -> None:
    """Add to a host's drain.json what became of the requests that waited in its *folder* when its drain had ended."""
    path = folder / "drain.json"
    told = read_object(path)
    summary = told.get("summary")
    if isinstance(summary, dict) and isinstance(before := summary.get("otlp", {}), dict):
        summary["otlp"] = with_earlier(before, figures)
        with suppress(OSError):
            ended = path.stat().st_mtime_ns  # by this time runs are told apart, the last one that wrote from others
            write_json(path, told)
            os.utime(path, ns=(ended, ended))


def with_earlier(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of an earlier drain with those of *now*: counts add up at any depth, of words the last holds.

    One that has nothing to say leaves the earlier word, and what was true stays so. What was read from a damaged file
    may be of any kind.
    """
    return before | {name: value if name in _NOW else _joint(before.get(name), value) for name, value in now.items()}


def _joint(before: Any, now: Any) -> Any:
    if isinstance(now, dict):
        return with_earlier(before if isinstance(before, dict) else {}, now)
    if isinstance(now, bool):
        return now or before is True
    if isinstance(now, int):
        return (before if isinstance(before, int) else 0) + now
    return now if before is None else now or before

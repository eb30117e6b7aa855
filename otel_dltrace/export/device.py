"""Spans at which a device was later than the host: they wait until it is known when, and get its times."""

import numpy as np

from otel_dltrace.export.records import DEVICE_DTYPE
from otel_dltrace.model.semconv import Flag, Level
from otel_dltrace.model.spans import Column, empty_rows, stack_rows

PATIENCE_NS = 5_000_000_000
"""How much longer a process records before a span of it goes on with the host's times."""
MOST_WAITING = 10_000
HELD = np.uint16(1 << 15)
"""A flag of rows that are held: a drain that is started anew tells by it where they were."""
_DEVICE = np.uint16(Flag.DEVICE)


class DeviceAmends:
    """Brings the spans of one ring together with the times that their device was at them.

    Attributes:
        held: Finished spans that wait for these.
    """

    def __init__(self) -> None:
        self.held = empty_rows()
        self._times = np.zeros(0, DEVICE_DTYPE)

    def place(self, rows: Column, times: Column, now: int, is_last: bool) -> Column:
        """Return *rows*, and those held, with the device's *times* where these are known.

        Args:
            rows: Finished spans.
            times: Rows of `DEVICE_DTYPE`.
            now: When the process was last seen to record, in ns.
            is_last: Whether nothing more will come.
        """
        waits = rows["flags"] & _DEVICE != 0
        if not (len(times) or len(self.held) or waits.any()):
            return rows
        # The times of a stage come before it does, which is held until its step is over.
        self._times = np.concatenate([self._times, times])[-MOST_WAITING:]
        waiting = stack_rows([self.held, rows.compress(waits)])
        known = self._find(waiting["span_no"])
        found = np.flatnonzero(known >= 0)
        _apply(waiting, found, self._times[known[found]])
        self._times = np.delete(self._times, known[found])
        stays = (known < 0) & (waiting["end"] + PATIENCE_NS > now) & (not is_last)
        waiting["flags"] &= ~(_DEVICE | HELD)
        self.held = waiting.compress(stays)
        self.held["flags"] |= _DEVICE | HELD
        return stack_rows([rows.compress(~waits), waiting.compress(~stays)])

    def _find(self, numbers: Column) -> Column:
        """Return for each of *numbers* where its times are, -1 for nowhere."""
        known = self._times["span_no"]
        if not len(known):
            return np.full(len(numbers), -1)
        order = np.argsort(known, kind="stable")
        at = order[np.minimum(np.searchsorted(known[order], numbers), len(order) - 1)]
        return np.where(known[at] == numbers, at, -1)


def _apply(rows: Column, which: Column, times: Column) -> None:
    for name in ("start", "end"):
        rows[name][which] = times[name]
    rows["source"][which] = times["source"] & 15
    is_stage = rows["level"][which] == Level.STEP
    stages = which[is_stage]
    rows["size"][stages] = times["total"][is_stage]
    rows["b"][stages] = np.minimum(times["residual"][is_stage], np.iinfo(np.int32).max)

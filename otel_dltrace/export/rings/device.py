"""Spans at which a device was later than the host: they wait until it is known when, and get its times."""

import numpy as np

from otel_dltrace.export.rings.records import DEVICE_DTYPE
from otel_dltrace.model.arrays import Column, places_in
from otel_dltrace.model.semconv import Flag, Level
from otel_dltrace.model.spans import empty_rows, stack_rows

PATIENCE_S, MOST_PATIENCE_S = 5.0, 60.0
"""How long a span waits before it goes on with the host's times, by the drain's clock: its process may hang."""
PATIENCE_STEPS = 3
"""... and for so many steps where these are longer: a device may be a step behind, and is asked where stages end."""
MOST_WAITING = 10_000
HELD = np.uint16(1 << 15)
"""A flag of rows that are held: a drain that is started anew tells by it where they were."""
_DEVICE = np.uint16(Flag.DEVICE)


class DeviceAmends:
    """Brings the spans of one ring together with the times that their device was at them.

    A step goes on with all of its stages: a device may come to them when the host is some steps further.

    Attributes:
        held: Finished spans that wait for these, and the steps of the stages among them.
        late: How many times came for spans that had gone on without them.
    """

    def __init__(self) -> None:
        self.held = empty_rows()
        self.late = 0
        self._since: Column = np.zeros(0)
        self._patience = PATIENCE_S
        self._times = np.zeros(0, DEVICE_DTYPE)
        self._given_up = np.zeros(0, np.uint32)

    def place(self, rows: Column, times: Column, now: float, is_last: bool) -> Column:
        """Return *rows*, and those held, with the device's *times* where these are known.

        Args:
            rows: Finished spans.
            times: Rows of `DEVICE_DTYPE`.
            now: Seconds of the drain's clock.
            is_last: Whether nothing more will come.
        """
        if not (len(times) or len(self.held) or np.bitwise_or.reduce(rows["flags"]) & _DEVICE):
            return rows
        waits = rows["flags"] & _DEVICE != 0
        is_late = np.isin(times["span_no"], self._given_up)
        self.late += int(is_late.sum())
        # The times of a stage come before it does, which is held until its step is over.
        self._times = np.concatenate([self._times, times[~is_late]])[-MOST_WAITING:]
        of_steps = rows["level"] == Level.STEP
        self._patience = _patience(rows.compress(of_steps), self._patience)
        waits |= of_steps & np.isin(rows["step"], rows["step"].compress(waits & of_steps))
        waiting = stack_rows([self.held, rows.compress(waits)])
        since = np.append(self._since, np.full(len(waiting) - len(self._since), now))
        known = places_in(waiting["span_no"], self._times["span_no"])
        found = np.flatnonzero(known >= 0)
        _apply(waiting, found, self._times[known[found]])
        self._times = np.delete(self._times, known[found])
        lacks = (waiting["flags"] & _DEVICE != 0) & (known < 0)
        waiting["flags"] &= ~(_DEVICE | HELD)
        asks = lacks & (since + self._patience > now) & (not is_last)
        self._given_up = np.concatenate([self._given_up, waiting["span_no"].compress(lacks & ~asks)])[-MOST_WAITING:]
        waiting["flags"][asks] |= _DEVICE
        of_steps = waiting["level"] == Level.STEP
        stays = asks | of_steps & np.isin(waiting["step"], waiting["step"].compress(asks & of_steps))
        self.held, self._since = waiting.compress(stays), since[stays]
        self.held["flags"] |= HELD
        return stack_rows([rows.compress(~waits), waiting.compress(~stays)])


def _patience(steps: Column, before: float) -> float:
    """Return how long to wait, s: by how long the *steps* took, and their stages; as *before* where there are none."""
    if not len(steps):
        return before
    longest = int((steps["end"] - steps["start"]).max()) / 1e9
    return min(max(PATIENCE_S, PATIENCE_STEPS * longest), MOST_PATIENCE_S)


def _apply(rows: Column, which: Column, times: Column) -> None:
    for name in ("start", "end"):
        rows[name][which] = times[name]
    rows["source"][which] = times["source"] & 15
    is_stage = rows["level"][which] == Level.STEP
    stages = which[is_stage]
    rows["size"][stages] = times["total"][is_stage]
    rows["b"][stages] = np.minimum(times["residual"][is_stage], np.iinfo(np.int32).max)

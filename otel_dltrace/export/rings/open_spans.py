"""What one process has begun and not ended, as far as its ring was read, and the stages of steps that go on."""

from collections.abc import Callable

import numpy as np

from otel_dltrace.export.rings.records import Decoded
from otel_dltrace.model import semconv
from otel_dltrace.model.arrays import Column, is_among
from otel_dltrace.model.descriptors import Descriptors
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.semconv import Flag, Level
from otel_dltrace.model.spans import empty_rows, stack_rows
from otel_dltrace.model.time import LONG_NS

MAX_OPEN = 10_000
"""Open spans that are held: where the ring was lapped their ends never come."""
REMEMBERED_STEPS = 64
"""A stage that comes when its step has gone is late; so many steps later, it is what came first."""


class OpenSpans:
    """Holds them until nothing more can change them.

    Attributes:
        late: How many stages came when their step had been passed on.

    Args:
        table: Returns the names that rows speak of, as far as they are known.
    """

    def __init__(self, table: Callable[[], Descriptors]) -> None:
        self._table = table
        self.late = 0
        self._begun, self._stages = empty_rows(), empty_rows()
        self._ended_before = np.zeros(0, np.uint32)
        self._closing: list[int] = []
        self._closed: set[int] = set()
        self._reached: dict[int, int] = {}
        self._passed, self._is_passed = 0, False
        self._lost = np.zeros(0, np.uint32)

    @property
    def is_closing(self) -> bool:
        """Whether stages, or a step that was passed, wait for the next scan alone."""
        return bool(self._closing) or self._is_passed

    @property
    def rows(self) -> Column:
        """Spans that are open, and stages of steps that are not over."""
        return stack_rows([self._begun, self._stages])

    def hold_again(self, rows: Column) -> None:
        """Hold the `rows` of an earlier drain."""
        is_open = rows["end"] == 0
        self._begun, self._stages = rows.compress(is_open), rows.compress(~is_open)
        self._closing = self._steps_of(self._stages)

    def hold_begun(self, decoded: Decoded) -> None:
        """Hold the spans that are still open.

        A scan reads chunk after chunk, so a BEGIN in one may come a scan later than its SPAN in the next.
        """
        # Phases have no BEGIN, but for those outside any step.
        has_begun = (decoded.spans["level"] <= Level.COLLECTIVE) | (decoded.spans["step"] == NO_STEP)
        ended = np.concatenate([decoded.own["span_no"], decoded.spans["span_no"].compress(has_begun)])
        over, self._ended_before = np.concatenate([self._ended_before, ended]), ended
        open_now = stack_rows([self._begun, decoded.begun])
        self._begun = open_now.compress(~is_among(open_now["span_no"], over))
        if len(self._begun) > MAX_OPEN:
            self._begun = self._begun[-MAX_OPEN // 2 :]

    def lost(self, decoded: Decoded, is_lapped: bool, is_last: bool) -> Column:
        """Return the steps whose own spans were overwritten unread, cut off at the last that was read of each.

        A process is in one step at a time: one that it had passed by the last scan has ended, and by this one if it
        *is_last*. *is_lapped* says that something was overwritten. What is open in such a step may go on, on another
        thread, and stays.
        """
        before = self._passed
        self._passed = max([before, *self._steps_of(decoded.begun), *self._steps_of(decoded.own)])
        is_step = self._table().is_kind(self._begun, semconv.STEP)
        is_lost = is_step & (self._begun["step"] < (self._passed if is_last else before)) & is_lapped
        self._reached = {step: self._last_of(step, decoded) for step in self.steps()}
        lost, self._begun = newest(self._begun.compress(is_lost)), self._begun.compress(~is_lost)
        steps = np.concatenate([self._lost, lost["step"]])
        self._lost = steps.compress(is_among(steps, self._begun["step"]))
        self._is_passed = is_lapped and min(self.steps(), default=self._passed) < self._passed
        lost["end"] = [max(int(row["start"]), self._reached[int(row["step"])]) for row in lost]
        lost["flags"] |= np.uint16(Flag.TRUNCATED)
        return lost

    def _last_of(self, step: int, decoded: Decoded) -> int:
        """Return when the last of what was read of *step* ended."""
        ends = (rows["end"].compress(rows["step"] == step) for rows in (decoded.spans, decoded.own))
        return max(self._reached.get(step, 0), *(int(end.max(initial=0)) for end in ends))

    def release(self, rows: Column, early: int) -> Column:
        """Take in *rows*, steps and stages, of which *early* came before the last scan; return those that are final.

        They are so one scan after their step's end: a stage that ended just before it may come so late.
        """
        closed = [*self._closing, *self._steps_of(rows[:early])]
        self._closing = self._steps_of(rows[early:])
        steps = rows["step"].tolist()
        if not self._closed.isdisjoint(steps):
            is_late = [step in self._closed for step in steps]
            self.late += sum(is_late)
            rows = rows.compress(np.logical_not(is_late))
        self._stages = newest(stack_rows([self._stages, rows]))
        if not closed:
            return empty_rows()
        last = max(closed)
        self._closed = {step for step in self._closed.union(closed) if step > last - REMEMBERED_STEPS}
        is_final = self._stages["step"] <= last
        final, self._stages = self._stages.compress(is_final), self._stages.compress(~is_final)
        return final

    def _steps_of(self, rows: Column) -> list[int]:
        """Return which steps ended, of *rows* that are steps and stages."""
        ended: list[int] = rows["step"].compress(self._table().is_kind(rows, semconv.STEP)).tolist()
        return ended

    def steps(self) -> list[int]:
        """Return the steps that have begun and not ended."""
        return self._steps_of(self._begun)

    def outside(self) -> Column:
        """Return what is open outside any step, without ids."""
        return self._begun.compress(self._begun["step"] == NO_STEP)

    def truncate(self, last: int) -> Column:
        """Return what is still open, closed where the process's last record was, and hold nothing more."""
        rows = self._cut_off(self._begun, last, Flag.TRUNCATED)
        self._begun, self._stages = empty_rows(), empty_rows()
        return rows

    def standing(self, now: int) -> Column:
        """Return what is open, cut off *now* (ns), if the process has been in a step or an operation for long.

        In a step whose own end was overwritten nothing is known to be open.
        """
        known = self._begun.compress(~is_among(self._begun["step"], self._lost))
        since = known["start"].compress(known["level"] <= Level.COLLECTIVE)
        if int(since.min(initial=now)) > now - LONG_NS:
            return empty_rows()
        return self._cut_off(known, now, Flag.TRUNCATED | Flag.OPEN)

    def _cut_off(self, begun: Column, end: int, flags: Flag) -> Column:
        """Return the stages that wait for their step's end, and what has *begun* with *end* and *flags*."""
        begun = newest(begun).copy()
        begun["end"] = np.maximum(begun["start"], end)
        begun["flags"] |= np.uint16(flags)
        return stack_rows([self._stages, begun])


def newest(rows: Column) -> Column:
    """Return of each span in *rows* the last row: a stage is written again, longer, with every piece of it.

    What came last is not always behind: without the GIL each thread writes in a chunk of its own.
    """
    order = np.lexsort((rows["a"], rows["end"], rows["span_no"]))
    numbers = rows["span_no"].take(order)
    is_last = np.append(numbers[1:] != numbers[:-1], True)[: len(rows)]
    return rows if is_last.all() else rows.take(np.sort(order.compress(is_last)))

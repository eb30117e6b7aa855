"""Which operations have a callback that says when they are done.

A callback on a work's future knows the end exactly. But it runs on a thread of the backend that
takes Python's lock from the program, which costs tens of microseconds, before the backend goes on to
the next operation. A program that waits for what it has launched, or looks often, would have known
without. So a kind of operation has callbacks only while its ends come unseen, as the program computes.
"""

from time import monotonic_ns

from otel_dltrace.model.semconv import PRECISE_NS
from otel_dltrace.record.operation import Operation

LARGE = 1 << 16
"""From so many bytes on, an operation takes longer than a callback costs."""
IN_FLIGHT = 4
"""How many small operations have a callback at a time."""

KINDS = 1 << 12
"""How many kinds are known by whether their ends are seen."""
UNSEEN = 2
"""An end that came unseen counts as much as so many that were seen."""
TRUST = 8
"""How far a kind's ends count, either way."""


class Kinds:
    """What is known of the kinds of operations of one process: what recurs in each step, a call with as many bytes.

    Attributes:
        in_flight: How many operations have a callback.
        resumed: When the program last went on after it was blocked.
    """

    def __init__(self) -> None:
        self._scores: dict[tuple[int, int], int] = {}
        self.in_flight = self.resumed = 0

    def wants_callback(self, operation: Operation) -> bool:
        """Return whether *operation*, which begins, shall say itself when it is done."""
        score = self._scores.get((operation.descriptor, operation.size), 0)
        return score <= 0 and (operation.size >= LARGE or self.in_flight < IN_FLIGHT)

    def learn(self, operation: Operation, since: int, now: int = 0) -> None:
        """Know that *operation*, which may have been done since *since*, is seen to be *now*.

        Where the program was blocked until just now it has computed nothing unseen.
        """
        unseen = (now or monotonic_ns()) - max(since, self.resumed) > PRECISE_NS
        kind = operation.descriptor, operation.size
        score = self._scores.get(kind, 0) + (-UNSEEN if unseen else 1)
        if -TRUST <= score <= TRUST:
            if len(self._scores) >= KINDS:
                self._scores.clear()
            self._scores[kind] = score

"""In the place of a `StepGate` where no spans go out: which steps have ended, and no spans held."""

from collections.abc import Iterator

from otel_dltrace.export.outgoing.gate import Outgoing, ends_of
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP


class StepEnds:
    """Says of each step that it has ended, once, without its spans: what is told of the run needs no more."""

    late = 0
    has_loose = False

    def __init__(self) -> None:
        self._ready: list[Outgoing] = []

    def add(self, rows: Column, is_step: Column, *_: float) -> None:
        """Take in finished *rows*, of which *is_step* masks the rank's step spans."""
        self._ready += _without_spans(rows, is_step)

    def due(self, *_: float) -> list[Outgoing]:
        """Return the steps that have ended since the last call."""
        out, self._ready = self._ready, []
        return out

    def undecided_from(self) -> int:
        """Return NO_STEP: nothing is held."""
        return NO_STEP

    def left_out(self, step: int) -> None:
        """Return None: nothing goes out, and nothing is left out of it."""


def _without_spans(rows: Column, is_step: Column) -> Iterator[Outgoing]:
    for step, extent, seq in ends_of(rows, is_step):
        yield Outgoing(step, rows[:0], extent=extent, seq=seq)

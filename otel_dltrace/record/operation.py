"""The spans that are open in a context: a program's phases, and operations, which are written twice (contract 3)."""

from contextvars import ContextVar
from time import monotonic_ns
from typing import Protocol

from otel_dltrace.model.semconv import Flag, Level, Source
from otel_dltrace.record.recorder import Recorder

# Plain ints: reading a member of an enum costs a tenth of a record.
_COLLECTIVE, _HOST_DONE = int(Level.COLLECTIVE), int(Source.HOST_DONE)


class Open(Protocol):
    """A span that is open in a context: a phase or an operation."""

    step: int

    def drawn(self) -> int:
        """Return the span's number, for a child."""


open_span: ContextVar[Open | None] = ContextVar("otel_dltrace.open_span", default=None)
"""The innermost open span of this context; it is a parent in its own step alone."""


class Operation:
    """A span that is written when it begins and again when it is over: a collective, a push-pull."""

    __slots__ = ("_closed", "_parent", "a", "b", "descriptor", "flags", "number", "recorder", "size", "start", "step")

    def __init__(
        self, recorder: Recorder, descriptor: int, size: int = 0, a: int = 0, b: int = -1, flags: int = 0
    ) -> None:
        outer = open_span.get()
        self.step = now = recorder.step
        self._parent = parent = outer.drawn() if outer is not None and outer.step == now else 0
        self.recorder, self.descriptor = recorder, descriptor
        self.size, self.flags, self.a, self.b = size, flags, a, b
        self._closed = False
        self.start = start = monotonic_ns()
        self.number = recorder.begin(descriptor, _COLLECTIVE, start, size, parent, 0, a, b, flags, now)

    def drawn(self) -> int:
        """Return the span's number, for a child."""
        return self.number

    def step_aside(self) -> None:
        """Have those that ask for their parent from now on be below what this one, which is over, is below."""
        self.number = self._parent

    def close(self, seq: int = 0, source: int = _HOST_DONE, error: BaseException | None = None, end: int = 0) -> None:
        """End the span at *end* (monotonic ns, default now); only the first call counts."""
        if self._closed or not self.number:
            return
        self._closed = True
        flags = self.flags
        if error is not None:
            self.recorder.error(self.number, Level.COLLECTIVE, error, self.step)
            flags |= Flag.ERROR
        self.recorder.span(
            self.descriptor,
            _COLLECTIVE,
            self.start,
            end or monotonic_ns(),
            self.size,
            self._parent,
            seq,
            0,
            self.a,
            self.b,
            flags,
            source,
            self.number,
            self.step,
        )

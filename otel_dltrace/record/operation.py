"""The spans that are open in a context: a program's phases, and operations, which are written twice (contract 3)."""

from collections.abc import Iterator
from contextvars import ContextVar, Token
from time import monotonic_ns
from typing import Protocol

from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.semconv import Flag, Level, Source
from otel_dltrace.record.recorder import Recorder

# Plain ints: reading a member of an enum costs a tenth of a record.
_COLLECTIVE, _HOST_DONE = int(Level.COLLECTIVE), int(Source.HOST_DONE)
_MOST_NESTED = 1000  # one that is entered within itself has no end of outer ones


class Open(Protocol):
    """A span that is open in a context: a phase or an operation."""

    step: int
    token: "Token[Open | None] | None"
    """What brings back the span that was open before; None where that one has ended first."""

    def drawn(self) -> int:
        """Return the span's number, for a child."""


open_span: ContextVar[Open | None] = ContextVar("otel_dltrace.open_span", default=None)
"""The innermost open span of this context; it is a parent in its own step alone, an operation of all its phases."""


def end_before_inner(over: Open) -> None:
    """Leave the context where blocks that began in *over* are not over: a generator's, that goes on later.

    Behind them is then what was before *over*, and their own ends change nothing.

    Raises:
        ValueError: *over* began in another context.
    """
    token = over.token
    if token is None:
        return
    inners = _begun_in(over)
    for inner in inners:
        inner.token = None
    if inners:  # be it in a copy of the context, where the token resets nothing
        open_span.set(None if token.old_value is Token.MISSING else token.old_value)
    open_span.reset(token)


def step_within(outer: Open, now: int) -> int:
    """Return the step of a phase that begins below *outer*, which is of another step than *now*, the current one.

    The training thread may be ahead of who communicates. A phase may be around many steps, and is in none of theirs;
    what it is part of, an operation, keeps its own.
    """
    for above in _outwards(outer):
        if isinstance(above, Operation):
            return above.step if above.holds else now
    return now


def _begun_in(over: Open) -> list[Open]:
    """Return the open blocks of this context that began in *over*."""
    inners: list[Open] = []
    for inner in _outwards(open_span.get()):
        if inner is over:
            return inners
        inners.append(inner)
    return []


def _outwards(inner: Open | None) -> Iterator[Open]:
    """Yield *inner*, and then what was open around each when it began."""
    for _ in range(_MOST_NESTED):
        if inner is None:
            return
        yield inner
        token: Token[Open | None] | None = getattr(inner, "token", None)
        inner = None if token is None or token.old_value is Token.MISSING else token.old_value


class Operation:
    """A span that is written when it begins and again when it is over: a collective, a push-pull."""

    __slots__ = (
        "_closed",
        "_parent",
        "a",
        "b",
        "descriptor",
        "flags",
        "number",
        "recorder",
        "size",
        "start",
        "step",
        "token",
    )
    token: "Token[Open | None] | None"

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

    @property
    def holds(self) -> bool:
        """Whether phases below it have its step, whichever is current."""
        return not self._closed and self.step != NO_STEP

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

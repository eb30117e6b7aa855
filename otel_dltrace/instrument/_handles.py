"""Operations that a framework starts with one call, which returns a handle, and ends with another."""

import sys
from dataclasses import dataclass
from time import monotonic_ns

from otel_dltrace.instrument._ends import source_of
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import PHASE, WAIT, Flag, Level, Source
from otel_dltrace.record.operation import Operation
from otel_dltrace.record.tracer import Tracer

# Plain ints: an operator on a member of an enum costs as much as a record.
ASYNC = int(Flag.ASYNC)
_HOST_DONE, _HOST_ISSUE = int(Source.HOST_DONE), int(Source.HOST_ISSUE)


@dataclass(slots=True)
class Pending:
    """What is under way behind one handle: operations and their numbers; *seen* is when it was last not done."""

    operations: list[Operation]
    numbers: list[int]
    seen: int = 0

    def close(self, source: int = _HOST_DONE, error: BaseException | None = None, end: int = 0) -> None:
        """End all of it at *end* (monotonic ns, default now)."""
        end = end or monotonic_ns()
        for operation, number in zip(self.operations, self.numbers, strict=True):
            operation.close(number, source, error, end)

    def found_done(self, now: int) -> None:
        """End what was found done at *now*."""
        self.close(source_of(self.seen, now), end=now)


Wait = tuple[Pending, int, bool]
"""What is waited for, since when, and whether it was done by then."""


class Handles:
    """What is under way in the process that *tracer* follows, by handle.

    Args:
        tracer: Where it is recorded.
        ops: The framework's module that has ``poll`` and knows its handles.
    """

    def __init__(self, tracer: Tracer, ops: str) -> None:
        self._recorder = tracer.recorder
        self._ops = ops
        self._wait = tracer.recorder.intern(Descriptor(PHASE, WAIT))
        self.pending: dict[int, Pending] = {}
        tracer.leaving.append(self.leave)

    def launched(self, handle: int, pending: Pending) -> None:
        """Know that *pending* is under way and has *handle*."""
        pending.seen = monotonic_ns()
        self.pending[handle] = pending

    def wait_begins(self, handle: int) -> Wait | None:
        """Return the wait for *handle* that begins; None where it is none of ours."""
        pending = self.pending.pop(handle, None)
        if pending is None:
            return None
        is_async = pending.operations[0].flags & ASYNC
        return pending, monotonic_ns(), bool(is_async and self._is_done(handle))

    def waited(self, wait: Wait, error: BaseException | None = None) -> None:
        """End what was waited for; the time blocked is a child, of the first of several."""
        end = monotonic_ns()
        pending, start, was_done = wait
        if was_done and error is None:
            pending.found_done(start)
            return
        operation = pending.operations[0]
        if operation.flags & ASYNC:
            self._recorder.span(self._wait, Level.PHASE, start, end, parent=operation.number, step=operation.step)
        pending.close(error=error, end=end)

    def _is_done(self, handle: int) -> bool:
        """Return whether what has *handle* is done, past the site around ``poll``: it is not the program that asks."""
        ops = sys.modules[self._ops]
        return handle not in ops._handle_map or bool(getattr(ops.poll, "__wrapped__", ops.poll)(handle))

    def leave(self) -> None:
        """End what nobody has waited for, as issued: its end will not be known."""
        while self.pending:
            _, pending = self.pending.popitem()
            pending.close(_HOST_ISSUE, end=pending.seen)


def asked_done(pending: Pending, done: bool) -> None:
    """Note what the program learned when it asked whether *pending* is done; a second time finds it closed."""
    now = monotonic_ns()
    if done:
        pending.found_done(now)
    else:
        pending.seen = now

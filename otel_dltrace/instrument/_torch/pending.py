"""An operation that was launched and not waited for yet: one of its ends is written, the first that is known."""

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._ends import source_of
from otel_dltrace.model.semconv import Source
from otel_dltrace.record.device import Mark
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.operation import Operation


class Pending:
    """An operation under way.

    Attributes:
        seen: When it was last known not to be done.
        done: When its callback saw it done; 0 before.
        watched: It has a callback.
        pollable: Its work says whether it is done; those of point-to-point calls do not.
        mark: When the device was told of it, where that is followed.
        asked: When the device was told to wait for it.
    """

    __slots__ = (
        "__weakref__",
        "asked",
        "closed",
        "done",
        "group",
        "mark",
        "operation",
        "pollable",
        "seen",
        "seq",
        "settle",
        "source",
        "watched",
    )

    def __init__(
        self,
        operation: Operation,
        seq: int,
        source: int,
        *,
        pollable: bool = True,
        settle: Callable[["Pending", Any], None] | None = None,
    ) -> None:
        self.operation, self.seq, self.source = operation, seq, source
        self.pollable, self.settle = pollable, settle
        self.group: Any = None
        self.mark: Mark | None = None
        self.asked: Mark | None = None
        self.seen, self.done = monotonic_ns(), 0
        self.closed = self.watched = False

    def close(self, end: int, source: int = -1, error: BaseException | None = None) -> None:
        """End it at *end*."""
        self.closed = True
        self.operation.close(self.seq, self.source if source < 0 else source, error, end)

    def close_seen(self, now: int) -> None:
        """End it, found done at *now*: some time since it was last seen."""
        self.close(now, source_of(self.seen, now))

    def give_up(self) -> None:
        """End it, whose end nobody will know: it was issued."""
        if not self.closed:
            self.close(self.seen, Source.HOST_ISSUE)

    def __del__(self) -> None:
        """Write what nobody waited for."""
        if not self.closed:
            guarded(self.give_up)()

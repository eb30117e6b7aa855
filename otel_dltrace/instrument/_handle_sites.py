"""What the PyTorch plugins of Horovod and of BytePS, which began as a copy of it, have in common.

A private function for each operation returns a handle, ``synchronize`` waits for it, ``poll`` asks whether it is done;
a call that blocks is built of these.
"""

import threading
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, Generic, TypeVar

from otel_dltrace.instrument._handles import Handles, Pending, Wait, asked_done
from otel_dltrace.instrument._sites import Args, Attachment, Kwargs, Row, Site, Undo
from otel_dltrace.model.semconv import Level
from otel_dltrace.record.tracer import Tracer, live

LEVEL = Level.COLLECTIVE


class _Local(threading.local):
    blocking = 0


class Calls:
    """The calls of the process that *tracer* follows.

    Attributes:
        handles: What is under way.
        local: How many blocking calls this thread is in.
    """

    def __init__(self, tracer: Tracer, ops: str) -> None:
        self.tracer = tracer
        self.local = _Local()
        self.handles = Handles(tracer, ops)


C = TypeVar("C", bound=Calls)


class Plugin(Generic[C]):
    """A plugin.

    Args:
        ops: The module of its functions.
        follow: Makes what follows their calls for a tracer.
    """

    def __init__(self, ops: str, follow: Callable[[Tracer], C]) -> None:
        self._ops, self._follow = ops, follow
        self._calls: C | None = None

    def here(self) -> C:
        """Return the calls of the live tracer."""
        tracer = live.tracer
        assert tracer is not None
        if self._calls is None or self._calls.tracer is not tracer:
            self._calls = self._follow(tracer)
        return self._calls

    def rows(self, blocking: Iterable[str]) -> Iterable[Row]:
        """Yield the rows of what takes a handle, and of the functions *blocking*."""
        yield Site(self._ops, "synchronize", self._wait_begins, self._waited, self._wait_failed, LEVEL)
        yield Site(self._ops, "poll", self._asked, asked_done, level=LEVEL)
        for name in blocking:
            yield Site(self._ops, name, self._blocking_begins, _blocking_over, _blocking_over, LEVEL)
        yield Attachment(self._ops, self._attach)

    def _wait_begins(self, args: Args, kwargs: Kwargs) -> Wait | None:
        return self.here().handles.wait_begins(_handle(args, kwargs))

    def _waited(self, wait: Wait, _result: object) -> None:
        self.here().handles.waited(wait)

    def _wait_failed(self, wait: Wait, error: BaseException) -> None:
        self.here().handles.waited(wait, error)

    def _asked(self, args: Args, kwargs: Kwargs) -> Pending | None:
        return self.here().handles.pending.get(_handle(args, kwargs))

    def _blocking_begins(self, _args: Args, _kwargs: Kwargs) -> Calls:
        calls = self.here()
        calls.local.blocking += 1
        return calls

    def _attach(self, _module: ModuleType) -> Undo:
        def detach() -> None:
            if self._calls is not None:
                self._calls.handles.leave()

        return detach


def _handle(args: Args, kwargs: Kwargs) -> Any:
    return args[0] if args else kwargs["handle"]


def _blocking_over(calls: Calls, _result: object) -> None:
    calls.local.blocking -= 1

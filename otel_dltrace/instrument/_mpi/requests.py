"""Requests of mpi4py under way: each ends at the wait or test that completes it."""

import weakref
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._ends import source_of
from otel_dltrace.instrument._mpi.groups import Group
from otel_dltrace.instrument._sites import Args, Kwargs
from otel_dltrace.model.semconv import PRECISE_NS, Flag, Level, Source
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.operation import Operation
from otel_dltrace.record.tracer import Tracer

FLAG_ASYNC = int(Flag.ASYNC)  # reading a member of an enum costs a tenth of a record

Begin = Callable[[], list["Part"]]
"""Begins the operations of a persistent request that is started."""


class Part:
    """One operation of a call, and how its number is found out.

    Attributes:
        operation: The span.
        seq: Its number, 0 if not known (yet).
        settle: For a receive from any rank or with any tag: learns from the status what it was.
        counted: What numbered it: its group, its series, and whether it is a send; None for a collective.
    """

    __slots__ = ("counted", "operation", "seq", "settle")

    def __init__(
        self,
        operation: Operation,
        seq: int = 0,
        settle: "Settle | None" = None,
        counted: tuple[Group, str, bool | None] | None = None,
    ) -> None:
        self.operation, self.seq, self.settle, self.counted = operation, seq, settle, counted

    def take_back(self) -> None:
        """Give its number to the next one: it has not happened."""
        if self.seq and self.counted is not None:
            group, series, sends = self.counted
            group.take_back(series, self.operation.a, self.operation.b, sends)
            self.seq = 0

    def follows(self, other: "Part") -> bool:
        """Return whether it is a later message than *other* of the same two ranks with the same tag."""
        mine, others = self.operation, other.operation
        return self.counted == other.counted and (mine.a, mine.b) == (others.a, others.b) and self.seq > other.seq

    def close(self, end: int, source: int, status: Any = None) -> None:
        """End it."""
        if self.settle is not None and status is not None:
            self.settle(self, status)
        self.operation.close(self.seq, source, None, end)


Settle = Callable[[Part, Any], None]


class Pending:
    """A request under way: its operations, and when it was last known not to be done."""

    __slots__ = ("__weakref__", "is_cancelled", "parts", "request", "seen")

    def __init__(self, parts: list[Part], request: "weakref.ref[Any]") -> None:
        self.parts, self.request, self.is_cancelled = parts, request, False
        self.seen = monotonic_ns()

    @property
    def needs_status(self) -> bool:
        """Whether the status alone tells what was received, or that nothing was, since it was cancelled."""
        return self.is_cancelled or any(part.settle is not None for part in self.parts)

    def close(self, end: int, source: int, status: Any = None) -> None:
        """End all its operations."""
        for part in self.parts:
            part.close(end, source, status)


class Wait:
    """A wait or test that has begun: for which requests, since when."""

    __slots__ = ("many", "requests", "since", "statuses", "waiting")

    def __init__(self, requests: Sequence[Any], many: str, statuses: Any, *, waiting: bool) -> None:
        self.requests, self.many, self.statuses, self.waiting = requests, many, statuses, waiting
        self.since = monotonic_ns()


class Requests:
    """The requests of one process.

    They are known by identity, for they have no hash; a weak reference says when one is gone.
    """

    def __init__(self, tracer: Tracer, wait: int, new_status: Callable[[], Any]) -> None:
        self._recorder, self._wait, self._new_status = tracer.recorder, wait, new_status
        self._pending: dict[int, Pending] = {}
        self._persistent: dict[int, tuple[Begin, weakref.ref[Any]]] = {}
        tracer.leaving.append(self.leave)

    def launched(self, request: Any, parts: list[Part]) -> None:
        """Know that *request* is under way."""
        key = id(request)

        def gone(ref: "weakref.ref[Any]") -> None:
            pending = self._pending.get(key)
            if pending is not None and pending.request is ref:
                del self._pending[key]
                guarded(pending.close)(pending.seen, Source.HOST_ISSUE)

        self._pending[key] = Pending(parts, weakref.ref(request, gone))

    def made(self, request: Any, begin: Begin) -> None:
        """Know that *request* is persistent, and how its operations begin."""
        key = id(request)

        def gone(ref: "weakref.ref[Any]") -> None:
            known = self._persistent.get(key)
            if known is not None and known[1] is ref:
                del self._persistent[key]

        self._persistent[key] = begin, weakref.ref(request, gone)

    # -- started ----------------------------------------------------------------------------------

    def start_begins(self, requests: Sequence[Any]) -> list[tuple[Any, list[Part]]] | None:
        """Return the operations of persistent *requests* that are being started."""
        known = [(request, self._persistent.get(id(request))) for request in requests]
        return [(request, made[0]()) for request, made in known if made is not None] or None

    def started(self, begun: list[tuple[Any, list[Part]]]) -> None:
        """Know that they have been started."""
        for request, parts in begun:
            self.launched(request, parts)

    # -- waited for -------------------------------------------------------------------------------

    def wait_begins(self, many: str, waiting: bool, args: Args, kwargs: Kwargs) -> Wait | None:
        """Return the wait (or test) for requests that begins; None where none is ours.

        Where the status says who has sent, and the program does not ask for it, we do.
        """
        if not self._pending:
            return None
        at = 1 if many else 0
        given = args[at] if len(args) > at else kwargs.get("requests")
        if many and not hasattr(given, "__len__"):
            return None  # mpi4py refuses it; to look into it may use it up
        requests: Any = given if many else (given,)
        pending = [self._pending.get(id(request)) for request in requests]
        if not any(pending):
            return None
        name = "statuses" if many in ("all", "some") else "status"
        statuses = args[at + 1] if len(args) > at + 1 else kwargs.get(name)
        if statuses is None and len(args) <= at + 1 and any(p is not None and p.needs_status for p in pending):
            statuses = kwargs[name] = [] if name == "statuses" else self._new_status()
        return Wait(requests, many, statuses, waiting=waiting)

    def waited(self, wait: Wait, result: Any) -> None:
        """End what has been completed; note what has not."""
        end = monotonic_ns()
        done = _completed(wait, result)
        blocked = wait.waiting and end - wait.since > PRECISE_NS
        first = True
        for place, at in enumerate(done):
            key = id(wait.requests[at])
            pending = self._pending.pop(key, None)
            if pending is None:
                continue
            if wait.waiting and first:
                self._write_wait(pending, wait.since, end)
            first = False
            source = Source.HOST_DONE if blocked and len(done) == 1 else source_of(pending.seen, end)
            status = _status_of(wait, at, place)
            if pending.is_cancelled and status is not None and status.Is_cancelled():
                self._take_back(pending.parts)
            pending.close(end, source, status)
        if not wait.waiting and len(done) < len(wait.requests):
            for request in wait.requests:
                left = self._pending.get(id(request))
                if left is not None:
                    left.seen = end

    def cancelled(self, request: Any) -> None:
        """Know that *request* may have been cancelled, which its status will say."""
        pending = self._pending.get(id(request))
        if pending is not None:
            pending.is_cancelled = True

    def _take_back(self, parts: list[Part]) -> None:
        """Give the numbers of the messages *parts*, which were cancelled, to those that follow them."""
        under_way = [part for pending in self._pending.values() for part in pending.parts]
        for part in parts:
            for later in under_way:
                later.seq -= later.follows(part)
            part.take_back()

    def _write_wait(self, pending: Pending, start: int, end: int) -> None:
        outer = pending.parts[0].operation
        self._recorder.span(self._wait, Level.PHASE, start, end, parent=outer.number, step=outer.step)

    def wait_failed(self, wait: Wait, error: BaseException) -> None:
        """End with *error* what is complete all the same: MPI has let go of it."""
        for request in wait.requests:
            pending = self._pending.get(id(request))
            if pending is not None and self._is_over(request):
                del self._pending[id(request)]
                for part in pending.parts:
                    part.operation.close(part.seq, Source.HOST_DONE, error)

    def _is_over(self, request: Any) -> bool:
        """Return whether nothing of *request* is under way; a persistent one stays, to be started again."""
        return not request or (id(request) in self._persistent and request.Get_status())

    def freed(self, request: Any) -> None:
        """Know that nobody will wait for *request*."""
        pending = self._pending.pop(id(request), None)
        if pending is not None:
            pending.close(pending.seen, Source.HOST_ISSUE)

    def leave(self) -> None:
        """Write what nobody has waited for."""
        while self._pending:
            _, pending = self._pending.popitem()
            pending.close(pending.seen, Source.HOST_ISSUE)
        self._persistent.clear()


def _completed(wait: Wait, result: Any) -> Sequence[int]:
    """Return which of the requests are done, by *result*: objects come after what says it."""
    if wait.waiting and wait.many in ("", "all"):
        return range(len(wait.requests))  # *result* is what came
    head = result[0] if isinstance(result, tuple) else result
    if wait.many == "any":
        flag = wait.waiting or result[1]
        return [head] if flag and head >= 0 else []
    if wait.many == "some":
        return head or []
    return range(len(wait.requests)) if head else []


def _status_of(wait: Wait, at: int, place: int) -> Any:
    if not isinstance(wait.statuses, list):
        return wait.statuses
    index = place if wait.many == "some" else at
    return wait.statuses[index] if index < len(wait.statuses) else None

"""Probes, for messages and of windows, and the receives of what a probe has matched."""

import weakref
from functools import partial
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._mpi.buffers import NOTHING, content_of
from otel_dltrace.instrument._mpi.comm import Comm, Matched
from otel_dltrace.instrument._mpi.family import Call, Form
from otel_dltrace.instrument._mpi.groups import NOBODY, Group, number_of
from otel_dltrace.instrument._mpi.requests import FLAG_ASYNC, Part
from otel_dltrace.instrument._mpi.running import ask_for_status
from otel_dltrace.instrument._sites import Args, Kwargs
from otel_dltrace.model.semconv import COLLECTIVE, P2P
from otel_dltrace.record.operation import Operation


class Probe:
    """A look for a message; one that does not wait and finds none is not written."""

    __slots__ = ("_call", "_comm", "_group", "_handle", "_operation", "_since", "_status")

    def __init__(self, comm: Comm, call: Call, handle: Any, group: Group, args: Args, kwargs: Kwargs) -> None:
        self._comm, self._call, self._handle, self._group = comm, call, handle, group
        self._status = ask_for_status(call, args, kwargs, comm.module.Status)
        self._since = monotonic_ns()
        self._operation: Operation | None = None
        if not call.name.lower().startswith("i"):
            source, tag = call.argument(call.peer, args, kwargs), number_of(call.argument(call.tag, args, kwargs))
            peer = comm.peer(group, handle, source, NOBODY)
            self._operation = comm.operation(call.span, group, NOTHING, P2P, peer, tag, 0)

    def finish(self, result: Any) -> None:
        """Write what was found."""
        if result is None or result is False:
            return
        comm, status = self._comm, self._status
        operation = self._operation or comm.operation(self._call.span, self._group, NOTHING, P2P, NOBODY, -1, 0)
        operation.start = self._since
        if status is not None and status.Get_source() >= 0:
            operation.a = self._group.rank_in_world(self._handle, status.Get_source())
            operation.b = status.Get_tag()
            operation.size = max(0, status.Get_elements(comm.module.BYTE))
            if result is not True:
                self._match(result, operation)
        operation.close()

    def _match(self, message: Any, operation: Operation) -> None:
        number = self._group.number_message("", operation.a, operation.b, sends=False)
        key, matched = id(message), self._comm.matched
        gone = weakref.ref(message, lambda _ref: matched.pop(key, None))
        matched[key] = Matched(self._group, operation.a, operation.b, operation.size, number, gone)

    def fail(self, error: BaseException) -> None:
        """End it with *error*."""
        if self._operation is not None:
            self._operation.close(error=error)


class Test:
    """A look whether a window's accesses are over; one that finds that they are not is not written."""

    __slots__ = ("_begin", "_since")

    def __init__(self, comm: Comm, call: Call, group: Group) -> None:
        self._begin = partial(comm.operation, call.span, group, NOTHING, COLLECTIVE, 0, NOBODY, 0)
        self._since = monotonic_ns()

    def finish(self, result: Any) -> None:
        """Write that they are."""
        if result:
            self._write()

    def fail(self, error: BaseException) -> None:
        """Write that it ended with *error*."""
        self._write(error)

    def _write(self, error: BaseException | None = None) -> None:
        operation = self._begin()
        operation.start = self._since
        operation.close(error=error)


class MatchedReceive:
    """The receive of a message that was matched before."""

    __slots__ = ("_call", "_comm", "_part")

    def __init__(self, comm: Comm, call: Call, matched: Matched, args: Args, kwargs: Kwargs) -> None:
        self._comm, self._call = comm, call
        buffer = call.argument("buf", args, kwargs) if call.takes else None
        content = (matched.size, "") if buffer is None else content_of(buffer, is_object=False)
        flags = FLAG_ASYNC if call.form is Form.REQUEST else 0
        operation = comm.operation(call.span, matched.group, content, P2P, matched.peer, matched.tag, flags)
        self._part = Part(operation, matched.number)

    def finish(self, result: Any) -> None:
        """End it, or follow its request."""
        if self._call.form is Form.REQUEST:
            self._comm.requests.launched(result, [self._part])
        else:
            self._part.operation.close(self._part.seq)

    def fail(self, error: BaseException) -> None:
        """End it with *error*."""
        self._part.operation.close(self._part.seq, error=error)


def begin_probe(comm: Comm, call: Call, args: Args, kwargs: Kwargs) -> Probe | Test | None:
    """Return the span of a probe; None where the communicator is none."""
    handle = call.argument(call.comm, args, kwargs) if call.comm else args[0]
    group = comm.groups.of(handle)
    if group is None:
        return None
    return Probe(comm, call, handle, group, args, kwargs) if call.peer else Test(comm, call, group)


def begin_matched(comm: Comm, call: Call, args: Args, kwargs: Kwargs) -> MatchedReceive | None:
    """Return the span of the receive of a matched message; None for one that nobody saw being matched."""
    matched = comm.matched.pop(id(args[0]), None)
    return None if matched is None else MatchedReceive(comm, call, matched, args, kwargs)

"""A call of MPI under way: its spans, from its arguments to its end."""

from collections.abc import Callable
from functools import cache, partial
from operator import index
from typing import Any

from otel_dltrace.instrument._mpi.buffers import NOTHING, content_of
from otel_dltrace.instrument._mpi.comm import Comm
from otel_dltrace.instrument._mpi.family import Call, Form, Role
from otel_dltrace.instrument._mpi.groups import NOBODY, Group, number_of
from otel_dltrace.instrument._mpi.requests import FLAG_ASYNC, Part
from otel_dltrace.instrument._sites import Args, Kwargs
from otel_dltrace.model.semconv import COLLECTIVE, P2P, Source
from otel_dltrace.record.guard import pass_on

_HOST_DONE = int(Source.HOST_DONE)


class Running:
    """A call under way."""

    __slots__ = ("_args", "_call", "_comm", "_content", "_group", "_handle", "_kwargs", "_number", "_parts", "_status")

    def __init__(
        self,
        comm: Comm,
        call: Call,
        handle: Any,
        group: Group,
        content: tuple[int, Any],
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        self._comm, self._call, self._handle, self._group, self._content = comm, call, handle, group, content
        self._args, self._kwargs = args, kwargs
        self._status: Any = None
        # Of what is being freed: afterwards it has none.
        self._number = handle.handle
        self._parts: list[Part] = [] if call.form is Form.PERSISTENT else self.open()

    def open(self, series: str = "", flags: int = 0) -> list[Part]:
        """Begin the operations of the call."""
        return _OPEN[self._call.role](self, series, flags or (FLAG_ASYNC if self._call.form is Form.REQUEST else 0))

    # -- each role --------------------------------------------------------------------------------

    def collective(self, series: str, flags: int) -> list[Part]:
        """Begin a collective."""
        call, group = self._call, self._group
        root = NOBODY
        if call.root:
            root = self._comm.peer(group, self._handle, self._given(call.root), 0)
        operation = self._comm.operation(call.span, group, self._content, COLLECTIVE, 0, root, flags, series)
        return [Part(operation, group.number(series), counted=(group, series, None))]

    def create(self, series: str, flags: int) -> list[Part]:
        """Begin the making of a group; its members alone make one by `Create_group`."""
        members = self._given("group") if "tag" in self._call.positions else None
        if self._call.on_class or not isinstance(members, self._comm.module.Group) or not members:
            return self.collective(series, flags)
        makers = self._comm.groups.makers(self._group, members, number_of(self._given("tag"), 0))
        operation = self._comm.operation(self._call.span, makers, NOTHING, COLLECTIVE, 0, NOBODY, flags)
        return [Part(operation, makers.number(), counted=(makers, "", None))]

    def local(self, series: str, flags: int) -> list[Part]:
        """Begin what other ranks need not do."""
        call = self._call
        return [Part(self._comm.operation(call.span, self._group, self._content, COLLECTIVE, 0, -1, flags, series))]

    def one_sided(self, series: str, flags: int) -> list[Part]:
        """Begin an access to another rank's window."""
        call, given = self._call, self._given(self._call.peer)
        peer, content = self._comm.peer(self._group, self._handle, given, NOBODY), self._moved(given, self._content)
        return [Part(self._comm.operation(call.span, self._group, content, P2P, peer, -1, flags, series))]

    def send(self, series: str, flags: int) -> list[Part]:
        """Begin a send."""
        call = self._call
        span = call.span if call.role is Role.SEND else _direction(call, "send")
        return [self._send(span, call.peer, call.tag, series, flags)]

    def _send(self, span: str, peer: str, tag: str, series: str, flags: int) -> Part:
        group = self._group
        given, number = self._given(peer), number_of(self._given(tag), 0)
        to = self._comm.peer(group, self._handle, given, NOBODY)
        content = self._moved(given, self._content)
        operation = self._comm.operation(span, group, content, P2P, to, number, flags, series)
        return Part(operation, group.number_message(series, to, number, sends=True), counted=(group, series, True))

    def receive(self, series: str, flags: int) -> list[Part]:
        """Begin a receive."""
        call = self._call
        return [self._receive(call.span, call.peer, call.tag, self._content, series, flags)]

    def _receive(self, span: str, peer: str, tag: str, content: Any, series: str, flags: int) -> Part:
        comm, group, handle = self._comm, self._group, self._handle
        given, number = self._given(peer), number_of(self._given(tag))
        content = self._moved(given, content)
        source = comm.peer(group, handle, given, NOBODY)
        is_any = number_of(given, comm.any) == comm.any or number < 0
        operation = comm.operation(span, group, content, P2P, source, number, flags, series)
        seq = 0 if is_any else group.number_message(series, source, number, sends=False)
        counted = group, series, False
        if not is_any and not self._call.is_object:
            return Part(operation, seq, counted=counted)
        if self._call.form is Form.BLOCKING:
            self._status = ask_for_status(self._call, self._args, self._kwargs, comm.module.Status)
        return Part(operation, seq, partial(comm.settle, group, handle, series), counted)

    def both(self, series: str, flags: int) -> list[Part]:
        """Begin a message each way."""
        call = self._call
        (peer, tag), taken = call.source, self._given(call.takes[-1][0])
        content = self._content if taken is None else content_of(taken, is_object=call.is_object)
        receive = self._receive(_direction(call, "recv"), peer, tag, content, series, flags)
        return [*self.send(series, flags), receive]

    def free(self, series: str, flags: int) -> list[Part]:
        """Begin the end of a group; of one that MPI gives there is none, and a rank may say so alone."""
        return self.local(series, flags) if self._group.is_given else self.collective(series, flags)

    def _moved(self, rank: Any, content: tuple[int, Any]) -> tuple[int, Any]:
        """Return what moves of *content* to or from *rank*: nothing, where that is nobody."""
        return (0, content[1]) if rank is not None and number_of(rank) == self._comm.nobody else content

    # -- the end ----------------------------------------------------------------------------------

    def _given(self, name: str) -> Any:
        return self._call.argument(name, self._args, self._kwargs) if name else None

    def finish(self, result: Any) -> None:
        """End them, or follow their request."""
        comm, call = self._comm, self._call
        if call.form is Form.PERSISTENT:
            self._made_persistent(result)
            return
        if call.role is Role.CREATE:
            result = self._made(result)
        elif call.role is Role.FREE:
            comm.groups.forget(self._number)
        if call.form is Form.REQUEST:
            comm.requests.launched(result, self._parts)
            return
        for part in self._parts:
            if part.settle is not None and self._status is not None:
                part.settle(part, self._status)
            part.operation.close(part.seq, _HOST_DONE)

    def _made_persistent(self, request: Any) -> None:
        group, call = self._group, self._call
        series = ""
        if call.role is Role.COLLECTIVE and self._comm.groups.is_full:
            self._group = group.unnamed()
        elif call.role is Role.COLLECTIVE:
            # They may be started in another order on each rank, but are made in one.
            group.persistent += 1
            series = f".{group.persistent}"
        elif call.name.startswith("P"):
            series = ".partitioned"
        self._comm.requests.made(request, partial(self.open, series, FLAG_ASYNC))

    def _made(self, result: Any) -> Any:
        """Name what was made; return the request of one that is made in the background."""
        call = self._call
        new, request = result if call.form is Form.REQUEST else (result, None)
        name = "tag" if call.part == "members" else call.part
        self._comm.groups.made(self._group, call.part, int(self._given(name) or 0), new)  # a bool is a colour, too
        return request

    def fail(self, error: BaseException) -> None:
        """End them with *error*."""
        moved = has_moved(self._comm.module, self._call, error, self._args, self._kwargs)
        for part in self._parts:
            if not moved:
                part.take_back()
            part.operation.close(part.seq, error=error)


def begin_call(comm: Comm, call: Call, args: Args, kwargs: Kwargs) -> Running | None:
    """Return the spans of a *call*; None where it is none of its own."""
    handle = args[0] if not call.comm else _communicator(comm, call, args, kwargs)
    group = comm.groups.of(handle)
    if group is None:
        return None
    return Running(comm, call, handle, group, comm.content(call, args, kwargs), args, kwargs)


def _communicator(comm: Comm, call: Call, args: Args, kwargs: Kwargs) -> Any:
    given = call.argument(call.comm, args, kwargs)
    return comm.module.COMM_SELF if given is None else given


def has_moved(module: Any, call: Call, error: BaseException, args: Args, kwargs: Kwargs) -> bool:
    """Return whether a message has moved, or a collective was begun, although *call* failed: the others count it."""
    is_message = call.role in _MESSAGES
    if isinstance(error, module.Exception):
        kind = error.Get_error_class()
        return bool(kind == module.ERR_TRUNCATE if is_message else kind not in _refusals(module))
    if not isinstance(error, Exception):
        return True
    # Objects are pickled before they are sent, and unpickled after they have come.
    if not call.is_object or call.role in _MESSAGES - {Role.RECEIVE}:
        return False
    return is_message or _can_be_given(module, call, args, kwargs)


def _can_be_given(module: Any, call: Call, args: Args, kwargs: Kwargs) -> bool:
    """Return whether what this rank gives to a collective of objects can be pickled: if not, nothing was begun."""
    if not call.takes:
        return True
    handle, given = args[0], call.argument(call.takes[0][0], args, kwargs)
    try:
        root = index(call.argument(call.root, args, kwargs) or 0)
        if call.span in _ROOT_GIVES and handle.rank != root:
            return True
        others = getattr(handle, "remote_size", handle.size)  # of an intercommunicator those on the other side
        has_parts = call.span not in _EACH_A_PART or len(list(given)) == others
        module.pickle.dumps(given)
    except Exception as broken:  # noqa: BLE001  -- whatever its classes raise
        pass_on(broken)
        return False
    return has_parts


@cache
def _refusals(module: Any) -> frozenset[int]:
    """Return what MPI says of arguments, which it looks at before anything else."""
    return frozenset(getattr(module, f"ERR_{name}") for name in _ARGUMENTS.split())


def ask_for_status(call: Call, args: Args, kwargs: Kwargs, new: Callable[[], Any]) -> Any:
    """Return the status that the call fills in: the program's own, or a new one that it is given."""
    position = call.positions["status"]
    if position < len(args):
        return args[position]
    if kwargs.get("status") is None:
        kwargs["status"] = new()
    return kwargs["status"]


def _direction(call: Call, way: str) -> str:
    return f"i{way}" if call.form is Form.REQUEST else way


_MESSAGES = frozenset((Role.SEND, Role.RECEIVE, Role.SEND_RECEIVE))
_ROOT_GIVES, _EACH_A_PART = frozenset(("bcast", "scatter")), frozenset(("scatter", "alltoall"))
_ARGUMENTS = "BUFFER COUNT TYPE COMM RANK ROOT GROUP OP TOPOLOGY DIMS ARG"
_OPEN: dict[Role, Callable[[Running, str, int], list[Part]]] = {
    Role.COLLECTIVE: Running.collective,
    Role.CREATE: Running.create,
    Role.FREE: Running.free,
    Role.LOCAL: Running.local,
    Role.ONE_SIDED: Running.one_sided,
    Role.SEND: Running.send,
    Role.RECEIVE: Running.receive,
    Role.SEND_RECEIVE: Running.both,
}

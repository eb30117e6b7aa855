"""What is known of the MPI communication of one process: from a call to its spans."""

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from otel_dltrace.instrument._mpi_buffers import NOTHING, content_of, name_of
from otel_dltrace.instrument._mpi_calls import Call, Form, Role
from otel_dltrace.instrument._mpi_groups import NOBODY, Group, Groups
from otel_dltrace.instrument._mpi_requests import FLAG_ASYNC, Part, Requests
from otel_dltrace.instrument._sites import Args, Kwargs
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, MPI, P2P, PHASE, WAIT, Source
from otel_dltrace.record.operation import Operation
from otel_dltrace.record.tracer import Tracer

if TYPE_CHECKING:
    from otel_dltrace.instrument._mpi_probes import Matched

_HOST_DONE = int(Source.HOST_DONE)


class Comm:
    """The MPI communication of the process that *tracer* follows.

    Attributes:
        matched: The messages that probes have matched, by the identity of mpi4py's object.
    """

    def __init__(self, tracer: Tracer, module: Any) -> None:
        self.tracer, self.module = tracer, module
        wait = tracer.recorder.intern(Descriptor(PHASE, WAIT))
        self.groups = Groups(module)
        self.requests = Requests(tracer, wait, module.Status)
        self.any, self.in_place = module.ANY_SOURCE, module.IN_PLACE
        self.anything = (module.ANY_SOURCE, module.ANY_TAG)
        self.nobody = module.PROC_NULL
        self.matched: dict[int, Matched] = {}

    # -- descriptors ------------------------------------------------------------------------------

    def operation(
        self, span: str, group: Group, content: tuple[int, Any], kind: str, a: int, b: int, flags: int, series: str = ""
    ) -> Operation:
        """Begin an operation of *group*; *series* tells apart what is counted apart."""
        size, named = content
        return Operation(self.tracer.recorder, self.descriptor(span, group, named, kind, series), size, a, b, flags)

    def descriptor(self, span: str, group: Group, named: Any, kind: str, series: str = "") -> int:
        """Return the number of what the operations *span* of *group*, of the type that *named* names, have alike."""
        described = group.described[span + series]
        try:
            return described[named]
        except KeyError:
            number = described[named] = self._describe(span, group, named, kind, series)
            return number
        except TypeError:  # a datatype has no hash
            return self.descriptor(span, group, name_of(named), kind, series)

    def _describe(self, span: str, group: Group, named: Any, kind: str, series: str) -> int:
        self.groups.described += 1
        return self.tracer.recorder.intern(
            Descriptor(
                kind,
                span,
                group=group.id and group.id + series,
                group_size=group.size,
                backend=MPI,
                dtype=name_of(named) if named != "" else "",
            )
        )

    # -- calls ------------------------------------------------------------------------------------

    def begin(self, call: Call, args: Args, kwargs: Kwargs) -> "Running | None":
        """Return the spans of a *call*; None where it is none of its own."""
        handle = args[0] if not call.comm else self._communicator(call, args, kwargs)
        group = self.groups.of(handle)
        if group is None:
            return None
        return Running(self, call, handle, group, self.content(call, args, kwargs), args, kwargs)

    def content(self, call: Call, args: Args, kwargs: Kwargs) -> tuple[int, Any]:
        """Return what *call* moves: of the buffers (or objects) that it may be given, the first one that it is."""
        for name, position, has_parts in call.takes:
            value = args[position] if position < len(args) else kwargs.get(name)
            if value is not None and value is not self.in_place:
                ranks = _ranks(call, args[0], name) if has_parts and isinstance(value, list | tuple) else 0
                return content_of(value, is_object=call.is_object, ranks=ranks, is_vector=has_parts and call.is_vector)
        return NOTHING

    def _communicator(self, call: Call, args: Args, kwargs: Kwargs) -> Any:
        given = call.argument(call.comm, args, kwargs)
        return self.module.COMM_SELF if given is None else given

    def peer(self, group: Group, handle: Any, rank: Any, default: int) -> int:
        """Return the rank in the world of *rank* in *group*; NOBODY for any, and for none."""
        here = default if rank is None else rank
        return group.rank_in_world(handle, here) if here >= 0 else NOBODY

    def settle(self, group: Group, handle: Any, series: str, part: Part, status: Any) -> None:
        """Learn from *status* who has sent, with which tag, and how much."""
        operation = part.operation
        learned = self.learned(group, handle, status, operation.size)
        if learned is None:
            operation.size = 0
        else:
            operation.size, operation.a, operation.b = learned
            part.seq = part.seq or group.number_message(series, operation.a, operation.b, sends=False)

    def learned(self, group: Group, handle: Any, status: Any, size: int) -> tuple[int, int, int] | None:
        """Return how much has come (*size* if that is not known), from whom, with which tag; None for nothing."""
        source, tag = status.Get_source(), status.Get_tag()
        if source < 0:
            return None
        count = status.Get_elements(self.module.BYTE)  # Open MPI has no count above 2 GiB
        return count if count >= 0 else size, group.rank_in_world(handle, source), tag


class Current:
    """The communication that the live tracer follows, where MPI is there; `comm` may be an earlier tracer's."""

    __slots__ = ("comm",)

    def __init__(self) -> None:
        self.comm: Comm | None = None


current = Current()


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
        if not members or self._call.on_class:
            return self.collective(series, flags)
        makers = self._comm.groups.makers(self._group, members, self._given("tag") or 0)
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
        given, number = self._given(peer), self._given(tag) or 0
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
        given, number = self._given(peer), self._given(tag)
        content = self._moved(given, content)
        source = comm.peer(group, handle, given, NOBODY)
        is_any = given is None or given == comm.any or number is None or number < 0
        operation = comm.operation(span, group, content, P2P, source, -1 if number is None else number, flags, series)
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
        return (0, content[1]) if rank == self._comm.nobody else content

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
        moved = has_moved(self._comm.module, self._call, error)
        for part in self._parts:
            if not moved:
                part.take_back()
            part.operation.close(part.seq, error=error)


def _ranks(call: Call, handle: Any, name: str) -> int:
    """Return how many parts the buffer *name* of a *call* on *handle* has."""
    if call.holder == "Topocomm":
        return int(handle.outdegree if name == "sendbuf" else handle.indegree)
    return int(handle.Get_remote_size() if handle.Is_inter() else handle.Get_size())


def has_moved(module: Any, call: Call, error: BaseException) -> bool:
    """Return whether a message has moved, or a collective was begun, although *call* failed: the others count it."""
    is_message = call.role in _MESSAGES
    if isinstance(error, module.Exception):
        kind = error.Get_error_class()
        return bool(kind == module.ERR_TRUNCATE if is_message else kind not in _refusals(module))
    # Objects are pickled before they are sent, and unpickled after they have come.
    gives = call.role in _MESSAGES - {Role.RECEIVE}
    return not isinstance(error, Exception) or (call.is_object and not gives)


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

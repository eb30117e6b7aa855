"""The collectives that a program calls through torch.distributed, and who its ranks are."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import monotonic_ns
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._sites import Args, Attachment, Kwargs, Row, Site, Undo
from otel_dltrace.instrument._torch_binding import Binding
from otel_dltrace.instrument._torch_groups import C10D, HOST_BACKENDS, backend_of, c10d, member_of, sequence_number
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, PHASE, WAIT, Flag, Level, Source
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.steps import Operation, Tracer, live


@dataclass(frozen=True)
class Call:
    """A collective: the row of a table.

    Attributes:
        name: The function, and the span.
        parameters: Its parameters, in order.
        tensor: The parameter whose bytes count; "" if none.
        each: Every rank contributes that many bytes: the operation moves them times the group's size.
        root: The parameters that name the root: its rank in the world, its rank in the group.
    """

    name: str
    parameters: str
    tensor: str = ""
    each: bool = False
    root: tuple[str, ...] = ()
    positions: dict[str, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Number the parameters."""
        object.__setattr__(self, "positions", {name: i for i, name in enumerate(self.parameters.split())})

    def argument(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """Return the argument for parameter *name* of a call, None if it is not given."""
        position = self.positions.get(name, -1)
        return args[position] if 0 <= position < len(args) else kwargs.get(name)


CALLS = (
    Call("all_reduce", "tensor op group async_op", tensor="tensor"),
    Call("broadcast", "tensor src group async_op group_src", tensor="tensor", root=("src", "group_src")),
    Call("barrier", "group async_op device_ids timeout"),
    Call("all_gather", "tensor_list tensor group async_op", tensor="tensor", each=True),
    Call("all_gather_single", "output_tensor input_tensor group async_op", tensor="output_tensor"),
    Call("all_gather_into_tensor", "output_tensor input_tensor group async_op", tensor="output_tensor"),
    Call("reduce_scatter_single", "output input op group async_op", tensor="input"),
    Call("reduce_scatter_tensor", "output input op group async_op", tensor="input"),
)


class _Pending:
    """An asynchronous operation that has been launched."""

    __slots__ = ("done", "operation", "seq", "source")

    def __init__(self, operation: Operation, seq: int, source: int) -> None:
        self.operation, self.seq, self.source = operation, seq, source
        self.done = 0

    def close(self, end: int, error: BaseException | None = None) -> None:
        """End it when its work was done, at *end* if that is not known."""
        self.operation.close(self.seq, self.source, error, self.done or end)


@dataclass(slots=True)
class _Running:
    """An operation inside its call."""

    operation: Operation
    group: Any
    source: int
    waits: bool
    meets: bool
    """It ends on no rank before every rank has begun it."""


class _Comm:
    """What is known of the communication of the process that *tracer* follows."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.binding = Binding(tracer)
        self.descriptors: dict[tuple[Any, ...], tuple[int, int]] = {}
        self.works: weakref.WeakKeyDictionary[Any, _Pending] = weakref.WeakKeyDictionary()
        self.finished: deque[_Pending] = deque()
        self.local = threading.local()
        self.wait = tracer.recorder.intern(Descriptor(PHASE, WAIT))
        steps = tracer.steps
        # What rank 0 said in the store comes before what others make of the environment.
        steps.on_begin = _both(self.binding.poll, steps.on_begin)
        steps.on_end = _both(self.flush, steps.on_end)

    def describe(self, call: Call, group: Any, tensor: Any) -> tuple[int, int]:
        """Return the descriptor and the source of ends for *call* with *tensor* in *group*."""
        # What is no tensor is for the call itself to refuse.
        device, dtype = getattr(tensor, "device", None), getattr(tensor, "dtype", None)
        key = (call.name, group, device, dtype)
        known = self.descriptors.get(key)
        if known is None:
            backend = backend_of(group, device)
            descriptor = Descriptor(
                COLLECTIVE,
                call.name,
                group=group.group_name,
                group_size=group.size(),
                backend=backend,
                dtype="" if dtype is None else str(dtype).removeprefix("torch."),
            )
            source = Source.HOST_DONE if backend in HOST_BACKENDS else Source.HOST_ISSUE
            known = self.descriptors[key] = (self.tracer.recorder.intern(descriptor), source)
        return known

    def flush(self) -> None:
        """Write the operations that were done before anybody waited for them."""
        while self.finished:
            pending = self.finished.popleft()
            pending.close(pending.done)

    def watch(self, work: Any, pending: _Pending) -> None:
        """End *pending* when its *work* is done, or when somebody has waited for it."""
        self.works[work] = pending
        if pending.source != Source.HOST_DONE:
            # A device's future is complete as soon as the work is enqueued, and a callback on it
            # would make another stream wait for the transfer.
            pending.close(monotonic_ns())
            return
        finished = self.finished

        def done(_future: object) -> None:
            # Here runs a thread of the backend. It has no chunk of the ring, and gets a new Python
            # thread state for each call: it would lease one for every record. So others write it.
            pending.done = monotonic_ns()
            finished.append(pending)

        work.get_future().add_done_callback(done)


def _both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    def both() -> None:
        first()
        second()

    return both


_comm: _Comm | None = None


def _comm_of(tracer: Tracer) -> _Comm:
    global _comm  # noqa: PLW0603  -- the one of the live tracer
    if _comm is None or _comm.tracer is not tracer:
        _comm = _Comm(tracer)
    return _comm


def _here() -> _Comm:
    assert live.tracer is not None
    return _comm_of(live.tracer)


# -- collectives ------------------------------------------------------------------------------------


def _begin(call: Call, args: Args, kwargs: Kwargs) -> _Running | None:
    comm = _here()
    # Inside another call (a deprecated name, a function mode) it is the same operation; in a
    # coalescing block it is only noted down by torch.
    if getattr(comm.local, "busy", False) or c10d()._world.pg_coalesce_state:
        return None
    group = member_of(call.argument("group", args, kwargs))
    if group is None:
        return None
    tensor = call.argument(call.tensor, args, kwargs) if call.tensor else None
    descriptor, source = comm.describe(call, group, tensor)
    size = getattr(tensor, "nbytes", 0) * (group.size() if call.each else 1)
    waits = bool(call.argument("async_op", args, kwargs))
    root = _root(call, group, args, kwargs)
    operation = Operation(comm.tracer.recorder, descriptor, size, b=root, flags=Flag.ASYNC if waits else 0)
    comm.local.busy = True
    return _Running(operation, group, source, waits, not waits and root < 0)


def _root(call: Call, group: Any, args: Args, kwargs: Kwargs) -> int:
    """Return the root's rank in the world, -1 where the operation has none."""
    if not call.root:
        return -1
    in_world, in_group = (call.argument(name, args, kwargs) for name in call.root)
    if in_world is None:
        in_world = c10d().get_global_rank(group, in_group or 0)
    return int(in_world)


def _finish(running: _Running, result: Any) -> None:
    comm = _here()
    comm.local.busy = False
    seq = sequence_number(running.group)
    if running.waits and isinstance(result, c10d().Work):
        comm.watch(result, _Pending(running.operation, seq, running.source))
    else:
        running.operation.close(seq, running.source)
    comm.flush()
    if running.meets and running.group is c10d().GroupMember.WORLD:
        comm.binding.met()


def _fail(running: _Running, error: BaseException) -> None:
    _here().local.busy = False
    running.operation.close(source=running.source, error=error)


def _wait_begins(args: Args, _kwargs: Kwargs) -> tuple[_Pending, int] | None:
    works = _here().works
    pending = works.pop(args[0], None) if works else None
    return None if pending is None else (pending, monotonic_ns())


def _waited(span: tuple[_Pending, int], _result: object, error: BaseException | None = None) -> None:
    (pending, start), end = span, monotonic_ns()
    comm = _here()
    operation = pending.operation
    comm.tracer.recorder.span(
        comm.wait, Level.PHASE, start, end, parent=operation.number, flags=2 if error else 0, step=operation.step
    )
    pending.close(end, error)


def _wait_failed(span: tuple[_Pending, int], error: BaseException) -> None:
    _waited(span, None, error)


# -- process groups ---------------------------------------------------------------------------------


def _initialised(_span: object, _result: object) -> None:
    comm = _here()
    world = c10d().GroupMember.WORLD
    comm.tracer.steps.group_seq = partial(sequence_number, world)
    comm.binding.initialised(c10d()._get_default_store(), world.rank(), world.size())


def _destroy_begins(args: Args, kwargs: Kwargs) -> None:
    comm = _here()
    comm.flush()
    comm.descriptors.clear()  # it holds groups
    group = args[0] if args else kwargs.get("group")
    if group is None or group is c10d().GroupMember.WORLD:
        comm.binding.destroyed()
        comm.tracer.steps.group_seq = lambda: 0


def _yes(_args: Args, _kwargs: Kwargs) -> bool:
    return True


def _meet() -> None:
    # Instrumented anew, we may know this world already: it has not begun a second time.
    if _here().binding.store is not c10d()._get_default_store():
        _initialised(None, None)


def _attach(module: ModuleType) -> Undo:
    """Meet a world that was there before us, and write what is done but unwritten when we leave."""
    if live.tracer is not None and module.is_initialized():
        guarded(_meet)()

    def detach() -> None:
        if _comm is not None:
            _comm.flush()

    return detach


ROWS: tuple[Row, ...] = (
    *(
        Site(C10D, call.name, begin=partial(_begin, call), finish=_finish, fail=_fail, level=Level.COLLECTIVE)
        for call in CALLS
    ),
    Site(C10D, "Work.wait", begin=_wait_begins, finish=_waited, fail=_wait_failed, level=Level.COLLECTIVE),
    Site(C10D, "init_process_group", begin=_yes, finish=_initialised),
    Site(C10D, "destroy_process_group", begin=_destroy_begins),
    Attachment(C10D, _attach),
)

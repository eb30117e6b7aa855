"""The usual calls of mpi4py, those that block: each in one frame, since a message of 8 bytes takes a microsecond.

The way of all calls (`_mpi_comm`) would trace them as well: what is not usual, or fails here, goes there.
"""

from collections.abc import Callable
from functools import wraps
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._mpi_calls import Call, Form, Role
from otel_dltrace.instrument._mpi_comm import Comm, ask_for_status, current
from otel_dltrace.instrument._mpi_groups import NOBODY, Group
from otel_dltrace.instrument._sites import Args, Kwargs
from otel_dltrace.model.semconv import COLLECTIVE, P2P, Flag, Level
from otel_dltrace.record.guard import failed, guarded
from otel_dltrace.record.steps import live, open_span

# Plain ints, and bound here: looking them up costs a part of a call that can be seen.
_COLLECTIVE, _ERROR = int(Level.COLLECTIVE), int(Flag.ERROR)
_get_open = open_span.get
_ROLES = {Role.COLLECTIVE: COLLECTIVE, Role.SEND: P2P, Role.RECEIVE: P2P}


def is_usual(call: Call) -> bool:
    """Return whether *call* is one of those; of an object that is received, only its status says how much came."""
    return call.form is Form.BLOCKING and call.role in _ROLES and not (call.role is Role.RECEIVE and call.is_object)


# Exempt from brevity: each frame costs up to a tenth of a microsecond between two calls of MPI.
def shortened(  # noqa: C901
    call: Call, traced: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return *traced* with a short way for the usual call: of a communicator that is known, with an array."""
    span, kind, at = call.span, _ROLES[call.role], call.first_buffer
    is_collective, sends = call.role is Role.COLLECTIVE, call.role is Role.SEND
    sides = None if is_collective and not call.root else _root if is_collective else _sent if sends else _received

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: C901
        tracer = live.tracer
        if tracer is None or tracer.recorder.level < _COLLECTIVE:
            return original(*args, **kwargs)
        comm, recorder = current.comm, tracer.recorder
        if comm is None or comm.tracer is not tracer:
            return traced(*args, **kwargs)
        try:
            handle = args[0]
            group = comm.groups.known[handle.handle]
            if at:
                try:
                    value = args[at]
                    size, named = value.nbytes, value.dtype
                except (AttributeError, IndexError):
                    size, named = comm.content(call, args, kwargs)
            else:
                size, named = comm.content(call, args, kwargs)
            try:
                descriptor = group.described[span, named, ""]
            except (KeyError, TypeError):
                descriptor = comm.descriptor(span, group, named, kind)
            a, b, status = _NO_SIDES if sides is None else sides(comm, call, group, args, kwargs)
            step, outer = recorder.step, _get_open()
            parent = 0 if outer is None or outer.step != step else outer.drawn()
            start = monotonic_ns()
            number = recorder.begin(descriptor, _COLLECTIVE, start, size, parent, 0, a, b, 0, step)
            seq = group.number() if is_collective else group.number_message("", a, b, sends)
        except Exception:  # noqa: BLE001  -- the way of all calls will say what is wrong
            number = 0
        if not number:
            return traced(*args, **kwargs)
        flags = 0
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            flags = _ERROR
            guarded(recorder.error)(number, _COLLECTIVE, error, step)
            raise
        finally:
            end = monotonic_ns()
            if status is not None and not flags:
                size, a, b, seq = _learned(comm, group, handle, status, size) or (size, a, b, seq)
            try:
                recorder.span(descriptor, _COLLECTIVE, start, end, size, parent, seq, 0, a, b, flags, 0, number, step)
            except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
                failed(span, broken)

    return wrapper


# -- who is on the other side --------------------------------------------------------------------

Sides = tuple[int, int, Any]
"""The peer's rank in the world or nobody, the root or the tag, and the status that will know better, if one will."""
_NO_SIDES: Sides = (0, NOBODY, None)


def _root(comm: Comm, call: Call, group: Group, args: Args, kwargs: Kwargs) -> Sides:
    return 0, comm.peer(group, args[0], call.argument(call.root, args, kwargs), 0), None


def _sent(comm: Comm, call: Call, group: Group, args: Args, kwargs: Kwargs) -> Sides:
    to, tag = _peer_and_tag(call, args, kwargs)
    return comm.peer(group, args[0], to, NOBODY), tag or 0, None


def _received(comm: Comm, call: Call, group: Group, args: Args, kwargs: Kwargs) -> Sides:
    source, tag = _peer_and_tag(call, args, kwargs)
    if source is not None and source >= 0 and tag is not None and tag >= 0:
        return group.rank_in_world(args[0], source), tag, None
    status = ask_for_status(call, args, kwargs, comm.module.Status)
    return comm.peer(group, args[0], source, NOBODY), -1 if tag is None else tag, status


def _peer_and_tag(call: Call, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
    """Return both as they are given; all these calls take them in this order, after what is moved."""
    given = len(args)
    return args[2] if given > 2 else kwargs.get(call.peer), args[3] if given > 3 else kwargs.get(call.tag)


@guarded
def _learned(comm: Comm, group: Group, handle: Any, status: Any, size: int) -> tuple[int, int, int, int] | None:
    """Return bytes, peer, tag and number of what has come, by its *status*; None where nothing has."""
    learned = comm.learned(group, handle, status, size)
    return None if learned is None else (*learned, group.number_message("", *learned[1:], False))

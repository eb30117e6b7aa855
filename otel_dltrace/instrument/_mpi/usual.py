"""The usual calls of mpi4py, those that block: each in one frame, since a message of 8 bytes takes a microsecond.

The way of all calls (`_mpi.running`) would trace them as well: what is not usual, or fails here, goes there.
"""

import struct
from collections.abc import Callable
from functools import wraps
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._mpi.buffers import NOTHING, name_of
from otel_dltrace.instrument._mpi.comm import Comm, current
from otel_dltrace.instrument._mpi.family import Call, Form, Role
from otel_dltrace.instrument._mpi.groups import NOBODY, Group
from otel_dltrace.instrument._mpi.running import ask_for_status, has_moved
from otel_dltrace.instrument._sites import Args, Kwargs
from otel_dltrace.model.semconv import COLLECTIVE, P2P, Flag, Level
from otel_dltrace.record.guard import failed, guarded, pass_on
from otel_dltrace.record.operation import open_span
from otel_dltrace.record.packing import CALL_BEGIN, CALL_SPAN, pack_call, pack_call_begin
from otel_dltrace.record.tracer import live

# Plain ints, and bound here: looking them up costs a part of a call that can be seen.
_COLLECTIVE, _ERROR = int(Level.COLLECTIVE), int(Flag.ERROR)
_error = struct.error
_get_open = open_span.get
_ROLES = {Role.COLLECTIVE: COLLECTIVE, Role.SEND: P2P, Role.RECEIVE: P2P}


def is_usual(call: Call) -> bool:
    """Return whether *call* is one of those; of an object that is received, only its status says how much came."""
    return call.form is Form.BLOCKING and call.role in _ROLES and not (call.role is Role.RECEIVE and call.is_object)


# Exempt from brevity: each frame costs up to a tenth of a microsecond between two calls of MPI. So both records are
# written here, as `Recorder.begin` and `Recorder.span` write them, who take over what is not usual.
def shortened(  # noqa: C901, PLR0915
    call: Call, traced: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    """Return *traced* with a short way for the usual call: of a communicator that is known, with an array."""
    span, kind, at, has_content = call.span, _ROLES[call.role], call.first_buffer, bool(call.takes)
    is_message, sends, peer = call.role is not Role.COLLECTIVE, call.role is Role.SEND, call.peer
    root, root_at = call.root, call.positions.get(call.root, 0)

    @wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:  # noqa: C901, PLR0912, PLR0915
        tracer = live.tracer
        if tracer is None or tracer.recorder.level < _COLLECTIVE:
            return original(*args, **kwargs)
        comm, recorder = current.comm, tracer.recorder
        if comm is None or comm.tracer is not tracer:
            return traced(*args, **kwargs)
        a, b, seq, numbers, status = 0, NOBODY, 0, None, None
        try:
            handle = args[0]
            group = comm.groups.known[handle.handle]
            if at:
                try:
                    value = args[at]
                    if value is comm.in_place:
                        value = args[at + 1]
                    size, named = value.nbytes, value.dtype
                except (AttributeError, IndexError):
                    size, named = comm.content(call, args, kwargs)
                    if named.__hash__ is None:  # a datatype, which descriptors cannot be found by
                        named = name_of(named)
            else:
                size, named = comm.content(call, args, kwargs) if has_content else NOTHING
            try:
                descriptor = group.described[span][named]
            except (KeyError, TypeError):
                descriptor = comm.descriptor(span, group, named, kind)
            if is_message:  # all these calls take rank and tag in this order, after what is moved
                given = len(args)
                rank, tag = args[2] if given > 2 else kwargs.get(peer), args[3] if given > 3 else kwargs.get("tag")
                try:
                    a, b, numbers = group.sends[rank, tag] if sends else group.receives[rank, tag]
                except KeyError:
                    a, b, numbers = group.side(handle, rank, tag, sends=sends)
                if a < 0 and rank == comm.nobody:
                    size = 0
                if numbers is None:
                    args, status = _ask(comm, call, args, kwargs)
            elif root_at:
                b = group.rank_in_world(handle, (args[root_at] if len(args) > root_at else kwargs.get(root)) or 0)
            step, outer = recorder.step, _get_open()
            parent = 0 if outer is None or outer.step != step else outer.drawn()
            start = monotonic_ns()
            try:
                lane = recorder.local.lane
            except AttributeError:
                lane = recorder.new_lane()
            number = next(lane.numbers, 0) or recorder.next_number(lane)
            chunk = lane.chunk
            slots, lease, buffer, _ = chunk
            offset = next(slots, 0)
            if offset and lane.chunk is chunk:
                try:
                    pack_call_begin(
                        buffer, offset, number, step, descriptor, CALL_BEGIN, start, size, parent, a, b, lease
                    )
                except _error:
                    if recorder.spoil(offset, lease):
                        raise
            else:
                number = recorder.begin(descriptor, _COLLECTIVE, start, size, parent, 0, a, b, 0, step, number)
            if numbers is not None:
                seq = next(numbers)
            elif group.id and not is_message:
                seq = group.last = group.last + 1  # `Group.number`, without its frame
        except Exception as broken:  # noqa: BLE001  -- the way of all calls will say what is wrong
            pass_on(broken)
            number = 0
        if not number:
            return traced(*args, **kwargs)
        try:
            result = original(*args, **kwargs) if kwargs else original(*args)  # an empty dict costs as much as a clock
        except BaseException as error:
            end = monotonic_ns()
            guarded(recorder.error)(number, _COLLECTIVE, error, step)
            if seq:
                moved = guarded(has_moved)(comm.module, call, error, args, kwargs)
                seq = seq if moved else guarded(_uncounted)(call, group, a, b) or 0
            fields = (start, end, size, parent, seq, 0, a, b, _ERROR, 0, number, step)
            guarded(recorder.span)(descriptor, _COLLECTIVE, *fields)
            raise
        end = monotonic_ns()
        if status is not None:
            size, a, b, seq = _learned(comm, group, handle, status, size, a, b)
        try:
            chunk = lane.chunk
            slots, lease, buffer, _ = chunk
            offset = next(slots, 0)
            if offset and recorder.level >= _COLLECTIVE and lane.chunk is chunk:
                try:
                    pack_call(
                        buffer, offset, number, step, descriptor, CALL_SPAN, start, end, size, parent, seq, a, b, lease
                    )
                except _error:
                    if not recorder.spoil(offset, lease):
                        return result
                else:
                    return result
            recorder.span(descriptor, _COLLECTIVE, start, end, size, parent, seq, 0, a, b, 0, 0, number, step)
        except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
            failed(span, broken)
        return result

    return wrapper


def _ask(comm: Comm, call: Call, args: Args, kwargs: Kwargs) -> tuple[Args, Any]:
    """Return the arguments with a status, and it: by its place, for a name costs a third as much as the call."""
    if kwargs or not 1 < len(args) < 5:
        return args, ask_for_status(call, args, kwargs, comm.module.Status)
    status = comm.module.Status()
    return (*args, *comm.anything[len(args) - 2 :], status), status


def _uncounted(call: Call, group: Group, a: int, b: int) -> int:
    """Give the next one the number of what failed, which the others do not count; return 0."""
    group.take_back("", a, b, None if call.role is Role.COLLECTIVE else call.role is Role.SEND)
    return 0


def _learned(
    comm: Comm, group: Group, handle: Any, status: Any, size: int, a: int, b: int
) -> tuple[int, int, int, int]:
    """Return bytes, peer, tag and number of what has come, by its *status*; as they were where nothing has."""
    seq = 0
    try:
        source, tag = status.Get_source(), status.Get_tag()
        if source >= 0:
            try:
                a, b, numbers = group.receives[source, tag]
            except KeyError:
                a, b, numbers = group.side(handle, source, tag, sends=False)
            seq = next(numbers) if numbers is not None else 0
            count = status.Get_elements(comm.module.BYTE)  # Open MPI has no count above 2 GiB
            size = count if count >= 0 else size
        else:
            size = 0
    except Exception as broken:  # noqa: BLE001  -- as above
        failed("recv", broken)
    return size, a, b, seq

"""The collectives and point-to-point calls of a program, and who its ranks are."""

import sys
from functools import partial
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._sites import Args, Attachment, Kwargs, Row, Site, Undo, always
from otel_dltrace.instrument._torch.callbacks import before_destroyed, writers
from otel_dltrace.instrument._torch.calls import FUNCTIONS, METHODS, OPERATORS, Call
from otel_dltrace.instrument._torch.comm import Comm
from otel_dltrace.instrument._torch.dynamo import BLOCKS, DYNAMO
from otel_dltrace.instrument._torch.groups import C10D, COUNTS, c10d, forget, is_outside, sequence_number
from otel_dltrace.instrument._torch.methods import OF_GROUPS, OF_WORKS
from otel_dltrace.instrument._torch.operators import operators
from otel_dltrace.instrument._torch.pending import Pending
from otel_dltrace.instrument._torch.running import Span, begin_batch, begin_call
from otel_dltrace.instrument._torch.works import Wait
from otel_dltrace.model.semconv import Level
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.tracer import Tracer, live

_comm: Comm | None = None


def _comm_of(tracer: Tracer) -> Comm:
    global _comm  # noqa: PLW0603  -- the one of the live tracer
    if _comm is None or _comm.tracer is not tracer:
        _comm = Comm(tracer)
        guarded(_meet)()
    return _comm


def _here() -> Comm:
    assert live.tracer is not None
    return _comm_of(live.tracer)


def _in_graph() -> bool:
    """Return whether `torch.compile` looks into our code, as if it were the program's.

    Groups and works may not be touched there since torch 2.15. A call that breaks the graph is made outside of it.
    """
    in_graph: bool = sys.modules["torch"].compiler.is_dynamo_compiling()
    return in_graph


# -- calls ------------------------------------------------------------------------------------------


def _begin(call: Call, args: Args, kwargs: Kwargs) -> Span | None:
    return None if _in_graph() else begin_call(_here(), call, args, kwargs)


def _batch_begins(args: Args, _kwargs: Kwargs) -> Span | None:
    return None if _in_graph() else begin_batch(_here(), *args)


def _finish(span: Span, result: Any) -> None:
    span.finish(result)


def _fail(span: Span, error: BaseException) -> None:
    span.fail(error)


# -- works ------------------------------------------------------------------------------------------


def _wait_begins(args: Args, _kwargs: Kwargs) -> Wait | None:
    return None if _in_graph() else _here().works.wait_begins(args[0])


def _waited(wait: Wait, _result: object) -> None:
    _here().works.waited(wait)


def _wait_failed(wait: Wait, error: BaseException) -> None:
    _here().works.waited(wait, error)


def _asked(args: Args, _kwargs: Kwargs) -> Pending | None:
    return None if _in_graph() else _here().works.asked(args[0])


def _answered(pending: Pending, completed: bool) -> None:
    _here().works.answered(pending, completed)


def _given_future(pending: Pending, future: Any) -> None:
    _here().works.given_future(pending, future)


def _tensor_wait_begins(args: Args, kwargs: Kwargs) -> Wait | None:
    return None if _in_graph() else _here().works.tensor_wait_begins(args[0] if args else kwargs["tensor"])


def _block_ends(args: Args, _kwargs: Kwargs) -> Any:
    return None if _in_graph() else args[0]


def _block_ended(group: Any, work: Any) -> None:
    _here().works.block_ended(group, work)


def _block_failed(group: Any, _error: BaseException) -> None:
    _here().works.block_ended(group, None)


# -- process groups ---------------------------------------------------------------------------------


def _initialised(_span: object, _result: object) -> None:
    _meet()


def _meet() -> None:
    """Know of the world that is there: it may have begun before the recording, and has not begun a second time."""
    if not c10d().is_initialized():
        return
    comm, store, world = _here(), c10d()._get_default_store(), c10d().GroupMember.WORLD
    if comm.binding.store is not store:
        comm.tracer.steps.group_seq = partial(sequence_number, world)
        comm.binding.initialised(store, world.rank(), world.size())


def _destroy_begins(args: Args, kwargs: Kwargs) -> bool | None:
    comm = _here()
    group = args[0] if args else kwargs.get("group")
    if is_outside(group):
        return None
    everything = group is None or group is c10d().GroupMember.WORLD
    gone = None if everything else group
    before_destroyed(gone)
    comm.forget(gone)
    forget(gone)
    if everything:
        comm.binding.destroyed()
        comm.tracer.steps.group_seq = lambda: 0
    return everything


def _destroyed(everything: bool, _result: object) -> None:
    if everything:
        _here().recorded.leave()  # all is over; the next world's numbers begin anew


def _attach(_module: ModuleType) -> Undo:
    """Meet a world that was there before us, and write what is done but unwritten when we leave."""
    if live.tracer is not None:
        guarded(_meet)()

    def detach() -> None:
        if _comm is not None:
            _comm.works.leave()
            _comm.recorded.leave()

    return detach


def _write_done() -> None:
    if _comm is not None:
        _comm.works.flush()


writers.append(_write_done)


def _site(call: Call) -> Site:
    begin = partial(_begin, call)
    around = OF_GROUPS if call.is_method else None
    return Site(call.module, call.name, begin, _finish, _fail, Level.COLLECTIVE, call.since, call.until, around)


ROWS: tuple[Row, ...] = (
    *(_site(call) for call in METHODS),
    *(_site(call) for call in FUNCTIONS),
    Site(
        C10D,
        "ProcessGroup._end_coalescing",
        _block_ends,
        _block_ended,
        _block_failed,
        Level.COLLECTIVE,
        around=OF_GROUPS,
    ),
    Site(C10D, "Work.wait", _wait_begins, _waited, _wait_failed, Level.COLLECTIVE, around=OF_WORKS),
    Site(C10D, "Work.is_completed", _asked, _answered, level=Level.COLLECTIVE, around=OF_WORKS),
    Site(C10D, "Work.get_future", _asked, _given_future, level=Level.COLLECTIVE, around=OF_WORKS),
    operators(
        [
            *(_site(call) for call in OPERATORS),
            Site("", "batch_p2p_ops", _batch_begins, _finish, _fail, Level.COLLECTIVE),
            Site("", "wait_tensor", _tensor_wait_begins, _waited, _wait_failed, Level.COLLECTIVE),
        ]
    ),
    *DYNAMO,
)
WORLD: tuple[Row, ...] = (
    *COUNTS,
    Site(C10D, "init_process_group", begin=always, finish=_initialised),
    Site(C10D, "destroy_process_group", begin=_destroy_begins, finish=_destroyed),
    Attachment(C10D, _attach),
    BLOCKS,
)
"""Who the ranks are, which every source needs, and what the program's own blocks do."""

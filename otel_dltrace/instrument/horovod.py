"""Horovod's PyTorch plugin: every operation of every rank, from its call until the program knows that it is done.

All of its calls (``allreduce``, its variants, `DistributedOptimizer`, ``broadcast_parameters``) go through a private
function for each operation, which returns a handle, and end in ``synchronize``: so these are traced. Horovod itself
knows on rank 0 alone when a rank was ready, and not once its cache answers; a rank always knows when it called.
What happens inside an operation only Horovod's own timeline tells: where there is one, the drain reads it as it grows.
"""

import dataclasses
import sys
from functools import partial
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._handle_sites import LEVEL, Plugin
from otel_dltrace.instrument._handles import Pending
from otel_dltrace.instrument._horovod.calls import BLOCKING, CALLS, OPS, SETS, Call
from otel_dltrace.instrument._horovod.operations import Described, Operations, Series
from otel_dltrace.instrument._horovod.part import first_of, is_part
from otel_dltrace.instrument._horovod.store import agreed, following, propose, tell, told
from otel_dltrace.instrument._launcher import world_bind
from otel_dltrace.instrument._loop import loop_of
from otel_dltrace.instrument._sites import Args, Kwargs, Row, Site
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.semconv import Level
from otel_dltrace.record.operation import Operation

DYNAMIC = "DYNAMIC"
"""As ``HOROVOD_TIMELINE``: there is no file until the program asks for one."""
CATCH_UP_S = 1.0
"""How long `hvd.shutdown` waits at most for the drain to have read the timeline."""
Launch = tuple[Pending, Described]
_plugin = Plugin(OPS, Operations)


# -- operations -------------------------------------------------------------------------------------


def _begin(call: Call, args: Args, kwargs: Kwargs) -> Launch:
    return _plugin.here().begin(call, call.positional(args, kwargs))


def _launched(launch: Launch, handle: int) -> None:
    _plugin.here().launched(*launch, handle)


def _refused(launch: Launch, error: BaseException) -> None:
    launch[0].close(error=error)


# -- barrier and join -------------------------------------------------------------------------------

Plain = tuple[Operation, Series]


def _barrier_begins(args: Args, kwargs: Kwargs) -> Plain:
    return _plugin.here().begin_plain("barrier", args[0] if args else kwargs.get("process_set"))


def _join_begins(_args: Args, _kwargs: Kwargs) -> Plain:
    return _plugin.here().begin_plain("join")


def _plain_over(plain: Plain, _result: object) -> None:
    operation, series = plain
    operation.close(series.number())


def _joined(plain: Plain, result: object) -> None:
    _plain_over(plain, result)
    _plugin.here().joined()


def _plain_failed(plain: Plain, error: BaseException) -> None:
    plain[0].close(error=error)


# -- the beginning and the end ----------------------------------------------------------------------


def _init_begins(args: Args, kwargs: Kwargs) -> tuple[Operations, Any, int] | None:
    here = _plugin.here()
    if here.starts and sys.modules[OPS].is_initialized():
        return None  # a library may call it once more, and then nothing begins
    propose(here.tracer)
    return here, args[0] if args else kwargs.get("comm"), monotonic_ns()


def _initialised(begun: tuple[Operations, Any, int], _result: object) -> None:
    """Bind by what Horovod and the launcher say, and follow the timeline that the user asked for."""
    ops = sys.modules[OPS]
    here, comm, since = begun
    here.initialised(first_of(comm, here.tracer.environment, ops))
    _bind(here, ops, since)
    _follow(ops, here.tracer.horovod_timeline())


def _bind(here: Operations, ops: Any, since: int) -> None:
    """Bind this process as of *since*, when `hvd.init` began: the timeline's first mark is of then."""
    tracer = here.tracer
    bind = _run_of(here, ops)
    if bind is None:
        return
    if tracer.environment.is_elastic and ops.rank() == 0:
        tell(tracer, bind)
    if not is_part(tracer.environment, ops):
        place = {"rank": ops.rank(), "world_size": ops.size(), "local_rank": ops.local_rank()}
        place |= {"local_world_size": ops.local_size(), "node_rank": ops.cross_rank()}
        bind = dataclasses.replace(bind, **place)
    if here.starts > 1:
        loop_of(tracer).interrupted()  # the step that is open is of the start before
    tracer.recorder.bind(bind, tracer.steps.upcoming, since)


def _run_of(here: Operations, ops: Any) -> Bind | None:
    """Return the bind, less this rank's place, for what `hvd.init` has begun; None if it is not known, or not ours."""
    tracer = here.tracer
    before = tracer.recorder.bound
    if before is not None:
        return following(before) if here.starts > 1 else None
    if not is_part(tracer.environment, ops):
        tracer.steps.group_seq = lambda: here.last
    bind = told(tracer) if ops.rank() and tracer.environment.is_elastic else None
    return bind or world_bind(tracer, ops.size()) or agreed(tracer)


def _follow(ops: Any, path: str) -> None:
    """Have the drain read the timeline *path*, which rank 0 writes."""
    recorder = _plugin.here().tracer.recorder
    if path and path != DYNAMIC and recorder.level >= Level.PHASE and ops.rank() == 0:
        recorder.follow(path)
        _plugin.here().follows_timeline = True


def _timeline_begins(args: Args, kwargs: Kwargs) -> str:
    return str(args[0] if args else kwargs.get("file_path", ""))


def _timeline_began(path: str, _result: object) -> None:
    _follow(sys.modules[OPS], path)


def _shutdown_begins(_args: Args, _kwargs: Kwargs) -> Operations:
    here = _plugin.here()
    here.handles.leave()
    return here


def _shut_down(here: Operations, _result: object) -> None:
    """Have the drain read the timeline to its end: what `hvd.init` begins next overwrites it."""
    tracer = here.tracer
    starter, ring = tracer.starter, tracer.recorder.ring
    if here.follows_timeline and ring is not None and starter is not None and starter.mode != "off":
        starter.catch_up(ring.path, CATCH_UP_S)


def _removal_begins(args: Args, kwargs: Kwargs) -> int | None:
    process_set = args[0] if args else kwargs.get("process_set")
    number = getattr(process_set, "process_set_id", None)
    return number if isinstance(number, int) else None


def _removed(number: int, is_removed: bool) -> None:
    if is_removed:
        _plugin.here().removed(number)


ROWS: tuple[Row, ...] = (
    Site(OPS, "init", _init_begins, _initialised),
    Site(OPS, "shutdown", _shutdown_begins, _shut_down),
    Site(OPS, "start_timeline", _timeline_begins, _timeline_began, level=Level.PHASE),
    *(Site(OPS, call.function, partial(_begin, call), _launched, _refused, LEVEL) for call in CALLS),
    Site(OPS, "barrier", _barrier_begins, _plain_over, _plain_failed, LEVEL),
    Site(OPS, "join", _join_begins, _joined, _plain_failed, LEVEL),
    Site(SETS, "remove_process_set", _removal_begins, _removed),
    *_plugin.rows(BLOCKING),
)

"""The MPI calls of a program that uses mpi4py, and who its ranks are.

The classes of mpi4py are compiled, and refuse `setattr`. Their methods are looked up in a dict all
the same: there the traced ones take their places. So every communicator stays the object that it
is, of the class that it has, whoever made it and whatever it is compared or pickled with.
"""

import ctypes
import dataclasses
import gc
import sys
from collections.abc import Callable
from functools import partial
from operator import index
from time import monotonic_ns
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._launcher import world_bind
from otel_dltrace.instrument._mpi.buffers import NOTHING
from otel_dltrace.instrument._mpi.calls import CALLS
from otel_dltrace.instrument._mpi.comm import Comm, current
from otel_dltrace.instrument._mpi.family import Call, Role
from otel_dltrace.instrument._mpi.probes import begin_matched, begin_probe
from otel_dltrace.instrument._mpi.running import begin_call
from otel_dltrace.instrument._mpi.usual import is_usual, shortened
from otel_dltrace.instrument._sites import Args, Attachment, Kwargs, Row, Site, Undo, began, log, put, wrap
from otel_dltrace.model.semconv import COLLECTIVE, Level
from otel_dltrace.record.blocks import note_end
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.tracer import Tracer, live

MODULE = "mpi4py.MPI"
_module: Any = None


def _here() -> Comm | None:
    """Return the communication that the live tracer follows; None before MPI is there, and after its end."""
    tracer, comm = live.tracer, current.comm
    if tracer is None or _module is None:
        return None
    if comm is None or comm.tracer is not tracer:
        if not _module.Is_initialized() or _module.Is_finalized():
            return None
        comm = current.comm = Comm(tracer, _module)
    return comm


# -- calls ----------------------------------------------------------------------------------------


def _begin(call: Call, args: Args, kwargs: Kwargs) -> Any:
    comm = _here()
    if comm is None or not args:
        return None
    if call.role is Role.PROBE:
        return begin_probe(comm, call, args, kwargs)
    if call.role is Role.MATCHED:
        return begin_matched(comm, call, args, kwargs)
    return begin_call(comm, call, args, kwargs)


def _finish(span: Any, result: Any) -> None:
    span.finish(result)


def _fail(span: Any, error: BaseException) -> None:
    span.fail(error)


# -- requests -------------------------------------------------------------------------------------


def _wait_begins(many: str, waiting: bool, args: Args, kwargs: Kwargs) -> Any:
    comm = _here()
    return None if comm is None else comm.requests.wait_begins(many, waiting, args, kwargs)


def _waited(wait: Any, result: Any) -> None:
    if current.comm is not None:
        current.comm.requests.waited(wait, result)


def _wait_failed(wait: Any, error: BaseException) -> None:
    if current.comm is not None:
        current.comm.requests.wait_failed(wait, error)


def _start_begins(args: Args, _kwargs: Kwargs) -> Any:
    comm = _here()
    return None if comm is None else comm.requests.start_begins(args[:1])


def _startall_begins(args: Args, kwargs: Kwargs) -> Any:
    comm = _here()
    requests: Any = args[1] if len(args) > 1 else kwargs.get("requests")
    return comm.requests.start_begins(requests) if comm is not None and hasattr(requests, "__len__") else None


def _started(begun: Any, _result: object) -> None:
    if current.comm is not None:
        current.comm.requests.started(begun)


def _start_failed(begun: Any, error: BaseException) -> None:
    for _, parts in begun:
        for part in parts:
            part.operation.close(part.seq, error=error)


def _free_begins(args: Args, _kwargs: Kwargs) -> Any:
    comm = _here()
    if comm is not None and args:
        comm.requests.freed(args[0])


def _cancel_begins(args: Args, _kwargs: Kwargs) -> Any:
    comm = _here()
    if comm is not None and args:
        comm.requests.cancelled(args[0])


def _requests() -> list[tuple[str, Site]]:
    waits = [
        ("Request", _site(name, partial(_wait_begins, many, verb == "wait"), _waited, _wait_failed))
        for verb in ("wait", "test")
        for many in ("", "all", "any", "some")
        for name in (verb + many, (verb + many).capitalize())
    ]
    return [
        *waits,
        ("Comm", Site(MODULE, "Abort", _abort_begins)),
        *(("Request", Site(MODULE, name, _free_begins, level=Level.COLLECTIVE)) for name in ("Free", "free")),
        *(("Request", Site(MODULE, name, _cancel_begins, level=Level.COLLECTIVE)) for name in ("Cancel", "cancel")),
        ("Prequest", _site("Start", _start_begins, _started, _start_failed)),
        ("Prequest", _site("Startall", _startall_begins, _started, _start_failed)),
    ]


# -- beginning and end of MPI ---------------------------------------------------------------------


def _now(_args: Args, _kwargs: Kwargs) -> int:
    return monotonic_ns()


def _initialised(since: int, _result: object) -> None:
    """Know who we are, and write how long it took to begin, unless alone: who only asks whether MPI is there is."""
    comm = _here()
    if comm is None:
        return
    tracer, world = comm.tracer, comm.groups.world
    if tracer.recorder.bound is None and not tracer.is_joining:  # else torch's ranks agree on a run, and count
        tracer.steps.group_seq = lambda: world.last
        _bind(tracer, comm.groups.rank, comm.groups.size)
    if since and comm.groups.size > 1 and tracer.recorder.level >= Level.COLLECTIVE:
        operation = comm.operation("init", world, NOTHING, COLLECTIVE, 0, -1, 0)
        operation.start = since
        operation.close()


def _bind(tracer: Tracer, rank: int, size: int) -> None:
    """Bind this process, if its launcher says which run of which job it is (contract 1)."""
    bind = world_bind(tracer, size)
    if bind is not None:
        local = bind.local_world_size if bind.world_size == size else 1
        tracer.recorder.bind(dataclasses.replace(bind, rank=rank, world_size=size, local_world_size=local))


def _finalize_begins(_args: Args, _kwargs: Kwargs) -> Any:
    comm = _here()
    if comm is None:
        return None
    comm.requests.leave()
    world = comm.groups.world
    return comm.operation("finalize", world, NOTHING, COLLECTIVE, 0, -1, 0), world.number()


def _finalized(span: Any, _result: object) -> None:
    operation, number = span
    operation.close(number)
    current.comm = None  # whoever asks MPI anything from now on ends the program


def _finalize_failed(span: Any, error: BaseException) -> None:
    operation, number = span
    operation.close(number, error=error)


class Abort(Exception):  # noqa: N818  -- the report calls it so
    """What a program that calls `Abort` ends with, where it handles no error."""

    __module__ = MODULE


def _abort_begins(args: Args, kwargs: Kwargs) -> None:
    """Note why the job ends: no line of the program comes after this, and nothing is ours to wait for.

    The drain reads what is recorded when the process is gone. One that calls this for an error that it has caught, or
    that its `sys.excepthook` is told of, ends by that.
    """
    comm = _here()
    code = args[1] if len(args) > 1 else kwargs.get("errorcode", 0)
    if comm is None or not args or not args[0] or not hasattr(code, "__index__"):
        return  # it will be refused, and the program goes on
    error = sys.exc_info()[1] or (None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
    note_end(comm.tracer, error or Abort(f"code {index(code)}"))
    if comm.tracer.steps.is_open:
        comm.tracer.steps.end()


# -- in place -------------------------------------------------------------------------------------


def _site(name: str, begin: Callable[[Args, Kwargs], Any], finish: Any, fail: Any) -> Site:
    return Site(MODULE, name, begin, finish, fail, Level.COLLECTIVE)


_FUNCTIONS = (
    Site(MODULE, "Init", _now, _initialised),
    Site(MODULE, "Init_thread", _now, _initialised),
    _site("Finalize", _finalize_begins, _finalized, _finalize_failed),
)


def _sites() -> list[tuple[str, Site]]:
    """Return what is traced: a class, and the site of one of its methods."""
    return [(call.holder, _site_of(call)) for call in CALLS] + _requests()


def _site_of(call: Call) -> Site:
    site = _site(call.name, partial(_begin, call), _finish, _fail)
    return dataclasses.replace(site, around=partial(shortened, call)) if is_usual(call) else site


def _replace_method(holder: type, site: Site) -> Undo | None:
    """Put *site* around a method of the compiled class *holder*; None where it has no such method."""
    methods = _dict_of(holder)
    original = methods.get(site.name)
    if original is None:
        log.debug("%s.%s is not there and not traced", holder.__name__, site.name)
        return None
    on_class = isinstance(original, classmethod)
    wrapper: Any = wrap(site, original.__func__ if on_class else original)
    methods[site.name] = wrapper = classmethod(wrapper) if on_class else wrapper

    def restore() -> None:
        if methods.get(site.name) is wrapper:
            methods[site.name] = original

    return restore


def _dict_of(holder: type) -> dict[str, Any]:
    """Return the dict behind the read-only view that a class has of its own."""
    (methods,) = (found for found in gc.get_referents(vars(holder)) if type(found) is dict)
    return methods


def _forget_lookups(holders: set[type]) -> None:
    """Have the interpreter look methods up anew, which it remembers by class."""
    for holder in holders:
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(holder))


def _attach(module: ModuleType) -> Undo:
    """Put the methods in place, and meet an MPI that has begun."""
    global _module  # noqa: PLW0603  -- there is one
    _module = module
    functions = (put(module, site.name, partial(wrap, site)) for site in _FUNCTIONS)
    undos = [undo for undo in functions if undo is not None]
    holders: set[type] = set()
    for name, site in _sites():
        holder = getattr(module, name)
        undo = _replace_method(holder, site)
        if undo is not None:
            undos.append(undo)
            holders.add(holder)
    _forget_lookups(holders)
    # mpi4py begins MPI while it is imported, unless told not to.
    guarded(_initialised)(began.pop(MODULE, 0), None)

    def detach() -> None:
        global _module  # noqa: PLW0603  -- there is one
        for undo in reversed(undos):
            undo()
        _forget_lookups(holders)
        if current.comm is not None:
            current.comm.requests.leave()
        _module = None

    return detach


ROWS: tuple[Row, ...] = (Attachment(MODULE, _attach),)

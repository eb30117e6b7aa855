"""Forked children: they record apart; one of `multiprocessing` leaves by ``os._exit``, and `atexit` calls nothing."""

import sys
from collections.abc import Callable
from dataclasses import replace

from otel_dltrace.model.identity import Bind, own_generation
from otel_dltrace.record import guard
from otel_dltrace.record.process_id import process_nonce
from otel_dltrace.record.tracer import Tracer, live

FORKED = ("fork", "forkserver")
"""The start methods whose children end so; others' end as programs do."""
LAST = -1_000_000
"""After what the program has `multiprocessing` call: that may train."""

_is_followed = False
"""Whether `multiprocessing` knows of us; a child inherits both."""


@guard.guarded
def after_fork(stop: Callable[[], None]) -> None:
    """Have this child record apart: what it does in its parent's step stays there, steps of its own are no rank's.

    *stop* ends the recording.
    """
    end_in_children(stop)
    tracer = live.tracer
    if tracer is None:
        return
    tracer.leaving.clear()  # what is under way is the parent's
    tracer.recorder.after_fork()
    tracer.recorder.home["alone"] = True
    tracer.steps.after_fork()
    if tracer.loop is not None:
        tracer.loop.begin_anew()
    if tracer.starter is not None:
        tracer.starter.after_fork()
    if (bound := tracer.recorder.bound) is not None:
        _bind_apart(tracer, bound)


def _bind_apart(tracer: Tracer, inherited: Bind) -> None:
    """Bind a forked child to a generation of its own once it begins a step, which its parent may begin as well.

    One that joins a process group is bound by that.
    """
    on_begin = tracer.steps.on_begin

    @guard.guarded
    def begun() -> None:
        if tracer.is_joining:
            return
        on_begin.remove(begun)
        if tracer.recorder.bound is inherited:
            generation = own_generation(inherited.generation, process_nonce().hex())
            tracer.recorder.bind(replace(inherited, generation=generation))

    on_begin.append(begun)


@guard.guarded
def end_in_children(stop: Callable[[], None]) -> None:
    """Have *stop* called where a child of `multiprocessing` ends that has trained: this process, or one it will fork.

    Called in each child once more: `multiprocessing` may not have been loaded before, and is not because of us.
    """
    global _is_followed  # noqa: PLW0603  -- it takes nothing back
    util = sys.modules.get("multiprocessing.util")
    if util is None or _is_followed:
        return
    _is_followed = True
    _end_here(stop)
    util.register_after_fork(stop, _end_here)  # a child first forgets what its parent wanted called


@guard.guarded
def _end_here(stop: Callable[[], None]) -> None:
    import multiprocessing.util

    if multiprocessing.parent_process() is not None and multiprocessing.get_start_method(allow_none=True) in FORKED:
        multiprocessing.util.Finalize(None, _ended, (stop, _upcoming()), exitpriority=LAST)


def _upcoming() -> int:
    return 0 if live.tracer is None else live.tracer.steps.upcoming


def _ended(stop: Callable[[], None], upcoming: int) -> None:
    """End the recording if a step has begun since *upcoming* was: one that only loads data has nobody wait for it."""
    if _upcoming() != upcoming:
        stop()

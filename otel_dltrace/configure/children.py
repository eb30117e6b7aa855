"""The end of a child that `multiprocessing` has forked: it leaves by ``os._exit``, and `atexit` calls nothing."""

import sys
from collections.abc import Callable

from otel_dltrace.record import guard
from otel_dltrace.record.steps import live

FORKED = ("fork", "forkserver")
"""The start methods whose children end so; others' end as programs do."""
LAST = -1_000_000
"""After what the program has `multiprocessing` call: that may train."""

_is_followed = False
"""Whether `multiprocessing` knows of us; a child inherits both."""


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

"""Callbacks of ours on futures that are still to come: none may find the interpreter gone, or its group ending.

A callback on a future of torch takes Python's lock on a thread of the backend: to run, and once more to be let go.
Where that comes while the interpreter ends, the process dies of it. So a process that ends with such operations under
way waits for them. It would without us as well, a little later: their group's destructor does.

Before PyTorch 2.8 (pull 154976) that destructor holds Python's lock as it waits for the threads of the backend. So it
may not run before the callbacks of a group have been let go, which is a little after the program goes on: each callback
holds its group until then.
"""

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from otel_dltrace.record import guard

TOLD_S = 5.0
"""After so long a wait, a sentence says what for."""
RETURN_S = 0.01
"""What the thread gets that has let a callback go: it takes the lock once more for the tensors that are its own."""
PATIENCE_S = 0.1
"""How long a group that is being destroyed is held up for callbacks; those that come later hold it themselves."""
_outstanding: dict["weakref.ref[Any]", Any] = {}
"""The callbacks that torch has not let go yet, each with its group, which must not end on a thread of its own."""
_let_go: "deque[weakref.ref[Any]]" = deque()
"""Those that it has: told on the thread of the backend, which appends and does nothing else."""
writers: list[Callable[[], None]] = []
"""What writes the operations whose callbacks have come."""
_pid = 0
"""Whose end waits."""


def called(attach: Callable[[Any], Any], callback: Callable[[Any], Any], group: Any) -> Any:
    """Return what *attach* does with *callback*, which is to come and holds *group* until torch has let it go.

    Args:
        attach: A future's ``then`` or ``add_done_callback``.
        callback: Takes the future; nobody but torch may keep it.
        group: The process group whose operation it is about.
    """
    global _pid  # noqa: PLW0603  -- hooks of the interpreter cannot be taken back
    if not _pid:
        _pid = os.getpid()
        atexit.register(_outlive)  # it runs before the recording ends, which was registered earlier
    _release()
    known = weakref.ref(callback, _let_go.append)
    _outstanding[known] = group  # before: the callback comes at once where the future is done
    try:
        return attach(callback)
    except BaseException:
        _outstanding.pop(known, None)
        raise


def _release() -> None:
    """Let go of the groups whose callbacks have been let go."""
    while _let_go:
        _outstanding.pop(_let_go.popleft(), None)


def _is_held(group: Any) -> bool:
    """Return whether callbacks hold *group* (None: any)."""
    return any(group is None or held is group for held in list(_outstanding.values()))


def before_destroyed(group: Any) -> None:
    """Have *group* (None: every group) end where the program destroys it, if its callbacks are let go by then."""
    if not _is_held(group):
        return
    until = monotonic() + PATIENCE_S
    _release()
    while _is_held(group) and monotonic() < until:
        sleep(0.001)
        _release()
    sleep(RETURN_S)


def _outlive() -> None:
    if os.getpid() != _pid:
        return  # a forked child: the operations are its parent's
    told = monotonic() + TOLD_S
    _release()
    while _outstanding:
        if monotonic() > told:
            guard.say("the process waits for collectives that are under way; it would without tracing as well")
        sleep(0.002)
        _release()
    sleep(RETURN_S)
    for write in writers:
        guard.guarded(write)()

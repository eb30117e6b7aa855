"""Callbacks of ours on futures that are still to come: none may find the interpreter gone.

A callback on a future of torch takes Python's lock on a thread of the backend. Where it comes while the interpreter
ends, the process dies of it. So a process that ends with such operations under way waits for them. It would without
us as well, a little later: their group's destructor does.
"""

import atexit
import os
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

from otel_dltrace.record import guard

TOLD_S = 5.0
"""After so long a wait, a sentence says what for."""
RETURN_S = 0.01
"""What the thread gets that called last: it takes the lock once more as it returns."""
outstanding: set[object] = set()
"""What has a callback that has not come yet."""
writers: list[Callable[[], None]] = []
"""What writes the operations whose callbacks have come."""
_pid = 0
"""Whose end waits."""


def _expect(key: object) -> None:
    """Know of a callback that is to come, and takes *key* out of `outstanding`."""
    global _pid  # noqa: PLW0603  -- hooks of the interpreter cannot be taken back
    if not _pid:
        _pid = os.getpid()
        atexit.register(_outlive)  # it runs before the recording ends, which was registered earlier
    outstanding.add(key)


def called(attach: Callable[[Any], Any], key: object, callback: Callable[[Any], Any]) -> Any:
    """Return what *attach* does with *callback*, which is to come and takes *key* out of `outstanding`.

    Args:
        attach: A future's ``then`` or ``add_done_callback``.
        key: What the callback is for.
        callback: Takes the future.
    """
    _expect(key)  # before: the callback comes at once where the future is done
    try:
        return attach(callback)
    except BaseException:
        outstanding.discard(key)
        raise


def _outlive() -> None:
    if os.getpid() != _pid:
        return  # a forked child: the operations are its parent's
    told = monotonic() + TOLD_S
    while outstanding:
        if monotonic() > told:
            guard.say("the process waits for collectives that are under way; it would without tracing as well")
        sleep(0.002)
    sleep(RETURN_S)
    for write in writers:
        guard.guarded(write)()

"""The drain as a thread of the training process, where no process may be started."""

import threading
from collections.abc import Callable

from otel_dltrace.export.drain import Drain
from otel_dltrace.record.ring import RingWriter

PAUSE_S = 0.02
"""Short pauses keep each turn near a millisecond: long ones of plain Python would slow the trainer down."""


def start_drain_thread(drain: Drain, ring: RingWriter) -> Callable[[float], None]:
    """Drain *ring*, the caller's own, in a daemon thread; return what ends it within some seconds."""
    drain.own = (ring.path, ring.buffer)
    stop = threading.Event()
    thread = threading.Thread(target=_run, args=(drain, stop), name="otel_dltrace drain", daemon=True)
    thread.start()

    def finish(timeout: float) -> None:
        drain.stop_requested = True
        stop.set()
        thread.join(timeout)

    return finish


def _run(drain: Drain, stop: threading.Event) -> None:
    def pause(seconds: float) -> None:
        stop.wait(min(seconds, PAUSE_S))

    drain.run(pause)

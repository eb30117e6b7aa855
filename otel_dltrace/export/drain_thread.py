"""The drain as a thread of the training process, where no process may be started."""

import concurrent.futures.thread  # noqa: F401  -- pyarrow's Parquet wants it, and at the interpreter's end it is too late
import threading
from collections.abc import Callable

from otel_dltrace.export.drain import Drain
from otel_dltrace.record.ring import RingWriter

PAUSE_S = 0.1
"""Most turns only copy new records, in half a millisecond; those that encode a second's take some milliseconds."""


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

"""The drain as a thread of the training process, where no process may be started."""

import atexit
import concurrent.futures.thread  # noqa: F401  -- pyarrow's Parquet wants it, and at the interpreter's end it is too late
import threading
from collections.abc import Callable

from otel_dltrace.export.drain import Drain
from otel_dltrace.record.launch import DrainThread
from otel_dltrace.record.ring import RingWriter

PAUSE_S = 0.1
"""Most turns only copy new records, in half a millisecond; those that encode a second's take some milliseconds."""
AT_EXIT_S = 60.0
"""What the thread gets at the end of the interpreter, which aborts the process if it finds a thread within Arrow."""


def start_drain_thread(make: Callable[[], Drain], ring: RingWriter) -> DrainThread | None:
    """Have the drain that *make* makes read *ring*, our own, in a daemon thread.

    Where a drain process reads it, that goes on and none is made, until it is asked again.
    """
    if not ring.take_for_reading():
        return None
    stop = threading.Event()
    try:
        drain = make()
        drain.rings.own = (ring.path, ring.buffer)
        thread = threading.Thread(target=_run, args=(drain, stop), name="otel_dltrace drain", daemon=True)
        thread.start()
    except Exception:
        ring.leave_reading()  # to a drain process, which may have better settings, or where we may have no thread
        raise

    def hurry() -> None:
        drain.hurry = True

    def end(timeout: float) -> None:
        drain.stop_requested = True
        stop.set()
        thread.join(timeout)
        if not threading.main_thread().is_alive():  # it is at its end already
            thread.join(AT_EXIT_S)
        elif thread.is_alive():
            atexit.register(thread.join, AT_EXIT_S)
            return
        ring.end_reading()

    return DrainThread(hurry, end)


def _run(drain: Drain, stop: threading.Event) -> None:
    def pause(seconds: float) -> None:
        stop.wait(min(seconds, PAUSE_S))

    drain.run(pause)

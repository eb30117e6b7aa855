"""Turn this host's rings into the run directory and OTLP, until their writers are gone.

The first rank of a host starts it by itself; start one by hand (or as a sidecar) where
ranks run with OTEL_DLTRACE_DRAIN=off.
"""

import argparse
import os
import select
import signal
from pathlib import Path
from types import FrameType

from otel_dltrace.configure import drain_for
from otel_dltrace.export.drain import Drain
from otel_dltrace.model.errors import DltraceError
from otel_dltrace.record.launch import ALL_RINGS, take_lock
from otel_dltrace.record.ring import make_ring_folder
from otel_dltrace.settings import Config


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--home", metavar="NAME", help="serve only the rings of the drain called NAME")
    parser.add_argument("--lock", type=int, metavar="FD", help="the lock is held by this descriptor already")
    parser.add_argument("--stay", action="store_true", help="wait for writers until SIGTERM")


def run(args: argparse.Namespace) -> int:
    """Serve rings; return 0, or 2 where another drain does."""
    config = Config.from_env()
    make_ring_folder(config.rings)
    name = args.home or ALL_RINGS
    lock = args.lock if args.lock is not None else take_lock(config.rings / f"{name}.lock")
    if lock is None:
        raise DltraceError(f"another drain serves {config.rings}; one is enough")
    os.nice(10)
    drain = drain_for(config, args.home)
    signal.signal(signal.SIGTERM, lambda number, frame: _stop(drain, number, frame))
    bell = config.rings / f"{name}.bell"
    pause = Bell(bell, drain, stay=args.stay)
    try:
        drain.run(pause)
    finally:
        bell.unlink(missing_ok=True)
        (config.rings / f"{name}.lock").unlink(missing_ok=True)
    for root in drain.writers:
        print(root)
    log = config.rings / f"{name}.log"
    if log.exists() and not log.stat().st_size:
        log.unlink()
    return 0


def _stop(drain: Drain, _number: int, _frame: FrameType | None) -> None:
    drain.stop_requested = True


class Bell:
    """A named pipe: whoever writes to it wakes the drain.

    Args:
        path: The pipe.
        drain: Whose pauses these are.
        stay: Keep the drain from ending by itself.
    """

    def __init__(self, path: Path, drain: Drain, stay: bool = False) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._drain = drain
        if stay:
            drain.linger = float("inf")

    def __call__(self, seconds: float) -> None:
        """Wait *seconds*, or until somebody rings; a ring asks for everything at once."""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        if ready:
            os.read(self._fd, 4096)
            self._drain.hurry = True

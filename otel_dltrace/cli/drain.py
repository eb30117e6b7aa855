"""Turn this host's rings into the run directory and OTLP, until their writers are gone.

Usually the first rank of a host starts it; start one by hand (or as a sidecar) if ranks
run with OTEL_DLTRACE_DRAIN=off.
"""

import argparse
import math
import os
import resource
import select
import signal
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TextIO

from otel_dltrace.configure.drains import drain_for
from otel_dltrace.export.drain import CLOSE_S, Drain
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.export.serving import LINGER_S
from otel_dltrace.model.errors import DltraceError
from otel_dltrace.record.launch import ALL_RINGS
from otel_dltrace.record.locks import take_lock
from otel_dltrace.record.ring_file import make_ring_folder
from otel_dltrace.settings.config import Config


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--home", type=home, metavar="NAME", help="serve only the rings of the drain called NAME")
    parser.add_argument("--lock", type=descriptor, metavar="FD", help="this file descriptor already holds the lock")
    parser.add_argument(
        "--print-to", type=descriptor, metavar="FD", help="what exporters print goes to this descriptor"
    )
    parser.add_argument(
        "--linger",
        type=seconds,
        default=LINGER_S,
        metavar="SECONDS",
        help="how long to wait for more writers (%(default)s)",
    )
    parser.add_argument(
        "--deliver",
        type=seconds,
        default=CLOSE_S,
        metavar="SECONDS",
        help="how long to go on delivering at the end, half as long if the collector is away; the rest is spilled to "
        "disk (%(default)s)",
    )
    parser.add_argument("--stay", action="store_true", help="wait for writers until SIGTERM")
    parser.add_argument(
        "--while-open",
        action="store_true",
        help="wait for writers until SIGTERM, or until standard input has something to read or ends",
    )


def home(text: str) -> str:
    """Return *text* as the name of a drain, after which files of the ring folder are called.

    Raises:
        ArgumentTypeError: It is none.
    """
    if Path(text).name != text:
        raise argparse.ArgumentTypeError(f"{text!r} is not the name of a drain: write its lock's name without .lock")
    return text


def descriptor(text: str) -> int:
    """Return *text* as the number of a descriptor that is open.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        os.fstat(int(text))
    except (ValueError, OverflowError, OSError):
        raise argparse.ArgumentTypeError(f"{text!r} is not an open file descriptor") from None
    return int(text)


def seconds(text: str) -> float:
    """Return *text* as a time to wait.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more: write 5, for example")
    return value


def run(args: argparse.Namespace) -> int:
    """Serve rings; return 0, or 2 where another drain does."""
    out = sys.stdout if args.print_to is None else _print_to(args.print_to)
    config = Config.from_env()
    if args.lock is None:
        # Who asked for us can mend it. A training process that started us keeps its spans, without metrics.
        MetricSettings.from_env(os.environ)
    config.check_writable()
    make_ring_folder(config.rings)
    name = args.home or ALL_RINGS
    lock = args.lock if args.lock is not None else take_lock(config.rings / f"{name}.lock")
    if lock is None:
        raise DltraceError(f"another drain serves {config.rings}; one is enough")
    os.nice(10)
    _allow_many_files()
    drain = drain_for(config, args.home)
    drain.linger = float("inf") if args.stay or args.while_open else args.linger
    drain.delivery_s = args.deliver
    signal.signal(signal.SIGTERM, partial(_stop, drain))
    bell = config.rings / f"{name}.bell"
    try:
        drain.run(Bell(bell, drain, _keeper(drain, args), args.linger))
    finally:
        _remove(bell)
    _remove(config.rings / f"{name}.lock")  # one that has failed leaves it: who started it looks
    with suppress(BrokenPipeError):  # who started us did not wait
        _print_roots(out, drain.runs.roots)
    log = config.rings / f"{name}.log"
    with suppress(OSError):  # there is none
        if not log.stat().st_size:
            log.unlink()
    if drain.outlet is not None and drain.outlet.is_stuck:
        os._exit(0)  # all is written; the interpreter would wait for threads that an exporter may have
    return 0


def _remove(path: Path) -> None:
    """Remove a file by which others find the drain; one that stays is that of a drain that was killed."""
    with suppress(OSError):
        path.unlink()


def _allow_many_files() -> None:
    """Have as many files open as we are let: each ring that is read takes three, and each run that goes on."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # what the system allows at all may be less by now
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _keeper(drain: Drain, args: argparse.Namespace) -> int | None:
    """Return the descriptor on which whoever keeps *drain* tells that it may end, None for none."""
    if not args.while_open:
        return None
    if sys.stdin is None:  # closed: nobody keeps it
        drain.linger = args.linger
        return None
    return sys.stdin.fileno()


def _print_roots(out: TextIO | None, roots: Iterable[Path]) -> None:
    if out is None:  # closed: nobody reads
        return
    for root in roots:
        out.buffer.write(os.fsencode(root) + b"\n")  # whatever the locale can say of it
    out.flush()


def _print_to(fd: int) -> TextIO:
    """Have all that is printed, by exporters that is, go to *fd*; return what our own words go to."""
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(fd, 1)
    os.close(fd)
    return ours


def _stop(drain: Drain, _number: int, _frame: FrameType | None) -> None:
    drain.stop_requested = True


class Bell:
    """A named pipe: whoever writes to it wakes the drain.

    Args:
        path: The pipe.
        drain: Whose pauses these are.
        keeper: A descriptor on which a byte asks the drain to end, also one that came before it was up; it ends when
            nobody keeps the drain any more. None: there is none.
        linger: How long it then waits for more writers.
    """

    def __init__(self, path: Path, drain: Drain, keeper: int | None, linger: float) -> None:
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._drain, self._keeper, self._linger = drain, keeper, linger

    def __call__(self, seconds: float) -> None:
        """Wait *seconds*, or until somebody rings; a ring asks for everything at once."""
        watched = [self._fd] if self._keeper is None else [self._fd, self._keeper]
        ready, _, _ = select.select(watched, [], [], seconds)
        if self._fd in ready:
            os.read(self._fd, 4096)
            self._drain.hurry = True
        if self._keeper in ready:
            if os.read(self._keeper, 1):
                self._drain.stop_requested = True
            else:  # who started us is gone: we end as if a rank had
                self._keeper, self._drain.linger = None, self._linger

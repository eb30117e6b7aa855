"""A drain that stays for as long as a command runs, and has finished before it ends."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from otel_dltrace.cli.printing import tell
from otel_dltrace.cli.progress import progress
from otel_dltrace.configure.drains import check_outlets
from otel_dltrace.configure.outcome import read_summary, short_path
from otel_dltrace.model.errors import DltraceError
from otel_dltrace.record import guard
from otel_dltrace.record.launch import DrainStarter
from otel_dltrace.record.locks import lock_is_held
from otel_dltrace.record.names import Names
from otel_dltrace.record.ring_file import make_ring_folder, read_whole
from otel_dltrace.settings.config import Config
from otel_dltrace.settings.switch import is_sdk_disabled

DRAIN_ENDS_S = 60.0
"""How long the drain may take to finish once the program has ended."""


class HeldDrain:
    """A drain that was started, and then *is_ours*, unless one ran.

    Once it has ended, *roots* are the run directories that it wrote, and *left* is why it has left rings behind. If it
    wrote none, *others* are those that came meanwhile, of programs that set variables of their own, or of other jobs.
    One that *is_busy* goes on: a process that it reads has outlived the program, and may stand still.
    """

    def __init__(self, starter: DrainStarter) -> None:
        self.starter = starter
        self.is_ours = self.is_busy = False
        self.roots: list[Path] = []
        self.others: list[Path] = []
        self.left = ""

    def outcome(self, root: Path) -> str:
        """Return what became of the spans of the run at *root*, and where it is."""
        if not root.is_dir():
            return f"somebody has removed {short_path(root)}"
        return f"{read_summary(root, is_over=not self.is_busy, left=self.left)}; in {short_path(root)}"

    def why_nothing(self) -> str:
        """Return what there is to say where it has read nothing."""
        if is_sdk_disabled(os.environ):
            return "nothing was traced: OTEL_SDK_DISABLED=true forbids it"
        if trouble := self.starter.trouble():
            return f"nothing was traced: {trouble}"
        if self.others:
            where = ", ".join(map(short_path, self.others))
            return f"nothing was traced with our settings; with other settings, meanwhile: {where}"
        return "nothing was traced"


@contextmanager
def hold_drain(config: Config) -> Iterator[HeldDrain]:
    """Start the drain of *config*, and end it behind the block.

    Raises:
        ConfigError: A variable of OTLP cannot be used.
        RingError: The folder for rings cannot be.
        DltraceError: No process can be started.
    """
    prints = check_outlets(certificates=True)  # a drain would go on without a collector; who asked for us can mend it
    make_ring_folder(config.rings)
    held = HeldDrain(
        DrainStarter(
            config.home,
            config.rings,
            "auto",
            config.to_env(),
            lambda _ring: None,
            prints=prints,
        )
    )
    try:
        drain = held.starter.start_process(piped=True)
    except OSError as error:
        raise DltraceError(f"the drain cannot be started: {error}") from error
    held.is_ours = drain is not None
    began = time.time()
    try:
        try:
            yield held
        except Exception:
            _end_drain(drain)
            raise
        held.roots = _end_drain(drain)
        held.is_busy = drain is not None and drain.returncode is None
        if held.is_busy:
            _say_where_it_goes_on(Path(config.directory), began)
            held.roots = _runs_since(Path(config.directory), began)
        elif drain is not None and drain.returncode:
            held.roots = _finished_without(held, config, began)
        held.others = [] if held.roots else _runs_since(Path(config.directory), began)
        held.left = "; ".join(filter(None, (held.starter.trouble(ring.stem) for ring in _rings_of(config))))
    except KeyboardInterrupt:  # also one of the block: nobody waits for the drain then
        _say_where_it_goes_on(Path(config.directory), began)
        raise


def _finished_without(held: HeldDrain, config: Config, began: float) -> list[Path]:
    """Return the runs that came since *began*, once another drain has done the work of one that ended too early."""
    ends = time.monotonic() + DRAIN_ENDS_S
    with progress("reading what is left"):
        while lock_is_held(config.rings / f"{config.home}.lock") and time.monotonic() < ends:
            time.sleep(0.05)  # one that a process has started, which lingers for some seconds
    _end_drain(guard.guarded(held.starter.start_process)(piped=True))
    return _runs_since(Path(config.directory), began)


def _say_where_it_goes_on(directory: Path, since: float) -> None:
    """Say where to look for what the drain, which is not ended with us, will have read of the rings."""
    where = ", ".join(map(short_path, _runs_since(directory, since))) or f"a run directory in {directory}"
    tell(f"the drain goes on in the background: the rest of the spans goes to {where}")


def _runs_since(directory: Path, since: float) -> list[Path]:
    """Return the run directories in *directory* that are no older than *since* (s since 1970)."""
    return [path.parent for path in directory.glob("dltrace-*/run.json") if path.stat().st_mtime >= since]


def _rings_of(config: Config) -> Iterator[Path]:
    """Yield the rings that are still there, though the drain of *config* was to read them."""
    for path in config.rings.glob("*.names"):
        names = Names()
        with suppress(OSError):  # it is gone by now, or none
            names.read(read_whole(path))
        if names.home.get("drain") == config.home:
            yield path


def _end_drain(drain: "subprocess.Popen[bytes] | None") -> list[Path]:
    """Have the drain finish; return the run directories it wrote."""
    if drain is None:
        return []
    try:
        with progress("reading what is left"):
            # No signal: one that is still starting would die of it, and leave everything unread.
            out, _ = drain.communicate(b"!", timeout=DRAIN_ENDS_S)
    except subprocess.TimeoutExpired:
        return []
    return [Path(os.fsdecode(line)) for line in out.splitlines()]

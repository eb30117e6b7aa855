"""Starts the drain beside a training process, once per host, and waits for it at the end."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from otel_dltrace.model.safe_path import safe_path
from otel_dltrace.record import guard
from otel_dltrace.record.locks import TOO_MANY_FILES, is_listened_to, lock_is_held, ring_bell, take_lock
from otel_dltrace.record.ring import RingWriter
from otel_dltrace.record.ring_file import read_whole, version_of

if TYPE_CHECKING:
    import subprocess

ALL_RINGS = "all"
"""The name of a drain that serves every ring of its folder."""
PRINTING_LINGER_S = "0.5"
"""A drain that may print does not wait for more writers: who reads a pipe would wait for its end as long."""
RETRY_S = 60.0
"""How long after the start of a drain that has ended with an error another one is tried: where it cannot begin at all
each costs a second of a processor."""
_NEW_LOG = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_THREAD_LIMITS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ARROW_NUM_THREADS")
# What BytePS's variables say is in the configuration already, if it was to be.
_TOLD_ALREADY = ("BYTEPS_TRACE_", "BYTEPS_SERVER_")
# Folders of a sitecustomize that traces every Python: opentelemetry-instrument's and ddtrace-run's.
_INJECTORS = ("opentelemetry/instrumentation/auto_instrumentation", "ddtrace/bootstrap")


def is_served(rings: Path, home: str) -> bool:
    """Return whether a drain listens that serves *home* in the folder *rings*, be it with all others."""
    return any(is_listened_to(rings / f"{name}.bell") for name in (home, ALL_RINGS))


class DrainThread(NamedTuple):
    """A drain that is a thread of this process: *hurry* has it read everything soon, *end* ends it within seconds."""

    hurry: Callable[[], None]
    end: Callable[[float], None]


class DrainStarter:
    """Starts the drain named *home*, or finds that it runs.

    Args:
        home: Its name.
        rings: The ring folder.
        mode: ``auto``, ``thread`` or ``off``.
        env: The variables that give it our configuration.
        start_thread: Drains the ring it is given in a thread, unless another process reads it.
        prints: Whether the drain has exporters that may print: they get our standard output.
    """

    def __init__(
        self,
        home: str,
        rings: Path,
        mode: str,
        env: dict[str, str],
        start_thread: Callable[[RingWriter], DrainThread | None],
        prints: bool = False,
    ) -> None:
        self.home, self.rings, self.mode, self._env = home, rings, mode, env
        self._start_thread, self._prints = start_thread, prints
        self.log = rings / f"{home}.log"
        self.bell = rings / f"{home}.bell"
        self._parent: subprocess.Popen[bytes] | None = None
        self._started: float | None = None
        self._thread: DrainThread | None = None
        self._ring: Path | None = None
        self.lost = ""
        self.is_shut_out = False
        self._turn = threading.Lock()

    @guard.guarded
    def start(self, ring: RingWriter | None) -> None:
        """Start the drain unless it runs; called at this process's first record, and again now and then.

        Once at a time: what a drain in a thread imports may take long, and be recorded (garbage that is collected), and
        so may what other threads do meanwhile.
        """
        if self._turn.acquire(blocking=False):
            try:
                self._start(ring)
            finally:
                self._turn.release()

    def _start(self, ring: RingWriter | None) -> None:
        if self._parent is not None:
            self._parent.poll()  # it may have taken long
        if self._thread is not None or self._is_removed(ring) or self._has_failed():
            return
        if self.mode == "auto":
            try:
                self.start_process()
            except OSError as error:
                if error.errno in TOO_MANY_FILES:
                    guard.say(f"no drain is looked for ({error.strerror}); that is tried again")
                    return
                guard.say(f"no drain process can be started ({error}); a thread drains instead")
                self.mode = "thread"
        if self.mode == "thread" and ring is not None:
            try:
                # OpenBLAS, which the drain's numpy loads, interrupts the program where there is no thread to be had.
                threading.Thread(target=bool, name="otel_dltrace").start()
                self._thread = self._start_thread(ring)
            except RuntimeError as error:  # Python's own for a thread that the system does not allow
                why = "spans wait in the ring while it has room; that is tried again"
                guard.say(f"no thread can drain ({error}): {why}")

    def _is_removed(self, ring: RingWriter | None) -> bool:
        """Return whether *ring* is removed, and read by who has it open alone, or closed to us; say so."""
        self.look_at(ring)
        if self.lost:
            guard.say(self.lost)
        return bool(self.lost)

    def look_at(self, ring: RingWriter | None) -> None:
        """Note whether *ring*, while its writer has it, is removed, or closed to who we are since `seteuid`."""
        if ring is None or not ring.is_held():
            return
        try:
            ring.path.stat()
        except PermissionError:
            self.is_shut_out = True
            shut = f"this process has another user now, who may not enter {self.rings}"
            self.lost = f"{shut}: its drain is neither waited for nor replaced"
        except OSError:
            self.lost = f"somebody has removed {ring.path}: what the drain that reads it has not read is lost"
        else:
            if self.is_shut_out:  # and is who it was again
                self.is_shut_out, self.lost = False, ""

    def after_fork(self) -> None:
        """Forget the drain that is a thread: this child has none, and its ring is read by one of its own."""
        self._thread = self._parent = self._started = None
        self._turn = threading.Lock()  # another thread of the parent's may have had it
        self.lost = ""

    def _has_failed(self) -> bool:
        """Return whether the drain that we started has ended with an error, and it is too early for another; say so."""
        if self._started is None or time.monotonic() - self._started >= RETRY_S:
            return False
        lock = self.rings / f"{self.home}.lock"
        # One that was killed leaves its bell too, or had said nothing yet; one that is done neither.
        trouble = self.trouble() if lock.exists() and not self.bell.exists() and self._is_gone() else ""
        if trouble:
            guard.say(f"the drain has ended ({trouble}); spans wait in the ring while it has room", "drain")
        return bool(trouble)

    def start_process(self, *, piped: bool = False) -> "subprocess.Popen[bytes] | None":
        """Start the drain process unless one runs. *piped*: it stays while we do, tells us, and is returned."""
        from otel_dltrace.record.detached import end_parent, start_detached, start_parent

        fd = take_lock(self.rings / f"{self.home}.lock")
        if fd is None:
            return None
        # The lock travels with the descriptor, so it is held without a gap. Where Python is embedded in a
        # program it may have no executable: that is an OSError then.
        command = [sys.executable or "", "-m", "otel_dltrace", "drain", "--home", self.home, "--lock", str(fd)]
        keep = [fd]
        try:
            if self._prints:
                with suppress(OSError):  # a daemon may have no standard output
                    keep.append(os.dup(1))
                    command += ["--print-to", str(keep[1])]
            if piped:
                command.append("--while-open")
            elif self._prints:
                command += ["--linger", PRINTING_LINGER_S]
            self._started = time.monotonic()
            self.bell.unlink(missing_ok=True)
            # Without waiting, and through no link: a pipe that somebody else has put there has no reader.
            with os.fdopen(os.open(self.log, _NEW_LOG, 0o666), "wb") as log:
                env = drain_environment(self._env)
                if piped:
                    return start_detached(command, env, log, keep, piped=True)
                self._parent = start_parent(command, env, log, keep)
        finally:
            for kept in keep:
                os.close(kept)
        end_parent(self._parent)
        return None

    def _is_gone(self) -> bool:
        """Return whether no drain runs; not, where nothing can be opened to see it."""
        try:
            return not lock_is_held(self.rings / f"{self.home}.lock")
        except OSError:
            return False

    def trouble(self, about: str = "") -> str:
        """Return the last line of what the drain complained about that has *about* in it, "" if it did not."""
        try:
            lines = read_whole(self.log).decode(errors="replace").split("\n")
        except OSError:
            return ""
        said = (line.strip() for line in reversed(lines) if about in line)
        return next((line.removeprefix("otel_dltrace: ") for line in said if line), "")

    def why_left(self) -> str:
        """Return why the ring that `finish` waited for is still there, "" if nothing is known to keep the drain.

        One that is at work may have complained of anything: only what it said of the ring is a reason.
        """
        if self._ring is not None and self._thread is not None:
            return guard.said_of(self._ring.stem)  # it has no log
        if self._ring is None or self._is_gone():
            return self.trouble()
        return self.trouble(self._ring.stem)

    def has_no_drain(self) -> bool:
        """Return whether this process is to start no drain, or could start none, be it a thread."""
        return self.mode == "off" or (self.mode == "thread" and self._thread is None)

    def is_left_alone(self) -> bool:
        """Return whether the ring that `finish` was told of is left to a drain that stays, and none is there."""
        is_left = self.has_no_drain() and self._ring is not None and self._ring.exists()
        return is_left and not is_served(self.rings, self.bell.stem)

    def hurry(self) -> None:
        """Have the drain, whichever it is, read everything soon."""
        ring_bell(self.bell)
        if self._thread is not None:
            self._thread.hurry()

    def catch_up(self, ring: Path, timeout: float) -> bool:
        """Have the drain read all that is recorded in *ring*; return whether it did within *timeout* seconds."""
        cursor, deadline = ring.with_suffix(".cursor"), time.monotonic() + timeout
        # The first one may be of a turn that had begun to read when we came.
        return all(self._turns(cursor, deadline) for _ in range(2))

    def _turns(self, cursor: Path, deadline: float) -> bool:
        """Ask the drain for a turn; return whether it has said by *deadline* how far it has read."""
        before = version_of(cursor)
        self.hurry()
        while time.monotonic() < deadline:
            if version_of(cursor) != before:
                return True
            time.sleep(0.005)
        return False

    def finish(self, ring: Path, timeout: float) -> bool:
        """Wait until *ring* has been read to its end and removed; return whether it was within *timeout* seconds."""
        self._ring = ring
        if self.mode == "off":
            return False
        deadline = time.monotonic() + timeout
        if self._thread is not None:
            self._thread.end(timeout)
        if self.is_shut_out:
            return False
        next_bell = 0.0
        is_restarted = False
        while ring.exists():
            now = time.monotonic()
            if now >= next_bell:
                if not is_restarted and self.mode == "auto" and self._is_gone():
                    is_restarted = True  # it was killed, or ended just before our ring was there
                    guard.guarded(self.start_process)()
                self.hurry()
                next_bell = now + 0.1
            if now >= deadline:  # last, so that a drain is asked also where no time is left
                return False
            time.sleep(0.005)
        return True


def drain_environment(config: dict[str, str]) -> dict[str, str]:
    """Return the environment of a drain: ours, told the configuration, not traced itself, on one thread."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(_TOLD_ALREADY)}
    env = {**ours, **dict.fromkeys(_THREAD_LIMITS, "1"), **config, "OTEL_DLTRACE": "0"}
    given = [path for path in env.pop("PYTHONPATH", "").split(os.pathsep) if not path.rstrip("/").endswith(_INJECTORS)]
    return {**env, **safe_path(given)}

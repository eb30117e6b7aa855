"""Passes signals on to a program that was started: those that it does not have already."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from otel_dltrace.model.errors import ConfigError

RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_ALL_HAVE_IT_S = 0.02
"""Who signals the processes of a group or a job one by one has done so by then."""
_WAITS = "import sys; sys.stdin.read()"


class Relay:
    """Runs a program that hears each signal once, whether it is sent to us alone or to all.

    A terminal, `timeout` and some batch systems signal a whole process group, others the process that they started.
    A handler is not told which. So there is a witness: a process beside the program that does nothing, and keeps
    pending what is sent to it. What it has, the program has, too, as long as it is in the same group.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._is_busy = True  # until there is a program

    def run(self, command: Sequence[str], env: dict[str, str]) -> int:
        """Run *command*; return its exit code, negative if a signal ended it.

        Raises:
            ConfigError: It cannot be started.
        """
        # One that we were started to ignore, as by `nohup`, the program ignores as well.
        heard = [number for number in RELAYED if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._hear) for number in heard}
        try:
            self._program = _start(command, env)
            self._witness = _start_witness()
            self._is_busy = False
            self._flush()  # what came before the program was there
            try:
                return self._program.wait()
            finally:
                self._is_busy = True
                _end(self._witness)
        finally:
            for number, handler in before.items():  # what comes now is meant for us
                signal.signal(number, handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        """Note the signal *number*, and pass it on; raise nothing: that would leave the program to itself."""
        self._came.append(number)
        self._flush()

    def _flush(self) -> None:
        """Pass on what came. What comes meanwhile finds us busy and is in the list when we look again."""
        while self._came and not self._is_busy:
            self._is_busy = True
            self._pass_on()
            self._is_busy = False

    def _pass_on(self) -> None:
        is_beside = self._is_beside()  # now, since the signal may have it leave the group
        time.sleep(_ALL_HAVE_IT_S)  # more may come meanwhile
        came, self._came = self._came, []  # first of all: what comes from here on is for the next time
        pending = _pending(self._witness)
        known = pending if is_beside else 0
        self._send(number for number in dict.fromkeys(came) if not known & 1 << number - 1)
        if pending:  # it would have that for ever
            _end(self._witness)
            self._witness = _start_witness()

    def _is_beside(self) -> bool:
        """Return whether what is sent to our process group is sent to the program."""
        with suppress(ProcessLookupError):
            return os.getpgid(self._program.pid) == os.getpgid(0)
        return False

    def _send(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            with suppress(OSError):  # it may be another user's by now
                self._program.send_signal(number)


def _start(command: Sequence[str], env: dict[str, str]) -> "subprocess.Popen[bytes]":
    try:
        return subprocess.Popen(command, env=env)
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be started: {error.strerror}") from None


def _start_witness() -> "subprocess.Popen[bytes] | None":
    """Return a witness, None where no further process may be started: then the program may hear a signal twice."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, RELAYED)  # which a process inherits
    try:
        command = [sys.executable, "-I", "-S", "-c", _WAITS]  # until our end of the pipe is closed, however we end
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pending(witness: "subprocess.Popen[bytes] | None") -> int:
    """Return which signals wait for *witness*, a bit each; none where it is not there to ask."""
    if witness is None:
        return 0
    try:
        status = Path(f"/proc/{witness.pid}/status").read_bytes()
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith(b"ShdPnd:")), 0)


def _end(witness: "subprocess.Popen[bytes] | None") -> None:
    if witness is not None:
        with suppress(OSError):
            witness.kill()
            witness.communicate()

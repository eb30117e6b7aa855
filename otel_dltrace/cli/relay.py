"""Passes signals on to a program that was started: those that it does not have already."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

RELAYED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_ALL_HAVE_IT_S = 0.02
"""Who signals the processes of a group or a job one by one has done so by then."""
_WAITS = "import sys; sys.stdin.read()"


class Relay:
    """Runs a program that hears each signal once, whether it is sent to us alone or to all.

    A terminal, `timeout` and some batch systems signal a whole process group, others the process that they started.
    A handler is not told which. So there is a witness: a process beside the program that does nothing, and keeps
    pending what is sent to it. What it has, the program has, too.
    """

    def __init__(self) -> None:
        self._came: list[int] = []
        self._is_busy = True  # until there is a program

    def run(self, command: Sequence[str], env: dict[str, str]) -> int:
        """Run *command*; return its exit code, negative if a signal ended it.

        Raises:
            OSError: It cannot be started.
        """
        # One that we were started to ignore, as by `nohup`, the program ignores as well.
        heard = [number for number in RELAYED if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._hear) for number in heard}
        try:
            self._program = subprocess.Popen(command, env=env)
            self._witness = _start_witness()
            self._send(self._came)  # to whom else, before it was there
            self._came, self._is_busy = [], False
            try:
                return self._program.wait()
            finally:
                self._is_busy = True
                _end(self._witness)
        finally:
            for number, handler in before.items():  # what comes now is meant for us
                signal.signal(number, handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self._came.append(number)
        if self._is_busy:
            return
        self._is_busy = True
        while self._came:
            time.sleep(_ALL_HAVE_IT_S)  # more may come meanwhile
            came, self._came = dict.fromkeys(self._came), []
            pending = _pending(self._witness.pid)
            self._send([number for number in came if not pending & 1 << number - 1])
            if pending:  # it would have that for ever
                _end(self._witness)
                self._witness = _start_witness()
        self._is_busy = False

    def _send(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._program.send_signal(number)


def _start_witness() -> "subprocess.Popen[bytes]":
    before = signal.pthread_sigmask(signal.SIG_BLOCK, RELAYED)  # which a process inherits
    try:
        command = [sys.executable, "-I", "-S", "-c", _WAITS]  # until our end of the pipe is closed, however we end
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pending(pid: int) -> int:
    """Return which signals wait for the process *pid*, a bit each."""
    status = Path(f"/proc/{pid}/status").read_text()
    (pending,) = (line.split()[1] for line in status.splitlines() if line.startswith("ShdPnd:"))
    return int(pending, 16)


def _end(witness: "subprocess.Popen[bytes]") -> None:
    witness.kill()
    witness.communicate()

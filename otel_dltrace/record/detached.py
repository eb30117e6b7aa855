"""A process that outlives the one that starts it; apart, since `subprocess` costs every start of a program 3 ms."""

import errno
import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO

_PARENT = "import posix, sys\nposix.fork() or posix.execv(sys.argv[1], sys.argv[1:])"
"""The program of a process that starts an orphan and ends; it imports built-in modules alone: no file can stand in."""
PARENT_S = 1.0
"""How long we wait for its end; it takes some hundredths of that."""


class Detached(subprocess.Popen[bytes]):
    """A child that is meant to outlive us, so nobody is warned that it does."""

    def __del__(self) -> None:
        """Leave it running."""


def start_parent(
    command: Sequence[str], env: Mapping[str, str], log: BinaryIO, keep: Sequence[int]
) -> "subprocess.Popen[bytes]":
    """Start what starts *command*, a Python, complaining to *log*, with the descriptors *keep* open; `end_parent` next.

    So it is no child of ours: a program that waits until it has none left would wait for one that waits for it; one
    that ends its children would end it. A fork of a program with threads may never come back.

    Raises:
        OSError: No process may be started.
    """
    return start_detached([command[0], "-S", "-c", _PARENT, *command], env, log, keep)


def end_parent(parent: "subprocess.Popen[bytes]") -> None:
    """Wait until *parent* has started its process, unless that takes long.

    Raises:
        OSError: It may not start one.
    """
    with suppress(subprocess.TimeoutExpired):
        if parent.wait(PARENT_S):
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


def start_detached(
    command: Sequence[str], env: Mapping[str, str], log: BinaryIO, keep: Sequence[int], *, piped: bool = False
) -> "subprocess.Popen[bytes]":
    """Start *command*, complaining to *log*, with the descriptors *keep* open; *piped*: its input and output are ours.

    Raises:
        OSError: No process may be started.
    """
    return Detached(
        command,
        stdin=subprocess.PIPE if piped else subprocess.DEVNULL,
        stdout=subprocess.PIPE if piped else subprocess.DEVNULL,
        stderr=log,
        env=env,
        # Its own session: a Ctrl-C at the terminal ends the training, not the drain.
        start_new_session=True,
        pass_fds=keep,
    )

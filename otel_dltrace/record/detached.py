"""A process that outlives the one that starts it; apart, since `subprocess` costs every start of a program 3 ms."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import BinaryIO


class Detached(subprocess.Popen[bytes]):
    """A child that is meant to outlive us, so nobody is warned that it does."""

    def __del__(self) -> None:
        """Leave it running."""


def start_detached(
    command: Sequence[str], env: Mapping[str, str], log: BinaryIO, keep: Sequence[int], *, piped: bool
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

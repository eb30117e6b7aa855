"""What the ``.pth`` file loads in every Python process while ``OTEL_DLTRACE`` is set."""

import sys
from collections.abc import Sequence
from pathlib import Path


def _is_command(words: Sequence[str]) -> bool:
    """Return whether *words* start a command of ours, which says itself what is wrong with a variable."""
    return words[1:3] == ["-m", "otel_dltrace"] or Path(*words[1:2]).name == "otel-dltrace"


if not _is_command(sys.orig_argv):  # `sys.argv` is not there yet
    from otel_dltrace.configure.sources import autostart

    autostart()

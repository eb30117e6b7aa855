"""Where what commands say goes: notes to standard error, and what to do where nobody takes what is printed."""

import os
import sys

from otel_dltrace.model.text import harmless


def show(line: str) -> None:
    """Print *line*, which names files, on standard output."""
    print(harmless(line))


def tell(sentence: str) -> None:
    """Print *sentence* on standard error; nowhere if that is closed: `print` would take standard output for it."""
    if sys.stderr is not None:
        print(f"otel-dltrace: {harmless(sentence)}", file=sys.stderr)


def print_no_more() -> None:
    """Let go of what is printed and not written: Python would try again as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

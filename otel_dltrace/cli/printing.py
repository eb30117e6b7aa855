"""What to do where nobody takes what is printed."""

import os


def print_no_more() -> None:
    """Let go of what is printed and not written: Python would try again as it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

"""What a Python process of ours is told so that it takes no file of the folder it starts in for a module."""

import os
import site
from collections.abc import Iterable
from pathlib import Path

SAFE_PATH = "PYTHONSAFEPATH"
"""Since Python 3.11 neither `-m` nor `-c` then takes anything from the working directory: not the user's
`otel_dltrace.py` or `queue.py`, nor a stranger's, where all may write there."""
_HERE = str(Path(__file__).parents[2])
"""The folder that our package is in."""


def safe_path(python_path: Iterable[str]) -> dict[str, str]:
    """Return the variables of a process that finds us, and what is in the folders *python_path*."""
    given = list(filter(None, python_path))  # "" is the working directory
    if _HERE not in [*given, *site.getsitepackages(), site.getusersitepackages()]:
        given.append(_HERE)  # the program has found us by a path of its own
    return {SAFE_PATH: "1", **({"PYTHONPATH": os.pathsep.join(given)} if given else {})}

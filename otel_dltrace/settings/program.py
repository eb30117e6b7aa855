"""What the program is called that a Python runs, by the words of its command line."""

import os
import re
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

_PYTHON = re.compile(r"(python|pypy)[\d.]*[a-z]?")
_OPTION = re.compile("-[A-Za-z]*?([cmWX])(.*)|-(-)check-hash-based-pycs()", re.DOTALL)
"""Python's options that have a value; others may stand before them in one word, as in ``-um``."""
_RUNNERS = {
    *("mpi4py", "mpi4py.futures", "mpi4py.run", "torch.distributed.launch", "torch.distributed.run"),
    *("cProfile", "coverage", "debugpy", "pdb", "profile", "trace", "viztracer", "scalene", "memory_profiler"),
}
"""Modules that run a program."""
_SPAWNED = ("from multiprocessing.", "import sys; from multiprocessing.")
"""How the code begins that multiprocessing gives a child by ``-c``; the second one since Python 3.14."""


def own_program_name() -> str:
    """Return what our program is called, "" where no command line says it.

    The words that Python was started with, since ``sys.argv`` has no module's name at first. A process that
    multiprocessing spawned learns its program later: till then its parent's words are those to ask.
    """
    words, parent = sys.orig_argv, os.getppid()
    while any(word.startswith(_SPAWNED) for word in words):
        words, parent = _command_of(parent)
    main = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-", "-c", "-m") else ""
    return program_name(words) or Path(main).stem


def program_name(words: Sequence[str]) -> str:
    """Return what the program is called that Python runs in the command *words*: its script or module, "" for none."""
    rest = iter(words)
    any(_PYTHON.fullmatch(Path(word).name) for word in rest)  # takes the words up to Python's own
    for word in rest:
        option = _OPTION.match(word)
        if word == "-":
            return ""
        if option:
            kind, value = option[1] or option[3], option[2] or next(rest, "")
            if kind == "m":
                return _run_by(value, [*rest]) if value in _RUNNERS else value
            if kind == "c":
                return ""
        elif not word.startswith("-"):
            return Path(word).stem
    return ""


def _run_by(runner: str, words: Sequence[str]) -> str:
    """Return what the program is called that the module *runner* runs, as *words* say; else its own name."""
    for flag, word in pairwise(("", *words)):
        if flag == "-m":
            return word
        if word.endswith(".py"):
            return Path(word).stem
    return runner


def _command_of(pid: int) -> tuple[list[str], int]:
    """Return the command of process *pid*, and its parent; no words where the system does not say."""
    try:
        words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")
        # A process may have any name, so it is the last bracket that ends it.
        return words, int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return [], 0

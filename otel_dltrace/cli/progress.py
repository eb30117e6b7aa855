"""A progress line for whatever takes over a second; nothing where nobody looks at a terminal."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from otel_dltrace.model.text import harmless

_TERMINAL = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""The variables by which rich takes what is none for a terminal."""


@contextmanager
def progress(title: str) -> Iterator[Callable[[int], None]]:
    """Show *title* and the time gone by while the block runs; call what it gives with a count to show that too."""
    if not _may_be_terminal():
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:  # rich ends even a bar that is switched off with an empty line, before 14.3
        yield _nothing
        return
    text = TextColumn("{task.description} {task.fields[count]}", markup=False)  # a path may have brackets
    columns = (SpinnerColumn(), text, TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(harmless(title), total=None, count="")

        def count(n: int) -> None:
            bar.update(task, count=f"{n:,}")

        yield count


def _may_be_terminal() -> bool:
    """Return whether rich may take standard error for a terminal; where it will not, it is not even loaded."""
    return any(map(os.environ.get, _TERMINAL)) or (sys.stderr is not None and sys.stderr.isatty())


def _nothing(_: int) -> None:
    """Show no count."""


def summing(count: Callable[[int], None]) -> Callable[[int], None]:
    """Return what takes numbers one after another, and calls *count* with their sum so far."""
    total = 0

    def add(number: int) -> None:
        nonlocal total
        total += number
        count(total)

    return add

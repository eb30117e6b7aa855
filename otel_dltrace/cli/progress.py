"""A progress line for whatever takes over a second; nothing where nobody looks at a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


@contextmanager
def progress(title: str) -> Iterator[Callable[[int], None]]:
    """Show *title* and the time gone by while the block runs; call what it gives with a count to show that too."""
    columns = (SpinnerColumn(), TextColumn("{task.description} {task.fields[count]}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None, count="")

        def count(n: int) -> None:
            bar.update(task, count=f"{n:,}")

        yield count

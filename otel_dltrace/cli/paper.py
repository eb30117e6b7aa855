"""What reports are written on: a terminal, or whatever standard output is."""

from rich.console import Console


def paper(table: int) -> tuple[Console, int | None]:
    """Return a console with room for *table* characters, and where sentences fold: at the edge of a terminal.

    A narrow terminal folds the lines of a table; one squeezed into it would lose its columns.
    """
    own = Console()
    return Console(width=max(table, own.width)), own.width if own.is_terminal else None

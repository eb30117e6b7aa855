"""What all tables of the report have in common."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

MOST_ROWS = 16
BETWEEN = 2
"""Characters from one column to the next: a padding, and the box's."""


def show(parts: Sequence[RenderableType], console: Console, fold: int | None) -> None:
    """Write *parts* to *console*: tables as wide as it is, sentences in lines of *fold* characters if it is given.

    A table of more columns than have room there is wider: squeezed, it would lose them.
    """
    usual = console.width
    for part in parts:
        console.width = max(usual, least_width(part, console)) if isinstance(part, Table) else usual
        console.print(part, highlight=False, width=fold if isinstance(part, Text) else None)
    console.width = usual


def least_width(table: Table, console: Console) -> int:
    """Return how many characters *table* takes if the names in it fold: its numbers may not."""
    width = BETWEEN * (len(table.columns) - 1)
    for column in table.columns:
        numbers = column.cells if column.no_wrap else ()
        width += max([column.min_width or 0, *(console.measure(number).maximum for number in numbers)])
    return width


def new_table(left: Sequence[str], right: Sequence[str]) -> Table:
    """Return an empty table: names, which may fold, at the left, and numbers, which may not, at the right."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in left:
        table.add_column(Text(name), overflow="fold", min_width=max(4, len(name)))
    for name in right:
        table.add_column(Text(name), justify="right", no_wrap=True, min_width=max(map(len, name.split("\n"))))
    return table


def left_over(rows: Sequence[object], name: str) -> str:
    """Return in words how many of *rows* a table does not show, "" if it shows all."""
    return f"{len(rows) - MOST_ROWS} more {name}: --json has all" if len(rows) > MOST_ROWS else ""


def section(title: str, table: Table, *notes: str) -> list[RenderableType]:
    """Return a table under its title, with what must be known to read it; apart, as a title folds to its table."""
    note = "; ".join(filter(None, notes))
    return [Text(f"\n{title}", style="bold"), table, *([Text(note, style="dim")] if note else [])]

"""Files of one export: one with the name that was asked for, or several in a folder of that name; none of nothing."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TypeVar

from otel_dltrace.export.files import write_pieces
from otel_dltrace.model.errors import ConfigError

T = TypeVar("T")


def check_place(path: Path, count: int, what: str) -> None:
    """Raise `ConfigError` if *count* of *what* cannot be written to *path*, since it is a file."""
    if count > 1 and path.exists() and not path.is_dir():
        raise ConfigError(f"{path} takes one {what}, and there are {count}; give -o the name of a new directory")


def write_each(
    files: Iterable[tuple[Path, Iterable[T]]],
    encode: Callable[[Iterable[T]], Iterable[bytes]],
    progress: Callable[[int], None],
    wrote: Callable[[Path], None],
) -> int:
    """Write each of *files*, whole or not at all; return the number of things in all of them.

    Args:
        files: Their paths, and the things that are in them.
        encode: Returns the bytes of a file's things.
        progress: Is told of things that are done.
        wrote: Called with each file once it has its name.
    """
    written = 0

    def counted(things: Iterable[T]) -> Iterator[T]:
        nonlocal written
        for thing in things:
            written += 1
            yield thing

    for path, things in files:
        before = written
        write_pieces(path, encode(counted(things)))
        wrote(path)
        progress(written - before)
    return written


def begun(pieces: Iterator[T]) -> Iterator[T] | None:
    """Return *pieces* if there are any, and what is to be found out before the first has been: else None."""
    for first in pieces:
        return chain([first], pieces)
    return None

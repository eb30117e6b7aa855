"""Somebody's file as an import is given it: it has an end, and what is read of it has room."""

import os
import stat
from collections.abc import Iterable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from otel_dltrace.export.memory import available_memory
from otel_dltrace.model.errors import TraceFormatError

LEAST_ROOM = 4 << 30
"""So many bytes are tried anyway, as `rundir.size.LEAST` says."""
_PIECE = 1 << 20


def room() -> int:
    """Return how many bytes of a file may be read into memory: its events take some times as much."""
    return max(available_memory() // 4, LEAST_ROOM)


def refuse_endless(path: Path, file: BinaryIO, most: int) -> None:
    """Make sure that the *file* which is open at *path* has an end, as far as can be told before it is read.

    Raises:
        TraceFormatError: It is a device (but a terminal, which somebody writes at), or has more than *most* bytes.
    """
    status = os.fstat(file.fileno())
    if stat.S_ISBLK(status.st_mode) or (stat.S_ISCHR(status.st_mode) and not file.isatty()):
        raise TraceFormatError(f"{path} is a device, which may have no end; give a file or a pipe")
    if status.st_size > most:
        raise _too_large(path, most)


def pieces_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield what is left of *file*, piece by piece."""
    return iter(partial(file.read, _PIECE), b"")


def at_most(path: Path, most: int, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the *pieces* of what comes from *path*.

    Raises:
        TraceFormatError: They are more than *most* bytes.
    """
    left = most
    for piece in pieces:
        left -= len(piece)
        if left < 0:
            raise _too_large(path, most)
        yield piece


def read_foreign(path: Path) -> bytes:
    """Return what is in the file at *path*, or comes through the pipe.

    Raises:
        TraceFormatError: It has no end, or is too large to be held.
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        refuse_endless(path, file, room())
        return held(path, file)


def held(path: Path, file: BinaryIO) -> bytes:
    """Return what is left of *file*, which is open at *path*.

    Raises:
        TraceFormatError: It is too large to be held.
    """
    whole = BytesIO()
    for piece in at_most(path, room(), pieces_of(file)):
        whole.write(piece)
    return whole.getvalue()


def _too_large(path: Path, most: int) -> TraceFormatError:
    return TraceFormatError(f"{path} is larger than {most >> 30} GiB, too large to be read; give only a part of it")

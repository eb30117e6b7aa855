"""Files that are whole or absent: written under another name, then renamed."""

import errno
import gzip
import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedIOBase, BufferedWriter
from pathlib import Path
from typing import Any

_COMPRESSION = 4
"""Of gzip: half the time of the usual 9 for a few percent more bytes."""
_GROWTH = 4096
"""Bytes that a file whose room is kept may grow by, from one version to the next."""
_LARGEST_JSON = 128 << 20
"""Bytes; what a drain writes of ten thousand processes is a tenth of it."""
_STDOUT = 1
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""What file systems say that know no fsync of a folder."""


def write_whole(path: Path, data: bytes) -> None:
    """Write *path* so that a reader never sees half of it."""
    with renamed(path) as out:
        out.write(data)


@contextmanager
def open_whole(path: Path, *, waits: bool = True) -> Iterator[BufferedIOBase]:
    """Open *path* under another name, and give it its own once the block is done; nothing is left of a failure.

    A link stays, and what it points at is replaced; a pipe or a device (`is_stream`) is written to as it is. What is
    written is gzipped if the name ends in ``.gz``.

    Args:
        path: The file.
        waits: Whether to wait for somebody who reads a pipe; without it is an error that nobody does.
    """
    with _stream(path, waits) if is_stream(path) else renamed(Path(os.path.realpath(path))) as raw:
        if is_packed(path):
            # Without name and time the same content gives the same file.
            with gzip.GzipFile("", "wb", _COMPRESSION, raw, mtime=0) as packed:
                yield packed
        else:
            yield raw


def is_packed(path: Path) -> bool:
    """Return whether a file of that name is gzipped."""
    return path.suffix.lower() == ".gz"


@contextmanager
def renamed(path: Path) -> Iterator[BufferedWriter]:
    """Open *path* under another name, and give it its own once the block is done; nothing is left of a failure."""
    if path.is_dir():  # found out now, and not when all is written
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        partial.unlink(missing_ok=True)  # of a killed process, or a link of somebody's who may write here
        with partial.open("xb") as raw:
            yield raw
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # a full file system is not filled by halves


def sync_folder(folder: Path) -> None:
    """Have the names in *folder* survive a crash of the host, as far as its file system can."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(fd)


def is_stream(path: Path) -> bool:
    """Return whether *path* is a pipe, a device or our standard output: a file must not take its place."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return False  # to open it says why
    return _is_stdout(path) or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def _stream(path: Path, waits: bool) -> BufferedWriter:
    # Opened by its name, standard output would begin anew before what `>>` keeps.
    return os.fdopen(os.dup(_STDOUT) if _is_stdout(path) else _opened(path, waits), "wb")


def _opened(path: Path, waits: bool) -> int:
    try:
        fd = os.open(path, os.O_WRONLY | (0 if waits else os.O_NONBLOCK))
    except OSError as error:
        if waits or error.errno != errno.ENXIO:
            raise
        raise OSError(errno.ENXIO, "nobody reads the pipe", str(path)) from None
    os.set_blocking(fd, True)
    return fd


def _is_stdout(path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(_STDOUT))
    except OSError:
        return False  # *path* is not there, or our output is closed


def write_pieces(path: Path, pieces: Iterable[bytes], *, waits: bool = True) -> None:
    """Write *path*, whole or not at all, and the folders that it is in, as *pieces* come; *waits* as `open_whole`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_whole(path, waits=waits) as out:
        for piece in pieces:
            out.write(piece)


def write_json(path: Path, value: Any) -> None:
    """Write *value* as JSON, whole or not at all."""
    write_whole(path, _json(value))


def write_json_again(path: Path, value: Any) -> None:
    """Do the same, also where the file system has become full since: room for the next version is kept beside *path*.

    It is the room of the version before; only between the two may another writer take it. `leave_room` gives it back.
    """
    data, room = _json(value), _room_beside(path)
    with os.fdopen(open_own(room, 0o666), "r+b") as file:
        file.write(data)
        file.truncate()
    room.replace(path)
    with suppress(OSError), room.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, len(data) + _GROWTH)


def open_own(path: Path, mode: int) -> int:
    """Open a file that is between our own processes, or make it; a link in its place goes, wherever it leads."""
    if path.is_symlink():
        path.unlink()
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, mode)


def leave_room(path: Path) -> None:
    """Give back the room that was kept beside *path*, perhaps by a process that was killed."""
    _room_beside(path).unlink(missing_ok=True)


def _room_beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.room")


def _json(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def read_json(path: Path) -> Any:
    """Return the JSON in *path*; None where it is absent, damaged or endless, as a device, a pipe or a sparse file."""
    try:
        is_one = path.is_file() and path.stat().st_size <= _LARGEST_JSON
        return json.loads(path.read_text()) if is_one else None
    except (OSError, ValueError, RecursionError):
        return None


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in *path*; empty where it is absent, damaged or something else."""
    value = read_json(path)
    return value if isinstance(value, dict) else {}

"""The file of a ring: its layout, its header, who has it open, and the folder that it lies in (contract 2)."""

import errno
import fcntl
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from otel_dltrace.model.errors import RingError

MAGIC = b"DLTRING1"
VERSION = 1
PAGE = CHUNK = 4096
RECORD = 64
RECORDS = 63  # in a chunk, after its 64-byte header
RECORD_FORMAT = "<IIIBBHQQQIIiiHHI"
HEADER = struct.Struct("<8sHHII8s16sIQQQ")
# After the header: how many records found every chunk held by others.
UNRECORDED = struct.Struct("<Q")
UNRECORDED_AT = HEADER.size
# Lease, thread, and how many records of each level (1..4) this chunk held under earlier leases: with
# them laps are counted exactly, also by a reader that comes late.
CHUNK_HEADER = struct.Struct("<IQ4x4I")
CHUNK_HISTORY = struct.Struct("<4I")
HISTORY_AT = 16
LEVEL_AT = 13  # in a record: level << 4 | source
LEVELS = 4

BEGIN, SPAN, AMEND, COUNTER = 1, 2, 3, 4
AMEND_DEVICE, AMEND_ERROR, AMEND_PARENT = 1, 2, 3

_STANDARD = 2
"""The last of the descriptors of standard input, output and error."""
_NEVER_STANDARD = "/"
"""What no program has there: of ``/dev/null`` nobody could tell ours from a daemon's."""
_ROOT = 0
_CURE = "set OTEL_DLTRACE_RING_DIR to a folder on a tmpfs"


@dataclass(frozen=True, slots=True)
class RingHeader:
    """Page 0 of a ring."""

    nonce: bytes
    boot_id: bytes
    pid: int
    pid_namespace: int
    monotonic: int
    wall: int
    chunks: int


def read_header(view: memoryview) -> RingHeader:
    """Return page 0.

    Raises:
        RingError: These bytes are no ring, or one of another version.
    """
    if len(view) < PAGE:
        raise RingError(f"{len(view)} bytes are too short for a ring")
    fields = HEADER.unpack_from(view)
    magic, version, record, chunk, chunks, nonce, boot, pid, namespace, monotonic, wall = fields
    if magic != MAGIC:
        raise RingError(f"magic {magic!r} is not that of a ring")
    if (version, record, chunk) != (VERSION, RECORD, CHUNK):
        raise RingError(f"version {version}, {record}-byte records, {chunks} chunks: not a ring this version reads")
    if not 0 < chunks * CHUNK <= len(view) - PAGE:
        raise RingError(f"{len(view)} bytes are not those of {chunks} chunks, which take {PAGE + chunks * CHUNK}")
    return RingHeader(nonce, boot, pid, namespace, monotonic, wall, chunks)


@contextmanager
def above_standard() -> Iterator[None]:
    """Have what the block opens get a number above those of standard input, output and error.

    Where a program was started without, or has closed them, a library in C still writes there: into a ring it would.
    """
    held: list[tuple[int, tuple[int, int]]] = []
    try:
        with suppress(OSError):
            while not held or held[-1][0] <= _STANDARD:
                fd = os.open(_NEVER_STANDARD, os.O_PATH | os.O_CLOEXEC)
                held.append((fd, file_of(fd)))
            close_if_still(*held.pop())
        yield
    finally:
        for fd, file in held:
            close_if_still(fd, file)


def open_for_reading(path: Path) -> int:
    """Return a descriptor of a file in the folder of rings; a pipe of somebody else's there holds nobody up.

    Raises:
        OSError: It cannot be opened, or is no file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "it is not a file")


def read_whole(path: Path) -> bytes:
    """Return what is in such a file.

    Raises:
        OSError: As `open_for_reading`.
    """
    with os.fdopen(open_for_reading(path), "rb") as file:
        return file.read()


def writer_is_alive(fd: int) -> bool:
    """Return whether the ring open as *fd* (in another process) is still locked by its writer.

    A pid would mean nothing across namespaces, and a ``flock`` stays held by forked children.
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.lockf(fd, fcntl.LOCK_UN)
    return False


def take_for_reading(fd: int) -> bool:
    """Return whether the ring open as *fd* is ours to read until *fd* is closed: no other drain does.

    This lock, ``flock``, knows nothing of the writer's, ``lockf``; where a file system has none, nobody has it.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)
    return True


def make_ring_folder(folder: Path) -> None:
    """Make the folder for rings, private to its user; a shared one (setgid) stays as it is.

    Raises:
        RingError: It cannot be made, or not be written, or it is another user's under the name of ours.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise RingError(f"no folder for rings at {folder}: {error.strerror}; {_CURE}") from None
    if why := squatted(folder):
        raise RingError(f"{folder} {why}; {_CURE}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RingError(f"{folder} cannot be written; {_CURE}")


def private_folder() -> Path:
    """Return where this user's rings live unless told: always tmpfs, never a file system that may be remote."""
    return Path(f"/dev/shm/otel-dltrace-{os.getuid()}")  # noqa: S108  -- private to the user, mode 0700


def squatted(folder: Path) -> str:
    """Return why rings are not safe in *folder*; "" if they are, or if it was chosen, as one that is shared is.

    Everybody may make a folder, or a link, under the name of ours. Its owner could have us write and read elsewhere.
    """
    if folder != private_folder():
        return ""
    with suppress(FileNotFoundError):
        for look in (folder.lstat, folder.stat):
            owner = look().st_uid
            if owner not in (os.geteuid(), _ROOT):
                return f"belongs to another user (uid {owner})"
    return ""


def version_of(path: Path) -> tuple[int, int]:
    """Return what tells the file at *path* from those that it replaced, also within a tick of the kernel's clock."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_ino, status.st_mtime_ns


def file_of(fd: int) -> tuple[int, int]:
    """Return which file *fd* is open on."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def is_still(fd: int, file: tuple[int, int]) -> bool:
    """Return whether *fd* still is open on *file*.

    A program that becomes a daemon closes all descriptors and may use their numbers anew.
    """
    try:
        return file_of(fd) == file
    except OSError:
        return False


def close_if_still(fd: int, file: tuple[int, int]) -> bool:
    """Close *fd* if it still is *file*, and return whether it was."""
    if not is_still(fd, file):
        return False
    os.close(fd)
    return True

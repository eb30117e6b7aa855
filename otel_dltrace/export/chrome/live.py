"""A Chrome trace that grows, and is whole JSON at every instant: also when its writer was just killed by SIGKILL.

A file that ends in ``]}`` cannot grow in place and stay whole: the kernel may stop a write between two pages when
the writer is killed. So there is room beforehand: spaces, which JSON allows, between the last event and the
``]}``. New events overwrite spaces in one write, and no event crosses a page: wherever the write is
stopped, whole events were added. When the room is used up (or an event is longer than a page), a copy with twice the
room is made beside the file, and renamed over it. A file in gzip is renamed each time: it is short.

Against a power failure nothing is done: nothing waits for the disk.
"""

import errno
import fcntl
import itertools
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from otel_dltrace.export.files import is_packed

PAGE = 4096
_LEAST_ROOM, _MOST_ROOM = 1 << 16, 1 << 24
_SPACES = b" " * (1 << 16)
_LEVEL = 4
_GZIP_HEADER = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
_numbers = itertools.count()


class TakenError(OSError):
    """Another writer, of this or another process, is writing the file."""


class LiveTrace:
    """A trace in the form ``{..., "traceEvents":[...]}``, without compression.

    The file is locked (``flock``) as long as it is written, so that two writers never share one; one that nobody
    writes any more is replaced.

    Args:
        path: The file; its folder exists.
        head: The text before the first event, with the ``[``.
        tail: The text after the last event.

    Raises:
        TakenError: Another writer has it.
        OSError: It cannot be made.
    """

    def __init__(self, path: Path, head: bytes, tail: bytes) -> None:
        self.path, self._tail = path, tail
        self.size = len(head) + len(tail)
        self.events = 0
        self._fd, self._used, self._end = -1, 0, 0
        while self._fd < 0:
            with _claimed(path) as there, suppress(FileExistsError):
                self._replace([head], self._room_for(len(head)), new=not there)

    def append(self, lines: Sequence[bytes]) -> None:
        """Add events, one a line, all or none.

        Raises:
            OSError: There is no room on the disk; the file is as it was.
        """
        separated = self._separated(lines)
        block = _by_pages(separated, self._used)
        if block is None or self._used + len(block) > self._end:
            block = b"".join(separated)
            try:
                self._replace([block], self._room_for(self._used + len(block)))
            except OSError:
                self._replace([block], PAGE)  # a disk that is nearly full
        else:
            self._overwrite(block)
        self.size += len(block)
        self.events += len(lines)

    def finish(self) -> None:
        """Give back the room that is left, if that can be; the lock stays."""
        if self._fd >= 0:
            with suppress(OSError):
                self._replace([], 0)

    def abandon(self) -> None:
        """Let go of the file as it is; a forked child does so, whose parent goes on writing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _separated(self, lines: Sequence[bytes]) -> list[bytes]:
        first = b"\n" if self.events == 0 else b",\n"
        return [(b",\n" if i else first) + line for i, line in enumerate(lines)]

    def _room_for(self, used: int) -> int:
        return min(max(_LEAST_ROOM, used), _MOST_ROOM)

    def _overwrite(self, block: bytes) -> None:
        written = 0
        try:
            while written < len(block):
                written += os.pwrite(self._fd, block[written:], self._used + written)
        except OSError:
            # Only file systems that copy on write run out of room here.
            with suppress(OSError):
                os.pwrite(self._fd, b" " * written, self._used)
            raise
        self._used += len(block)

    def _replace(self, parts: Sequence[bytes], room: int, new: bool = False) -> None:
        """Put a copy in the file's place, with *parts* after what is there, and *room* bytes of spaces."""
        used = self._used + sum(map(len, parts))
        room += -(used + room) % PAGE if room else 0
        self._renamed([*parts, *_spaces(room), self._tail], new)
        self._used, self._end = used, used + room

    def _renamed(self, parts: Sequence[bytes], new: bool) -> None:
        """Write what is used of the file, and *parts*, to another, lock that, and give it the file's name."""
        partial = self.path.with_name(f".{self.path.name}.{os.getpid()}-{next(_numbers)}")
        partial.unlink(missing_ok=True)  # of a killed process, or a link of somebody's who may write here
        fd = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            _copy(self._fd, fd, self._used)
            for part in parts:
                _write(fd, part)
            _lock(fd)
            _install(partial, self.path, new)
        except BaseException:
            os.close(fd)
            partial.unlink(missing_ok=True)
            raise
        self.abandon()
        self._fd = fd


class PackedTrace(LiveTrace):
    """The same in gzip: one member, which chrome://tracing reads no more of, with its end written anew each time."""

    def __init__(self, path: Path, head: bytes, tail: bytes) -> None:
        self._stream = zlib.compressobj(_LEVEL, wbits=-zlib.MAX_WBITS)
        self._crc, self._length = 0, 0
        super().__init__(path, head, tail)

    def append(self, lines: Sequence[bytes]) -> None:
        """Add events, one a line, all or none.

        Raises:
            OSError: There is no room on the disk; the file is as it was.
        """
        block = b"".join(self._separated(lines))
        self._replace([block], 0)
        self.size += len(block)
        self.events += len(lines)

    def finish(self) -> None:
        """Do nothing: there is no room left."""

    def _replace(self, parts: Sequence[bytes], room: int, new: bool = False) -> None:  # noqa: ARG002  -- needs none
        text = b"".join(parts)
        stream = self._stream.copy()
        packed = stream.compress(text) + stream.flush(zlib.Z_SYNC_FLUSH)
        if not self._used:
            packed = _GZIP_HEADER + packed
        crc, length = zlib.crc32(text, self._crc), self._length + len(text)
        self._renamed([packed, _gzip_end(self._tail, crc, length)], new)
        self._stream, self._crc, self._length = stream, crc, length
        self._used += len(packed)


def _gzip_end(tail: bytes, crc: int, length: int) -> bytes:
    """Return the last block, *tail* as it is, and the trailer, after text of that *length* and checksum."""
    block = struct.pack("<BHH", 1, len(tail), 0xFFFF - len(tail)) + tail
    return block + struct.pack("<II", zlib.crc32(tail, crc), (length + len(tail)) & 0xFFFF_FFFF)


def live_trace(path: Path, head: bytes, tail: bytes) -> LiveTrace:
    """Return the writer for a file of that name: in gzip where it ends in ``.gz``."""
    return (PackedTrace if is_packed(path) else LiveTrace)(path, head, tail)


@contextmanager
def _claimed(path: Path) -> Iterator[bool]:
    """Hold the lock of the file at *path* while it is replaced; yield whether there is one."""
    fd = _locked(path)
    try:
        yield fd >= 0
    finally:
        if fd >= 0:
            os.close(fd)


def _locked(path: Path) -> int:
    while True:
        if not path.exists():
            return -1
        if not path.is_file():
            raise OSError(errno.EINVAL, "it is not a regular file")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            continue
        try:
            _lock(fd)
            same = path.exists() and path.stat().st_ino == os.fstat(fd).st_ino
        except BaseException:
            os.close(fd)
            raise
        if same:
            return fd
        os.close(fd)  # replaced meanwhile


def _lock(fd: int) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TakenError(errno.EBUSY, "another writer has it") from None
    except OSError:
        pass  # a file system without locks: the names, which hold the pid, must do


def _install(partial: Path, path: Path, new: bool) -> None:
    """Give *partial* its name; of two writers that make a *new* file at once, one gets FileExistsError."""
    if not new:
        partial.replace(path)
        return
    try:
        path.hardlink_to(partial)
    except FileExistsError:
        raise
    except OSError:
        partial.replace(path)  # a file system without links
    else:
        partial.unlink()


def _by_pages(lines: Sequence[bytes], at: int) -> bytes | None:
    """Return *lines* as they are written at offset *at*, none across a page; None if one is longer than a page."""
    block = bytearray()
    for line in lines:
        if len(line) > PAGE:
            return None
        room = PAGE - (at + len(block)) % PAGE
        if len(line) > room:
            block += b" " * room
        block += line
    return bytes(block)


def _copy(source: int, target: int, count: int) -> None:
    done = 0
    while done < count:
        sent = os.sendfile(target, source, done, count - done)
        if not sent:
            raise OSError(errno.EIO, "somebody else has truncated it")
        done += sent


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _spaces(count: int) -> Iterator[bytes]:
    while count > 0:
        yield _SPACES[:count]
        count -= len(_SPACES)

"""Writes the ring: one file per process on tmpfs, leased in chunks, readable by anybody while it is written.

A chunk belongs to one lane at a time (`lanes`) and the lease is the only lock. A record is one
``pack_into`` whose last field is the commit (the chunk's lease): a slot whose commit differs
from its chunk's lease was never finished. So SIGKILL loses at most the record in hand.
"""

import fcntl
import itertools
import mmap
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from otel_dltrace.model.errors import RingError
from otel_dltrace.record.process_id import boot_id, pid_namespace, take_nonce
from otel_dltrace.record.ring_file import (
    CHUNK,
    CHUNK_HEADER,
    CHUNK_HISTORY,
    HEADER,
    HISTORY_AT,
    LEVEL_AT,
    MAGIC,
    PAGE,
    RECORD,
    UNRECORDED,
    UNRECORDED_AT,
    VERSION,
    above_standard,
    close_if_still,
    file_of,
    is_still,
    make_ring_folder,
    take_for_reading,
)

MIN_CHUNKS = 16
DEFAULT_SIZE = 4 << 20
SHARE_OF_FREE = 0.05
_M32 = 0xFFFF_FFFF
_ZEROS = bytes(CHUNK - 64)
_LEVEL_OF = bytes(byte >> 4 for byte in range(256))

_kept: list[mmap.mmap] = []


class RingWriter:
    """The writing side: makes the file, leases chunks to threads.

    Raises:
        RingError: There is no room, or the folder cannot be used.
    """

    def __init__(self, folder: Path, size: int = DEFAULT_SIZE) -> None:
        self.nonce = take_nonce()
        self.folder = folder
        self.path = folder / f"{self.nonce.hex()}.ring"
        self.unrecorded = 0
        self._reading_fd, self._is_read_here = -1, False
        self._lock = threading.RLock()  # a signal handler may interrupt a lease and lease
        self._leases = itertools.count(1)
        self._cursor = 0
        self._held: set[int] = set()
        try:
            make_ring_folder(folder)
            self.chunks = _chunks_that_fit(folder, size)
            self.buffer = self._make(PAGE + self.chunks * CHUNK)
        except OSError as error:
            raise RingError(f"no ring in {folder}: {error.strerror or error}") from None

    def _make(self, length: int) -> mmap.mmap:
        """Return the mapped file: filled with real pages, locked, then given its name."""
        unnamed = self.path.with_name(f".{self.nonce.hex()}.new")
        self._fd = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            self.mode = 0o640 if self.folder.stat().st_mode & 0o2000 else 0o600
            os.fchmod(self._fd, self.mode)
            # A sparse file on a full tmpfs is SIGBUS at the first write, which nothing can catch.
            os.posix_fallocate(self._fd, 0, length)
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            buffer = mmap.mmap(self._fd, length)
            buffer[: HEADER.size] = self._header()
            unnamed.rename(self.path)
        except BaseException:
            unnamed.unlink(missing_ok=True)
            os.close(self._fd)
            raise
        self._file = file_of(self._fd)
        return buffer

    def _header(self) -> bytes:
        clocks = time.monotonic_ns(), time.time_ns()
        identity = self.nonce, boot_id(), os.getpid(), pid_namespace()
        return HEADER.pack(MAGIC, VERSION, RECORD, CHUNK, self.chunks, *identity, *clocks)

    def lease(self, thread: int) -> tuple[Iterator[int], int, int]:
        """Lease the next free chunk to *thread*.

        Returns:
            The offsets of its slots, the lease, the chunk's index; no offsets, 0 and -1 if every
            chunk is held, which counts as one record that was not recorded.
        """
        with self._lock:
            while len(self._held) < self.chunks:
                index = self._cursor
                self._cursor = (index + 1) % self.chunks
                if index not in self._held:
                    self._held.add(index)  # nothing can interrupt between the test and this
                    return self._take(index, thread)
            self.unrecorded += 1
            self.buffer[UNRECORDED_AT : UNRECORDED_AT + UNRECORDED.size] = UNRECORDED.pack(self.unrecorded)
            return iter(()), 0, -1

    def _take(self, index: int, thread: int) -> tuple[Iterator[int], int, int]:
        # The counter is 32 bits wide in the file; 0 means "never leased".
        lease = next(self._leases) & _M32 or next(self._leases) & _M32
        base, buffer = PAGE + index * CHUNK, self.buffer
        first, end = base + 64, base + CHUNK
        levels = buffer[first + LEVEL_AT : end : RECORD].translate(_LEVEL_OF)
        one, two, three, four = CHUNK_HISTORY.unpack_from(buffer, base + HISTORY_AT)
        counts = (
            one + levels.count(1) & _M32 if 1 in levels else one,
            two + levels.count(2) & _M32 if 2 in levels else two,
            three + levels.count(3) & _M32 if 3 in levels else three,
            four + levels.count(4) & _M32 if 4 in levels else four,
        )
        # In this order: a reader that sees the same lease before and after its copy has a whole chunk.
        # The header is one copy, not a pack (which zeroes first): a kill never leaves half a count.
        buffer[base : base + CHUNK_HEADER.size] = CHUNK_HEADER.pack(0, thread, *counts)
        buffer[first:end] = _ZEROS
        buffer[base : base + 4] = lease.to_bytes(4, "little")
        return iter(range(first, end, RECORD)), lease, index

    def spoil(self, offset: int, lease: int) -> bool:
        """Clear the slot at *offset*, of a chunk leased as *lease*; return whether that still is its lease."""
        base = (offset - PAGE) // CHUNK * CHUNK + PAGE
        with self._lock:
            if self.buffer[base : base + 4] != lease.to_bytes(4, "little"):
                return False
            self.buffer[offset : offset + RECORD] = _ZEROS[:RECORD]
        return True

    def take_for_reading(self) -> bool:
        """Have this process read the ring, and no other; return whether none does already.

        The descriptor stays also where another does: to close any of a file frees the writer's lock on it (POSIX).
        """
        # Not the ring's own descriptor: the map has another of the same file, which forked children keep open.
        if not is_still(self._reading_fd, self._file):
            with above_standard():
                self._reading_fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        self._is_read_here = take_for_reading(self._reading_fd)
        return self._is_read_here

    def leave_reading(self) -> None:
        """Let another process read, while this one still writes."""
        fcntl.flock(self._reading_fd, fcntl.LOCK_UN)
        self._is_read_here = False

    def end_reading(self) -> None:
        """Read no more, once nothing is written, or leave that to the process that this one was forked from."""
        close_if_still(self._reading_fd, self._file)
        self._reading_fd = -1

    def release(self, index: int) -> None:
        """Give a chunk back (-1: none): it is full, or its ring is over."""
        self._held.discard(index)

    def is_held(self) -> bool:
        """Return whether readers see that this process still writes."""
        return is_still(self._fd, self._file)

    def close(self) -> None:
        """Free the lock, which tells the readers that no more will come; the file stays for them."""
        if not close_if_still(self._fd, self._file):
            _kept.append(self.buffer)  # a map closes a descriptor of its own, which is another's by now, too
        if not self._is_read_here:
            self.end_reading()


def free_in(folder: Path) -> int:
    """Return how many bytes are free in *folder*.

    Of a tmpfs without a limit, which says 0 blocks, that is the host's memory: to find its end would take all of it.
    """
    room = os.statvfs(folder)
    if not room.f_blocks:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return room.f_bavail * room.f_frsize


def _chunks_that_fit(folder: Path, size: int) -> int:
    free = free_in(folder)
    chunks = min(size, int(free * SHARE_OF_FREE)) // CHUNK - 1
    if chunks < MIN_CHUNKS:
        needed = (MIN_CHUNKS + 1) * CHUNK
        raise RingError(
            f"no room for a ring in {folder}: {free} bytes are free, of which a ring takes {SHARE_OF_FREE:.0%}, "
            f"and it needs {needed}; give that tmpfs more, or set OTEL_DLTRACE_RING_DIR to a folder on another"
        )
    return chunks

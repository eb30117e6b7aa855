"""The ring: one file per process on tmpfs, leased in chunks, readable by anybody while it is written.

A chunk belongs to one thread at a time and the lease is the only lock. A record is one
``pack_into`` whose last field is the commit (the chunk's lease): a slot whose commit differs
from its chunk's lease was never finished. So SIGKILL loses at most the record in hand.
"""

import fcntl
import itertools
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from otel_dltrace.model.errors import RingError

MAGIC = b"DLTRING1"
VERSION = 1
PAGE = CHUNK = 4096
RECORD = 64
RECORDS = 63  # in a chunk, after its 64-byte header
MIN_CHUNKS = 16
DEFAULT_SIZE = 4 << 20
SHARE_OF_FREE = 0.05
RECORD_FORMAT = "<IIIBBHQQQIIiiHHI"
HEADER = struct.Struct("<8sHHII8s16sIQQQ")
# After the header: how many records found every chunk held by another thread.
UNRECORDED = struct.Struct("<Q")
UNRECORDED_AT = HEADER.size
# Lease, thread, and how many records of each level (1..4) this chunk held under earlier leases: with
# them laps are counted exactly, also by a reader that comes late.
CHUNK_HEADER = struct.Struct("<IQ4x4I")
CHUNK_HISTORY = struct.Struct("<4I")
HISTORY_AT = 16
LEVEL_AT = 13  # in a record: level << 4 | source
LEVELS = 4
_ALL_SLOTS = (1 << RECORDS) - 1
_M32 = 0xFFFF_FFFF
_ZEROS = bytes(CHUNK - 64)
_LEVEL_OF = bytes(byte >> 4 for byte in range(256))

_kept: list[mmap.mmap] = []

BEGIN, SPAN, AMEND, COUNTER = 1, 2, 3, 4
AMEND_DEVICE, AMEND_ERROR, AMEND_PARENT = 1, 2, 3


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


class RingWriter:
    """The writing side: makes the file, leases chunks to threads.

    Raises:
        RingError: There is no room, or the folder cannot be used.
    """

    def __init__(self, folder: Path, size: int = DEFAULT_SIZE) -> None:
        self.nonce = os.urandom(8)
        self.folder = folder
        self.path = folder / f"{self.nonce.hex()}.ring"
        self.unrecorded = 0
        self._lock = threading.RLock()  # a signal handler may interrupt a lease and lease
        self._leases = itertools.count(1)
        self._cursor = 0
        self._held: set[int] = set()
        try:
            make_ring_folder(folder)
            self.chunks = _chunks_that_fit(folder, size)
            self.buffer = self._make(PAGE + self.chunks * CHUNK)
        except OSError as error:
            raise RingError(f"no ring in {folder}: {error.strerror or error}; tracing is off") from None

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
        identity = self.nonce, boot_id(), os.getpid(), _pid_namespace()
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
            one + levels.count(1) & _M32,
            two + levels.count(2) & _M32,
            three + levels.count(3) & _M32,
            four + levels.count(4) & _M32,
        )
        # In this order: a reader that sees the same lease before and after its copy has a whole chunk.
        # The header is one copy, not a pack (which zeroes first): a kill never leaves half a count.
        buffer[base : base + CHUNK_HEADER.size] = CHUNK_HEADER.pack(0, thread, *counts)
        buffer[first:end] = _ZEROS
        buffer[base : base + 4] = lease.to_bytes(4, "little")
        return iter(range(first, end, RECORD)), lease, index

    def release(self, index: int) -> None:
        """Give a chunk back (-1: none): it is full, or its ring is over."""
        self._held.discard(index)

    def close(self) -> None:
        """Free the lock, which tells the readers that no more will come; the file stays for them."""
        if not close_if_still(self._fd, self._file):
            _kept.append(self.buffer)  # a map closes a descriptor of its own, which is another's by now, too


@dataclass(slots=True)
class Taken:
    """What was read of one chunk: its lease, a bit per slot, and all records accounted for, per level."""

    lease: int = 0
    slots: int = 0
    levels: list[int] = field(default_factory=lambda: [0, 0, 0, 0])


class RingReader:
    """The reading side: new records of a ring, each once, alive or dead.

    *taken* (the slots read so far, per chunk) can be stored and given back, so that a later
    reader goes on where this one stopped.

    Attributes:
        lapped: How many records of each level (1..4) were overwritten before they were read.

    Raises:
        RingError: These bytes are no ring.
    """

    def __init__(self, buffer: mmap.mmap | memoryview, taken: dict[int, Taken] | None = None) -> None:
        self._view = memoryview(buffer)
        try:
            self.header = read_header(self._view)
        except RingError:
            self._view.release()  # else the traceback keeps the caller from closing its map
            raise
        self._leases = self._view[PAGE : PAGE + self.header.chunks * CHUNK].cast("I")
        self.taken: dict[int, Taken] = taken if taken is not None else {}
        self._done = [0] * self.header.chunks
        """For each chunk the lease under which all its slots have been read."""
        for index, chunk in self.taken.items():
            if chunk.slots == _ALL_SLOTS and index < len(self._done):
                self._done[index] = chunk.lease
        self._seen: dict[int, tuple[int, int]] = {}
        self.lapped = [0, 0, 0, 0, 0]

    @property
    def unrecorded(self) -> int:
        """How many records were not written, because other threads held every chunk."""
        count: int = UNRECORDED.unpack_from(self._view, UNRECORDED_AT)[0]
        return count

    def scan(self, final: bool = False) -> list[bytes]:
        """Return the records that were committed before the last scan (all, if *final*), 64 bytes each."""
        data = self.read(final)
        return [data[at : at + RECORD] for at in range(0, len(data), RECORD)]

    def read(self, final: bool = False) -> bytes:
        """Return what `scan` does, one record after the other."""
        runs: list[bytes] = []
        leases = self._leases[:: CHUNK // 4].tolist()
        # Most chunks have been read to their end, so finding the others is most of an idle drain's work.
        for index in [i for i, (lease, done) in enumerate(zip(leases, self._done, strict=True)) if lease != done]:
            if leases[index]:
                self._read_chunk(index, leases[index], final, runs)
        if final:
            for index in [i for i, lease in enumerate(leases) if not lease]:
                self._count_lost(index)
        return b"".join(runs)

    def _read_chunk(self, index: int, lease: int, final: bool, runs: list[bytes]) -> None:
        base = PAGE + index * CHUNK
        copy = bytes(self._view[base : base + CHUNK])
        if int.from_bytes(copy[:4], "little") != lease or self._leases[index * CHUNK // 4] != lease:
            return  # leased anew while it was copied
        commits = memoryview(copy).cast("I")[31::16].tolist()
        if commits.count(lease) == RECORDS:
            committed = _ALL_SLOTS
        else:
            committed = sum(1 << slot for slot, commit in enumerate(commits) if commit == lease)
        settled = committed if final else self._settled(index, lease, committed)
        taken = self._taken(index, lease, copy)
        new = settled & ~taken.slots
        taken.slots |= new
        self._done[index] = lease if taken.slots == _ALL_SLOTS else 0
        while new:  # slots are filled in order, so they come in few runs
            slot = (new & -new).bit_length() - 1
            rest = new >> slot
            length = (~rest & rest + 1).bit_length() - 1
            new = rest >> length << slot + length
            start = (slot + 1) * RECORD  # slot 0 begins after the header's 64 bytes
            run = copy[start : start + length * RECORD]
            levels = run[LEVEL_AT::RECORD].translate(_LEVEL_OF)
            for level in range(LEVELS):
                taken.levels[level] += levels.count(level + 1)
            runs.append(run)

    def _count_lost(self, index: int) -> None:
        """Count what a writer erased that was killed while it leased a chunk anew."""
        base = PAGE + index * CHUNK
        header = bytes(self._view[base : base + 64])
        if any(header):
            taken = self.taken.setdefault(index, Taken())
            self._count_lapped(taken, header)
            taken.lease = taken.slots = 0

    def _settled(self, index: int, lease: int, committed: int) -> int:
        """Return the slots whose commit an earlier scan saw: their bytes have arrived on every machine."""
        before = self._seen.get(index, (0, 0))
        self._seen[index] = (lease, committed)
        return committed & before[1] if before[0] == lease else 0

    def _taken(self, index: int, lease: int, copy: bytes) -> Taken:
        taken = self.taken.setdefault(index, Taken())
        if taken.lease != lease:
            self._count_lapped(taken, copy)
            taken.lease, taken.slots = lease, 0
        return taken

    def _count_lapped(self, taken: Taken, header: bytes) -> None:
        """Count what this chunk held under earlier leases and nobody read."""
        history = CHUNK_HISTORY.unpack_from(header, HISTORY_AT)
        for level, (written, read) in enumerate(zip(history, taken.levels, strict=True), 1):
            lapped = written - read & _M32  # both are 32 bits wide and go round
            self.lapped[level] += lapped if lapped < 1 << 31 else 0
        taken.levels = list(history)

    def close(self) -> None:
        """Let go of the bytes."""
        self._leases.release()
        self._view.release()


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
    if (version, record, chunk) != (VERSION, RECORD, CHUNK) or len(view) < PAGE + chunks * CHUNK:
        raise RingError(f"version {version}, {record}-byte records, {chunks} chunks: not a ring this version reads")
    return RingHeader(nonce, boot, pid, namespace, monotonic, wall, chunks)


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


def make_ring_folder(folder: Path) -> None:
    """Make the folder for rings, private to its user; a shared one (setgid) stays as it is."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RingError(f"{folder} cannot be written; set OTEL_DLTRACE_RING_DIR to a tmpfs folder; tracing is off")


def file_of(fd: int) -> tuple[int, int]:
    """Return which file *fd* is open on."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def close_if_still(fd: int, file: tuple[int, int]) -> bool:
    """Close *fd* if it still is *file*, and return whether it was.

    A program that becomes a daemon closes all descriptors and may use their numbers anew.
    """
    try:
        if file_of(fd) != file:
            return False
        os.close(fd)
    except OSError:
        return False
    return True


def boot_id() -> bytes:
    """Return the id of this boot of the kernel: monotonic clocks are comparable within it alone."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return bytes(16)
    return bytes.fromhex(text.strip().replace("-", ""))


def _pid_namespace() -> int:
    try:
        return Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        return 0  # no /proc here


def _chunks_that_fit(folder: Path, size: int) -> int:
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    share = int(free * SHARE_OF_FREE) if room.f_blocks else size  # a tmpfs without a limit says 0 blocks
    chunks = min(size, share) // CHUNK - 1
    if chunks < MIN_CHUNKS:
        needed = (MIN_CHUNKS + 1) * CHUNK
        raise RingError(
            f"no room for a ring in {folder}: {free} bytes are free, of which a ring takes {SHARE_OF_FREE:.0%}, "
            f"and it needs {needed}; tracing is off"
        )
    return chunks

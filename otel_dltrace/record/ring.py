"""The ring: one file per process on tmpfs, leased in chunks, readable by anybody while it is written.

A chunk belongs to one thread at a time and the lease is the only lock. A record is one
``pack_into`` whose last field is the commit (the chunk's lease): a slot whose commit differs
from its chunk's lease was never finished. So SIGKILL loses at most the record in hand.
"""

import fcntl
import mmap
import os
import struct
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
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
# Unsigned a and b: the same bytes as contract 2's "ii" for values masked to 32 bits.
RECORD_FORMAT = "<IIIBBHQQQIIIIHHI"
HEADER = struct.Struct("<8sHHII8s16sIQQQ")
CHUNK_HEADER = struct.Struct("<IQ")
# Records of each level (1..4) that this chunk held under earlier leases, so that laps are counted exactly.
CHUNK_HISTORY = struct.Struct("<4I")
HISTORY_AT = 16
_ZEROS = bytes(CHUNK - 64)
_LEVEL_OF = bytes(byte >> 4 for byte in range(256))

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
        self.buffer = self._make(size)
        self._lock = threading.RLock()  # a signal handler may interrupt a lease and lease
        self._lease = 0
        self._cursor = 0
        self._held: set[int] = set()
        self.unrecorded = 0

    def _make(self, size: int) -> mmap.mmap:
        """Return the mapped file: filled with real pages, locked, then given its name."""
        try:
            make_ring_folder(self.folder)
            self.chunks = _chunks_that_fit(self.folder, size)
            length = PAGE + self.chunks * CHUNK
            self._fd, name = tempfile.mkstemp(prefix=".ring-", dir=self.folder)
            try:
                os.fchmod(self._fd, 0o640 if os.stat(self.folder).st_mode & 0o2000 else 0o600)
                # A sparse file on a full tmpfs is SIGBUS at the first write, which nothing can catch.
                os.posix_fallocate(self._fd, 0, length)
                fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                buffer = mmap.mmap(self._fd, length)
                buffer[: HEADER.size] = self._header()
                os.rename(name, self.path)
            except BaseException:
                os.unlink(name)
                os.close(self._fd)
                raise
        except OSError as error:
            raise RingError(f"no ring in {self.folder}: {error.strerror or error}; tracing is off") from None
        return buffer

    def _header(self) -> bytes:
        return HEADER.pack(
            MAGIC,
            VERSION,
            RECORD,
            CHUNK,
            self.chunks,
            self.nonce,
            boot_id(),
            os.getpid(),
            os.stat("/proc/self/ns/pid").st_ino,
            time.monotonic_ns(),
            time.time_ns(),
        )

    def lease(self, held: int) -> tuple[Iterator[int], int, int]:
        """Lease the next free chunk to this thread and release *held* (-1: none).

        Returns:
            The offsets of its slots, the lease, the chunk's index; no offsets if every chunk is
            held by some thread.
        """
        with self._lock:
            self._held.discard(held)
            for _ in range(self.chunks):
                index = self._cursor
                self._cursor = (index + 1) % self.chunks
                if index not in self._held:
                    return self._take(index)
            self.unrecorded += 1
            return iter(()), 0, -1

    def _take(self, index: int) -> tuple[Iterator[int], int, int]:
        self._held.add(index)
        # The counter is 32 bits wide in the file; 0 means "never leased".
        self._lease = lease = self._lease % 0xFFFF_FFFF + 1
        base = PAGE + index * CHUNK
        buffer = self.buffer
        levels = buffer[base + 64 + 13 : base + CHUNK : RECORD].translate(_LEVEL_OF)
        history = CHUNK_HISTORY.unpack_from(buffer, base + HISTORY_AT)
        new = [(old + levels.count(level)) & 0xFFFF_FFFF for level, old in enumerate(history, 1)]
        buffer[base : base + 4] = bytes(4)
        buffer[base + 64 : base + CHUNK] = _ZEROS
        CHUNK_HISTORY.pack_into(buffer, base + HISTORY_AT, *new)
        buffer[base + 4 : base + 12] = threading.get_native_id().to_bytes(8, "little")
        buffer[base : base + 4] = lease.to_bytes(4, "little")
        return iter(range(base + 64, base + CHUNK, RECORD)), lease, index

    def release(self, held: int) -> None:
        """Give a chunk back: its thread has ended."""
        self._held.discard(held)

    def close(self) -> None:
        """Free the lock, which tells the readers that no more will come; the file stays for them."""
        os.close(self._fd)


class RingReader:
    """The reading side: new records of a ring, each once, alive or dead.

    *taken* (the slots read so far, per chunk) can be stored and given back, so that a later
    reader goes on where this one stopped.
    """

    def __init__(self, buffer: mmap.mmap | memoryview, taken: dict[int, "Taken"] | None = None) -> None:
        self._view = memoryview(buffer)
        self.header = read_header(self._view)
        self._leases = self._view[PAGE:].cast("I")
        self.taken: dict[int, Taken] = taken if taken is not None else {}
        self._seen: dict[int, tuple[int, int]] = {}
        self.lapped = [0, 0, 0, 0, 0]

    def scan(self, final: bool = False) -> list[bytes]:
        """Return the records that were committed before the last scan (all, if *final*), 64 bytes each."""
        records: list[bytes] = []
        for index, lease in enumerate(self._leases[:: CHUNK // 4].tolist()):
            taken = self.taken.get(index)
            if lease and not (taken and taken.lease == lease and taken.slots == _ALL_SLOTS):
                self._scan_chunk(index, lease, final, records)
        return records

    def _scan_chunk(self, index: int, lease: int, final: bool, records: list[bytes]) -> None:
        base = PAGE + index * CHUNK
        copy = bytes(self._view[base : base + CHUNK])
        if int.from_bytes(copy[:4], "little") != lease or self._leases[index * CHUNK // 4] != lease:
            return  # leased anew while it was copied
        words = memoryview(copy).cast("I")
        commits = words[31::16].tolist()
        committed = 0
        for slot, commit in enumerate(commits):
            if commit == lease:
                committed |= 1 << slot
        settled = committed if final else self._settled(index, lease, committed)
        taken = self._taken(index, lease, copy)
        new = settled & ~taken.slots
        taken.slots |= new
        for slot in range(RECORDS):
            if new >> slot & 1:
                start = 64 + slot * RECORD
                record = copy[start : start + RECORD]
                level = record[13] >> 4
                if 1 <= level <= 4:
                    taken.levels[level - 1] += 1
                records.append(record)

    def _settled(self, index: int, lease: int, committed: int) -> int:
        """Return the slots whose commit an earlier scan saw: their bytes have arrived on every machine."""
        before = self._seen.get(index, (0, 0))
        self._seen[index] = (lease, committed)
        return committed & before[1] if before[0] == lease else 0

    def _taken(self, index: int, lease: int, copy: bytes) -> "Taken":
        taken = self.taken.setdefault(index, Taken())
        if taken.lease != lease:
            history = CHUNK_HISTORY.unpack_from(copy, HISTORY_AT)
            for level, (written, read) in enumerate(zip(history, taken.levels, strict=True), 1):
                self.lapped[level] += max(0, written - read)
            taken.levels = list(history)
            taken.lease, taken.slots = lease, 0
        return taken

    def close(self) -> None:
        """Let go of the bytes."""
        self._leases.release()
        self._view.release()


_ALL_SLOTS = (1 << RECORDS) - 1


@dataclass(slots=True)
class Taken:
    """What was read of one chunk: its lease, a bit per slot, and all records ever read per level."""

    lease: int = 0
    slots: int = 0
    levels: list[int] = None  # type: ignore[assignment]  # set below: a dataclass with slots has no mutable default

    def __post_init__(self) -> None:
        if self.levels is None:
            self.levels = [0, 0, 0, 0]


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


def boot_id() -> bytes:
    """Return the id of this boot of the kernel: monotonic clocks are comparable within it alone."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return bytes(16)
    return bytes.fromhex(text.strip().replace("-", ""))


def _chunks_that_fit(folder: Path, size: int) -> int:
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    chunks = min(size, int(free * SHARE_OF_FREE)) // CHUNK - 1
    if chunks < MIN_CHUNKS:
        needed = (MIN_CHUNKS + 1) * CHUNK
        raise RingError(
            f"no room for a ring in {folder}: {free} bytes are free, of which a ring takes {SHARE_OF_FREE:.0%}, "
            f"and it needs {needed}; tracing is off"
        )
    return chunks

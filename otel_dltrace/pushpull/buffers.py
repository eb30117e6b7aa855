"""The memory that a tensor's partitions pass through: seen by all local ranks of a worker, private if there is one.

Each rank has an input that the others on its switch read, and an output that they gather from. Each switch has a
host buffer for its sum, and one more takes what comes back from the servers. BytePS has the first two on the GPUs.
No rank writes what another may still read of the round before: it gets to a round's stage only once the others have
finished the round before (their signals say so), and input and output, sum and result are apart.
"""

import mmap
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from otel_dltrace.pushpull.errors import PushPullError
from otel_dltrace.pushpull.layout import Layout

Bytes = NDArray[np.uint8]
_ALIGNMENT = 4096


@dataclass(slots=True)
class Buffers:
    """The buffers of one tensor, as bytes."""

    inputs: list[Bytes]
    outputs: list[Bytes]
    sums: list[Bytes]
    result: Bytes
    file: Path | None = None

    def unlink(self) -> None:
        """Take the name from the shared memory, once all local ranks have it: then nothing can be left behind."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)
            self.file = None


def fingerprint(name: str, dtype: str, nbytes: int) -> int:
    """Return a number that local ranks compare, so that none takes another's tensor for its own."""
    return zlib.crc32(f"{name} {dtype} {nbytes}".encode())


def make_buffers(layout: Layout, folder: Path, declared_key: int, mark: int, nbytes: int) -> Buffers:
    """Return buffers for a tensor of *nbytes* with the fingerprint *mark*.

    Raises:
        PushPullError: There is no room for them.
    """
    room = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
    number_of_sums = layout.num_switches if layout.uses_host else 0
    number = 2 * layout.local_size + number_of_sums + 1
    # A tensor without elements has no stage either that would tell one rank that the others have the file.
    file = folder / f"{declared_key}-{mark:08x}" if layout.local_size > 1 and nbytes else None
    memory = _shared(file, number * room) if file else np.empty(number * room, np.uint8)
    parts = [memory[i * room : i * room + nbytes] for i in range(number)]
    ranks = layout.local_size
    return Buffers(parts[:ranks], parts[ranks : 2 * ranks], parts[2 * ranks : -1], parts[-1], file)


def _shared(file: Path, size: int) -> Bytes:
    """Map *file*; the first local rank to come here makes it."""
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # Not ftruncate: a page that a full tmpfs cannot give later on is a SIGBUS, which nobody can catch.
        os.posix_fallocate(descriptor, 0, size)
        return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    except OSError as error:
        raise PushPullError(f"{file.parent} has no room for {size} bytes of shared memory: {error.strerror}") from None
    finally:
        os.close(descriptor)


def share(size: int, index: int, number: int, itemsize: int) -> slice:
    """Return the bytes that rank *index* of *number* works on, of a partition of *size* bytes."""
    elements = size // itemsize
    return slice(elements * index // number * itemsize, elements * (index + 1) // number * itemsize)

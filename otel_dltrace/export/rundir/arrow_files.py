"""Files in Arrow's stream format and Parquet, read as far as they are whole.

Paths go to Arrow as bytes: of text it takes only what is UTF-8.
"""

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from otel_dltrace.export.rundir.columns import has_gaps

UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""What Arrow raises at files that are damaged, or not there."""


def arrow_name(path: Path) -> bytes:
    """Return how to name *path* to Arrow, which would wait for somebody to write to a pipe.

    Raises:
        OSError: It is a pipe.
    """
    if path.is_fifo():
        raise OSError(errno.ESPIPE, os.strerror(errno.ESPIPE), str(path))
    return os.fsencode(path)


def read_stream(path: Path) -> pa.Table | None:
    """Return the record batches of an Arrow stream that its writer may not have closed; None if it has none."""
    batches = list(stream_batches(path, pa.memory_map))
    return pa.Table.from_batches(batches) if batches else None


def stream_batches(path: Path, opened: Callable[[bytes], pa.NativeFile] = pa.OSFile) -> Iterator[pa.RecordBatch]:
    """Yield the same one by one; where the stream is torn or damaged, they end."""
    with suppress(*UNREADABLE), opened(arrow_name(path)) as source, pa.ipc.open_stream(source) as reader:
        for batch in reader:
            _check(batch)
            yield batch


def _check(batch: pa.RecordBatch) -> None:
    """Refuse *batch* where no writer of ours can have made it so.

    Raises:
        ArrowInvalid: Its buffers do not fit together, or a value is missing.
    """
    batch.validate(full=True)  # else a flipped bit has a text end anywhere in memory
    if has_gaps(batch):
        raise pa.ArrowInvalid("values are missing")


class Stream(NamedTuple):
    """An Arrow stream as far as it can be read.

    Attributes:
        schema: Of its batches.
        batches: Those that are whole.
        is_read: Whether they go on to the file's end, where half of one may be.
        is_whole: Whether there is nothing else in the file.
    """

    schema: pa.Schema
    batches: list[pa.RecordBatch]
    is_read: bool
    is_whole: bool


def read_through(path: Path) -> Stream:
    """Read a file in Arrow's stream format, and tell how far that went.

    Raises:
        UNREADABLE: No stream begins there.
    """
    batches, is_whole = list[pa.RecordBatch](), False
    with pa.memory_map(arrow_name(path)) as source, pa.ipc.open_stream(source) as reader:
        with suppress(*UNREADABLE):
            for batch in reader:
                _check(batch)
                batches.append(batch)
            is_whole = True
        is_read = source.tell() == source.size()  # zeros are the end of a stream, and nothing behind them is read
        return Stream(reader.schema, batches, is_read, is_whole and is_read)


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file whose pages are to be as they were written."""
    return pq.ParquetFile(pa.OSFile(arrow_name(path)), page_checksum_verification=True)

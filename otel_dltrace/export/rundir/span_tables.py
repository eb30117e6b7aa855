"""The spans of one file as Arrow columns, whatever state its writer left it in."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from otel_dltrace.export.rundir import columns
from otel_dltrace.export.rundir.arrow_files import UNREADABLE, open_parquet, read_stream, read_through, stream_batches

_PIECE = 1 << 15


def read_table(path: Path, names: Sequence[str] = columns.SPANS.names) -> pa.Table | None:
    """Return a file's spans as Arrow columns, at least these *names* of the span schema; None if it holds none."""
    if path.suffix == ".parquet":
        try:
            with open_parquet(path) as file:  # `pq.read_table` would import pandas, if there is one
                table = file.read(list(names)) if columns.are_spans(file.schema_arrow) else None
                return None if table is None or columns.has_gaps(table) else table
        except UNREADABLE:
            return None
    table = read_stream(path)
    return table if table is not None and columns.are_spans(table.schema) else None


def read_pieces(path: Path) -> Iterator[pa.Table]:
    """Yield a file's spans in its order as Arrow columns, some `_PIECE` at a time."""
    parts: list[pa.RecordBatch] = []
    rows = 0
    for batch in _record_batches(path):
        for at in range(0, batch.num_rows, _PIECE):
            parts.append(batch.slice(at, _PIECE))
            rows += parts[-1].num_rows
            if rows >= _PIECE:
                yield pa.Table.from_batches(parts)
                parts, rows = [], 0
    if parts:
        yield pa.Table.from_batches(parts)


def _record_batches(path: Path) -> Iterator[pa.RecordBatch]:
    if path.suffix != ".parquet":
        yield from (batch for batch in stream_batches(path) if columns.are_spans(batch.schema))
        return
    with suppress(*UNREADABLE), open_parquet(path) as file:
        if columns.are_spans(file.schema_arrow):
            batches = file.iter_batches(_PIECE, columns=columns.SPANS.names)
            yield from takewhile(lambda batch: not columns.has_gaps(batch), batches)


def spans_in(path: Path) -> int:
    """Return how many spans a file says that it holds, -1 if it is damaged.

    Raises:
        OSError: It cannot be read now.
    """
    try:
        if path.suffix == ".parquet":
            with open_parquet(path) as file:
                return int(file.metadata.num_rows)
        stream = read_through(path)
    except (pa.ArrowException, UnicodeDecodeError):
        return -1
    return sum(batch.num_rows for batch in stream.batches) if stream.is_read else -1


def extent_of(path: Path) -> tuple[int, int]:
    """Return when the first span of a file begins, in ns of its host's monotonic clock, and how many there are."""
    table = read_table(path, ["start"])
    return (pc.min(table.column("start")).as_py() or 0, table.num_rows) if table is not None else (0, 0)

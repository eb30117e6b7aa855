"""SpanBatch rows as Arrow columns and back: the schema of the run directory (contract 7)."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from otel_dltrace.model.arrays import Column
from otel_dltrace.model.operation import OTHER, Descriptor
from otel_dltrace.model.spans import SPAN_DTYPE, empty_rows

SCHEMA_VERSION = 1
_PLAIN = [name for name in SPAN_DTYPE.names or () if name != "error"]
_TYPES = {name: pa.from_numpy_dtype(SPAN_DTYPE[name]) for name in _PLAIN}

SPANS = pa.schema(
    [("process", pa.uint64()), *_TYPES.items(), ("error_type", pa.string()), ("error_message", pa.string())]
)
_WITH_GAPS = ("error_type", "error_message")
"""The columns in which a gap means none; in Parquet what readers of others need may be not known."""
_TEXT = ("kind", "name", "group", "backend", "tensor", "queue_type", "activity", "dtype")
_INTEGERS = ("group_size", "key")
DESCRIPTORS = pa.schema(
    [
        ("process", pa.uint64()),
        ("id", pa.uint32()),
        *((name, pa.string()) for name in _TEXT),
        *((name, pa.int64()) for name in _INTEGERS),
    ]
)


def are_spans(schema: pa.Schema, names: Sequence[str] = SPANS.names) -> bool:
    """Return whether a file of *schema* has these *names* of the span schema, as we write them."""
    places = {name: schema.get_field_index(name) for name in names}  # -1: none, or several
    return all(at >= 0 and schema.field(at).type == SPANS.field(name).type for name, at in places.items())


def has_gaps(part: pa.RecordBatch | pa.Table) -> bool:
    """Return whether a value is missing in a column of *part* that is never written so."""
    return any(
        column.null_count or (isinstance(column, pa.DictionaryArray) and column.dictionary.null_count)
        for name, column in zip(part.schema.names, part.columns, strict=True)
        if name not in _WITH_GAPS
    )


def to_arrow(rows: Column, errors: Sequence[tuple[str, str]], process: int) -> pa.RecordBatch:
    """Return *rows* of the process with nonce *process* as one record batch."""
    arrays = [numbers(np.full(len(rows), process, np.uint64), pa.uint64())]
    arrays += [numbers(np.ascontiguousarray(rows[name]), kind) for name, kind in _TYPES.items()]
    arrays += [_texts(rows["error"], [error[part] for error in errors]) for part in (0, 1)]
    return pa.RecordBatch.from_arrays(arrays, schema=SPANS)


def numbers(column: Column, kind: pa.DataType) -> pa.Array:
    """Return *column* as an array; `pyarrow.array` would import pandas, if there is one, to learn that it is none."""
    return pa.Array.from_buffers(kind, len(column), [None, pa.py_buffer(column)])


def with_gaps(values: Sequence[int | None], kind: pa.DataType) -> pa.Array:
    """Return *values* as an array, and import no pandas, as in `numbers`."""
    known = np.packbits([value is not None for value in values], bitorder="little")
    filled = np.array([value or 0 for value in values], str(kind))
    return pa.Array.from_buffers(kind, len(values), [pa.py_buffer(known), pa.py_buffer(filled)])


def numbers_of(column: pa.ChunkedArray) -> Column:
    """Return *column*, which has no gaps, as an array of numpy's, and import no pandas, as in `numbers`."""
    kind = np.dtype(str(column.type))
    chunks = [chunk for chunk in column.chunks if len(chunk)]
    parts = [np.frombuffer(c.buffers()[1], kind, len(c), c.offset * kind.itemsize) for c in chunks]
    return np.concatenate([np.zeros(0, kind), *parts])


def of_process(table: pa.Table, nonce: int) -> pa.ChunkedArray:
    """Return a mask of the rows of *table* that the process *nonce* wrote."""
    return equal(table.column("process"), nonce)


def equal(column: pa.ChunkedArray, value: int) -> pa.ChunkedArray:
    """Return where *column* is *value*; a number of Python's would import pandas, as in `numbers`."""
    return pc.equal(column, numbers(np.array([value], str(column.type)), column.type)[0])


def _texts(numbers: Column, texts: list[str]) -> pa.Array:
    if not numbers.any():
        return pa.nulls(len(numbers), pa.string())
    return pa.array([texts[n] if n else None for n in numbers.tolist()], pa.string())


def from_arrow(table: pa.Table) -> tuple[Column, list[tuple[str, str]]]:
    """Return the rows of *table* (of one process) and their errors; the first error stands for none."""
    rows = empty_rows(table.num_rows)
    for name in _PLAIN:
        rows[name] = numbers_of(table.column(name))
    errors = [("", "")]
    types = table.column("error_type")
    if types.null_count < len(types):
        messages = table.column("error_message").to_pylist()
        for i, kind in enumerate(types.to_pylist()):
            if kind is not None:
                rows["error"][i] = len(errors)
                errors.append((kind, messages[i] or ""))
    return rows, errors


def descriptors_to_arrow(descriptors: Sequence[Descriptor], first: int, process: int) -> pa.RecordBatch:
    """Return *descriptors*, numbered from *first*, as one record batch."""
    count = len(descriptors)
    arrays = [
        numbers(np.full(count, process, np.uint64), pa.uint64()),
        numbers(np.arange(first, first + count, dtype=np.uint32), pa.uint32()),
        *(strings([getattr(d, name) for d in descriptors]) for name in _TEXT),
        *(numbers(np.array([getattr(d, name) for d in descriptors], np.int64), pa.int64()) for name in _INTEGERS),
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=DESCRIPTORS)


def strings(texts: Sequence[str]) -> pa.Array:
    """Return *texts* as an array, and import no pandas, as in `numbers`."""
    data = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, data)], dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), len(data), [None, pa.py_buffer(ends), pa.py_buffer(b"".join(data))])


def descriptors_from_arrow(table: pa.Table) -> dict[int, list[Descriptor]]:
    """Return each process's descriptor table, in order of their numbers; a damaged number leaves the others alone."""
    out: dict[int, dict[int, Descriptor]] = {}
    for row in table.to_pylist():
        process, number = row.pop("process"), row.pop("id")
        out.setdefault(process, {})[number] = Descriptor(**row)
    return {process: [known.get(n, OTHER) for n in range(len(known))] for process, known in out.items()}

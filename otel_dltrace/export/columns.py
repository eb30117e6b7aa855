"""SpanBatch rows as Arrow columns and back: the schema of the run directory (contract 7)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SPAN_DTYPE, Column, empty_rows

SCHEMA_VERSION = 1
_PLAIN = [name for name in SPAN_DTYPE.names or () if name != "error"]
_TYPES = {name: pa.from_numpy_dtype(SPAN_DTYPE[name]) for name in _PLAIN}

SPANS = pa.schema(
    [("process", pa.uint64()), *_TYPES.items(), ("error_type", pa.string()), ("error_message", pa.string())]
)
_TEXT = ("kind", "name", "group", "backend", "tensor", "queue_type", "activity", "dtype")
DESCRIPTORS = pa.schema(
    [
        ("process", pa.uint64()),
        ("id", pa.uint32()),
        *((name, pa.string()) for name in _TEXT),
        ("group_size", pa.int64()),
        ("key", pa.int64()),
    ]
)


def to_arrow(rows: Column, errors: Sequence[tuple[str, str]], process: int) -> pa.RecordBatch:
    """Return *rows* of the process with nonce *process* as one record batch."""
    arrays = [pa.array(np.full(len(rows), process, np.uint64))]
    arrays += [pa.array(np.ascontiguousarray(rows[name])) for name in _PLAIN]
    arrays += [_texts(rows["error"], [error[part] for error in errors]) for part in (0, 1)]
    return pa.RecordBatch.from_arrays(arrays, schema=SPANS)


def of_process(table: pa.Table, nonce: int) -> pa.ChunkedArray:
    """Return a mask of the rows of *table* that the process *nonce* wrote."""
    return pc.equal(table.column("process"), pa.scalar(nonce, pa.uint64()))


def _texts(numbers: Column, texts: list[str]) -> pa.Array:
    if not numbers.any():
        return pa.nulls(len(numbers), pa.string())
    return pa.array([texts[n] if n else None for n in numbers.tolist()], pa.string())


def from_arrow(table: pa.Table) -> tuple[Column, list[tuple[str, str]]]:
    """Return the rows of *table* (of one process) and their errors; the first error stands for none."""
    rows = empty_rows(table.num_rows)
    for name in _PLAIN:
        rows[name] = table.column(name).to_numpy()
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
    columns: dict[str, list[Any]] = {
        "process": [process] * len(descriptors),
        "id": list(range(first, first + len(descriptors))),
    }
    for name in DESCRIPTORS.names[2:]:
        columns[name] = [getattr(d, name) for d in descriptors]
    return pa.RecordBatch.from_pydict(columns, schema=DESCRIPTORS)


def descriptors_from_arrow(table: pa.Table) -> dict[int, list[Descriptor]]:
    """Return each process's descriptor table, in order of their numbers."""
    out: dict[int, dict[int, Descriptor]] = {}
    for row in table.to_pylist():
        process, number = row.pop("process"), row.pop("id")
        out.setdefault(process, {})[number] = Descriptor(**row)
    return {process: [known[n] for n in sorted(known)] for process, known in out.items()}

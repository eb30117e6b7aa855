"""Spans one by one as plain values: what the SDK bridge and OTLP JSON say of a row, the same as the column encoder."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.attributes import (
    Launcher,
    Value,
    collective_ids,
    constant_attributes,
    launcher_of,
    number_columns,
)
from otel_dltrace.model.operation import MAX_DESCRIPTORS, Descriptor
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.model.text import clean

KNOWN_FLAGS = int(s.Flag.ASYNC | s.Flag.ERROR | s.Flag.TRUNCATED)
"""Those that a span's constant part tells of."""
INTERNAL, STATUS_ERROR = 1, 2
"""OTLP's numbers for the kind of a span, and for the status of one that failed."""
HAS_IS_REMOTE, IS_REMOTE = 0x100, 0x200
"""OTLP's flags of spans and links: whether it is known that their parent is another process's, and that it is."""


@dataclass(frozen=True, slots=True, eq=False)
class Constant:
    """What spans of one descriptor, source, error and set of flags share; one object for all of them.

    Attributes:
        name: The spans' name.
        attributes: Those that are alike on all; not to be changed.
        under_root: Whether the parent is the step's root, which is another process's to all ranks but one.
        failed: Whether the status is an error.
        message: The status's description.
    """

    name: str
    attributes: dict[str, Value]
    under_root: bool
    failed: bool
    message: str


class PlainSpan(NamedTuple):
    """One span; times are Unix ns, *parent_id* is 0 for none, *own* are the attributes that vary.

    *launcher* is what it links to.
    """

    constant: Constant
    trace_id: bytes
    span_id: int
    parent_id: int
    start: int
    end: int
    own: dict[str, int | str]
    launcher: Launcher | None


def plain_spans(batch: SpanBatch, trace_ids: Column, left_out: Column | None = None) -> Iterator[PlainSpan]:
    """Yield the spans of *batch* in the order of its rows.

    Args:
        batch: The spans.
        trace_ids: For each row its trace's id, shape (n, 16), uint8.
        left_out: For each row, how many spans of its rank's step were left out (0: says nothing).
    """
    launcher = launcher_of(batch.process)
    rows, wall = batch.rows, np.uint64(batch.wall & 0xFFFF_FFFF_FFFF_FFFF)
    return map(
        PlainSpan,
        _constants(batch),
        np.ascontiguousarray(trace_ids).view("V16")[:, 0].tolist(),
        rows["span_id"].tolist(),
        rows["parent_id"].tolist(),
        (rows["start"].view(np.uint64) + wall).tolist(),
        (rows["end"].view(np.uint64) + wall).tolist(),
        _own_attributes(batch, left_out),
        [launcher if is_root else None for is_root in batch.is_root.tolist()],
    )


def clean_values(attributes: dict[str, Value]) -> dict[str, Value]:
    """Return *attributes* with clean names and texts."""
    return {clean(name): clean(value) if isinstance(value, str) else value for name, value in attributes.items()}


# -- what is constant ---------------------------------------------------------------------------


def _constants(batch: SpanBatch) -> Iterator[Constant]:
    rows = batch.rows
    columns = (
        rows["descriptor"],
        np.minimum(rows["source"], s.Source.BOUND),
        rows["flags"] & KNOWN_FLAGS | np.where(rows["error"] > 0, s.Flag.ERROR, 0),
        rows["error"],
    )
    known: dict[tuple[int, int, int, int], Constant] = {}
    for row, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        if key not in known:
            _, source, flags, error = key
            known[key] = _constant(batch.descriptor_of(row), source, flags, *batch.errors[error])
        yield known[key]


@lru_cache(maxsize=MAX_DESCRIPTORS)
def _constant(d: Descriptor, source: int, flags: int, error_type: str, message: str) -> Constant:
    return Constant(
        name=clean(d.name),
        attributes=clean_values(constant_attributes(d, source, flags, error_type)),
        under_root=(d.kind, d.name) == (s.STEP, s.RANK_STEP),
        failed=bool(flags & s.Flag.ERROR),
        message=clean(message) if flags & s.Flag.ERROR else "",
    )


# -- what varies --------------------------------------------------------------------------------


def _own_attributes(batch: SpanBatch, left_out: Column | None) -> Iterator[dict[str, int | str]]:
    """Yield for each row the attributes that its columns give it; rows that carry the same ones share their list."""
    present = np.zeros(len(batch), np.int64)
    columns: list[tuple[str, list[int] | list[str]]] = []
    for name, values, mask in number_columns(batch, left_out):
        if mask.any():
            present |= mask.astype(np.int64) << len(columns)
            columns.append((name, values.tolist()))
    operations = collective_ids(batch)
    present |= (operations != 0).astype(np.int64) << len(columns)
    columns.append((s.DL_COMM_COLLECTIVE_ID, [f"{number:016x}" for number in operations.tolist()]))
    carried = {
        bits: [column for i, column in enumerate(columns) if bits >> i & 1] for bits in np.unique(present).tolist()
    }
    for row, bits in enumerate(present.tolist()):
        yield {name: values[row] for name, values in carried[bits]}

"""SpanBatch: the column layout that drain, exporters, formats and analyses share."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from otel_dltrace.model import semconv
from otel_dltrace.model.identity import NO_STEP, Bind, rank_step_id, span_id
from otel_dltrace.model.operation import OTHER, Descriptor
from otel_dltrace.model.time import Anchor

Column = npt.NDArray[Any]

SPAN_DTYPE = np.dtype(
    [
        ("start", "<i8"),  # ns, CLOCK_MONOTONIC of the host
        ("end", "<i8"),
        ("size", "<u8"),  # bytes; total ns of a stage; user's number of a step
        ("span_id", "<u8"),
        ("parent_id", "<u8"),  # 0: none
        ("step", "<u4"),  # NO_STEP: outside any step
        ("span_no", "<u4"),
        ("parent_no", "<u4"),
        ("descriptor", "<u4"),  # index into the descriptor table
        ("seq", "<u4"),  # group's sequence number (0: not known), occurrence, n-th
        ("a", "<i4"),
        ("b", "<i4"),
        ("error", "<u4"),  # index into errors, 0: none
        ("partition", "<u2"),
        ("flags", "<u2"),
        ("level", "u1"),
        ("source", "u1"),
    ]
)


_KINDS = {
    kind: number
    for number, kind in enumerate(
        (semconv.STEP, semconv.STAGE, semconv.COLLECTIVE, semconv.P2P, semconv.PHASE, semconv.TICK, semconv.METRIC), 1
    )
}


@dataclass(frozen=True)
class Process:
    """Who wrote a batch, where, and how its clock maps to wall time."""

    nonce: int
    bind: Bind | None
    host: str = "localhost"
    boot_id: str = ""
    pid: int = 0
    anchor: Anchor = Anchor(0, 0, 0)
    resource: tuple[tuple[str, str | int], ...] = ()


@dataclass(frozen=True)
class SpanBatch:
    """Spans of one process: equal-length columns, the descriptor table, the process.

    *rows* is a structured array of ``SPAN_DTYPE``; times are the host's monotonic ns.
    *errors* holds (type, message), its first entry is ("", "").
    """

    rows: Column
    descriptors: Sequence[Descriptor]
    process: Process
    errors: Sequence[tuple[str, str]] = field(default=(("", ""),))

    def __len__(self) -> int:
        """Return the number of spans."""
        return len(self.rows)

    def __getitem__(self, column: str) -> Column:
        """Return one column, shape (n,)."""
        return self.rows[column]

    def take(self, which: Any) -> "SpanBatch":
        """Return the rows that *which* (a mask, a slice or indices) selects."""
        return replace(self, rows=self.rows[which])

    @property
    def rank(self) -> int:
        """The rank that wrote the batch, -1 while unbound."""
        return self.process.bind.rank if self.process.bind else -1

    @property
    def wall(self) -> int:
        """What to add to a time to get Unix ns."""
        return self.process.anchor.offset

    def lookup(self, value: Callable[[Descriptor], Any], dtype: Any) -> Column:
        """Return *value* of each row's descriptor as a column, shape (n,)."""
        table = np.array([value(d) for d in (*self.descriptors, OTHER)], dtype=dtype)
        column: Column = table[np.minimum(self.rows["descriptor"], len(self.descriptors))]
        return column

    @cached_property
    def _kinds(self) -> Column:
        """The kind of each row as a number; every exporter asks several times."""
        return self.lookup(lambda d: _KINDS.get(d.kind, 0), np.uint8)

    def is_kind(self, *kinds: str) -> Column:
        """Return a mask, shape (n,), of the rows whose descriptor is of one of *kinds*."""
        mask: Column = self._kinds == _KINDS[kinds[0]]
        for kind in kinds[1:]:
            mask = mask | (self._kinds == _KINDS[kind])
        return mask

    def descriptor_of(self, row: int) -> Descriptor:
        """Return the descriptor of one row."""
        number = int(self.rows["descriptor"][row])
        return self.descriptors[number] if number < len(self.descriptors) else OTHER


def empty_rows(n: int = 0) -> Column:
    """Return *n* rows of zeros."""
    return np.zeros(n, SPAN_DTYPE)


def stack_rows(parts: Iterable[Any]) -> Column:
    """Return arrays of rows, and single rows, as one array; numpy's own way reads the dtype anew for each part."""
    return np.frombuffer(bytearray(b"".join([part.tobytes() for part in parts])), SPAN_DTYPE)


def concatenate(batches: Iterable[SpanBatch]) -> SpanBatch | None:
    """Return the batches of one process as one; the longest descriptor table wins, since tables only grow."""
    parts = list(batches)
    if not parts:
        return None
    errors: list[tuple[str, str]] = [("", "")]
    shifted = []
    for part in parts:
        rows = part.rows
        if len(part.errors) > 1:
            rows = rows.copy()
            rows["error"] = np.where(rows["error"] > 0, rows["error"] + len(errors) - 1, 0)
            errors.extend(part.errors[1:])
        shifted.append(rows)
    longest = max(parts, key=lambda p: len(p.descriptors))
    return SpanBatch(stack_rows(shifted), longest.descriptors, parts[-1].process, tuple(errors))


def fill_ids(rows: Column, descriptors: Sequence[Descriptor], process: Process) -> None:
    """Compute ``span_id`` and ``parent_id`` of *rows* in place, from their ordinals (contract 1).

    A step's id is the hash that all ranks can compute; a row without a parent of its own hangs
    under its step, and under nothing outside any step.
    """
    step = rows["step"].astype(np.uint64)
    nonce = np.uint64(process.nonce)
    rows["span_id"] = span_id(nonce, step, rows["span_no"].astype(np.uint64))
    parent = span_id(nonce, step, rows["parent_no"].astype(np.uint64))
    rows["parent_id"] = np.where(rows["parent_no"] > 0, parent, np.uint64(0))
    if process.bind is None:
        return
    table = np.array([d.kind == semconv.STEP for d in (*descriptors, OTHER)])
    is_step = table[np.minimum(rows["descriptor"], len(descriptors))]
    steps, inverse = np.unique(rows["step"], return_inverse=True)
    ids = np.array([0 if s == NO_STEP else rank_step_id(process.bind, int(s)) for s in steps], np.uint64)
    of_row = ids[inverse]
    rows["span_id"] = np.where(is_step, of_row, rows["span_id"])
    rows["parent_id"] = np.where(~is_step & (rows["parent_no"] == 0), of_row, rows["parent_id"])
    rows["parent_id"] = np.where(is_step, np.uint64(0), rows["parent_id"])

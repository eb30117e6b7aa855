"""SpanBatch: the column layout that drain, exporters, formats and analyses share."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from otel_dltrace.model import semconv
from otel_dltrace.model.arrays import Column, distinct
from otel_dltrace.model.descriptors import KIND_NUMBERS, Descriptors
from otel_dltrace.model.identity import NO_STEP, Bind, own_generation, rank_step_ids, span_id
from otel_dltrace.model.operation import OTHER, Descriptor
from otel_dltrace.model.time import Anchor

# The ring's records (contract 2) have the same fields at the same places, so that their 64 bytes copied are the
# beginning of a row; level and source take the place of kind and level_source, error that of the commit.
# Aligned, since numpy is twice as fast then.
SPAN_DTYPE = np.dtype(
    [
        ("span_no", "<u4"),
        ("step", "<u4"),  # NO_STEP: outside any step
        ("descriptor", "<u4"),  # index into the descriptor table
        ("level", "u1"),
        ("source", "u1"),
        ("flags", "<u2"),
        ("start", "<i8"),  # ns, CLOCK_MONOTONIC of the host
        ("end", "<i8"),
        ("size", "<u8"),  # bytes; total ns of a stage; user's number of a step
        ("parent_no", "<u4"),
        ("seq", "<u4"),  # group's sequence number (0: not known), occurrence, n-th
        ("a", "<i4"),
        ("b", "<i4"),
        ("partition", "<u2"),
        ("error", "<u4"),  # index into errors, 0: none
        ("span_id", "<u8"),
        ("parent_id", "<u8"),  # 0: none
    ],
    align=True,
)
"""A row. Choose rows with `take` and `compress`, which copy them whole; numpy's indexing goes field by field."""
_REMOTE = np.uint16(semconv.Flag.REMOTE)
_WHOLE = np.dtype((np.void, SPAN_DTYPE.itemsize))


def empty_rows(n: int = 0) -> Column:
    """Return *n* rows of zeros."""
    return np.zeros(n, SPAN_DTYPE)


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

    @property
    def owns_roots(self) -> bool:
        """Whether steps' roots are in its name: worker rank 0's, and any worker's that has the generation to itself."""
        if self.bind is None or self.bind.role != "worker":
            return False
        generation, nonce = self.bind.generation, self.nonce.to_bytes(8, "little").hex()
        return self.bind.rank == 0 or generation == own_generation(generation, nonce)


@dataclass(frozen=True)
class SpanBatch:
    """Spans of one process: equal-length columns, the descriptor table, the process.

    *rows* is a structured array of ``SPAN_DTYPE``; times are the host's monotonic ns.
    *errors* holds (type, message), its first entry is ("", ""). *above* are rows that are not of the
    batch and that those of its rows which are outside any step may hang under.
    """

    rows: Column
    descriptors: Sequence[Descriptor]
    process: Process
    errors: Sequence[tuple[str, str]] = field(default=(("", ""),))
    above: Column = field(default_factory=empty_rows)

    def __len__(self) -> int:
        """Return the number of spans."""
        return len(self.rows)

    def __getitem__(self, column: str) -> Column:
        """Return one column, shape (n,)."""
        return self.rows[column]

    def take(self, which: Any) -> "SpanBatch":
        """Return the rows that *which* (a mask, a slice or indices) selects."""
        return replace(self, rows=self.rows.view(_WHOLE)[which].view(SPAN_DTYPE))

    def in_steps(self, steps: Container[int]) -> "SpanBatch":
        """Return the rows that are of *steps*, anything with ``in``, such as a ``Window``."""
        known = np.unique(self.rows["step"]).tolist()
        wanted = [step for step in known if step != NO_STEP and step in steps]
        return self if wanted == known else self.take(np.isin(self.rows["step"], wanted))

    @property
    def rank(self) -> int:
        """The rank that wrote the batch, -1 while unbound."""
        return self.process.bind.rank if self.process.bind else -1

    @property
    def wall(self) -> int:
        """What to add to a time to get Unix ns."""
        return self.process.anchor.offset

    @cached_property
    def table(self) -> Descriptors:
        """The descriptor table, with columns of it."""
        return Descriptors.of(self.descriptors)

    def lookup(self, value: Callable[[Descriptor], Any], dtype: Any) -> Column:
        """Return *value* of each row's descriptor as a column, shape (n,)."""
        return self.table.column(value, dtype).take(self.numbers)

    @cached_property
    def numbers(self) -> Column:
        """Where each row has its value in such a column, shape (n,)."""
        return self.table.numbers(self.rows)

    @cached_property
    def _kinds(self) -> Column:
        """The kind of each row as a number; every exporter asks several times."""
        return self.table.kinds.take(self.numbers)

    @property
    def keys(self) -> Column:
        """The declared key of each row's descriptor, -1 for none, shape (n,), int64."""
        return self.table.keys.take(self.numbers)

    @property
    def is_rank_step(self) -> Column:
        """A mask, shape (n,), of the rows that are a rank's own step."""
        return self.table.rank_steps.take(self.numbers)

    @property
    def is_request(self) -> Column:
        """A mask, shape (n,), of the rows that are pushes and pulls, as a parameter server answers them."""
        return self.table.requests.take(self.numbers)

    @property
    def is_root(self) -> Column:
        """A mask, shape (n,), of the rows that are a step of the whole job: its trace's root."""
        return self.table.roots.take(self.numbers)

    @property
    def is_block(self) -> Column:
        """A mask, shape (n,), of the rows that are phases which the program marks itself."""
        return self.table.blocks.take(self.numbers)

    @property
    def is_wait(self) -> Column:
        """A mask, shape (n,), of the rows that are the time for which a program waits for an operation."""
        return self.table.waits.take(self.numbers)

    @property
    def is_bucket(self) -> Column:
        """A mask, shape (n,), of the rows that are buckets of gradients, which DDP reduces."""
        return self.table.buckets.take(self.numbers)

    @property
    def is_pause(self) -> Column:
        """A mask, shape (n,), of the rows that are garbage collections."""
        return self.table.pauses.take(self.numbers)

    def is_kind(self, *kinds: str) -> Column:
        """Return a mask, shape (n,), of the rows whose descriptor is of one of *kinds*."""
        mask: Column = self._kinds == KIND_NUMBERS[kinds[0]]
        for kind in kinds[1:]:
            mask = mask | (self._kinds == KIND_NUMBERS[kind])
        return mask

    def descriptor_of(self, row: int) -> Descriptor:
        """Return the descriptor of one row."""
        number = int(self.rows["descriptor"][row])
        return self.descriptors[number] if number < len(self.descriptors) else OTHER


def stack_rows(parts: Iterable[Column]) -> Column:
    """Return arrays of rows as one that is nobody else's."""
    buffers: list[Any] = [np.ascontiguousarray(part) for part in parts]
    return np.frombuffer(bytearray().join(buffers), SPAN_DTYPE)


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


def fill_ids(rows: Column, descriptors: Sequence[Descriptor], process: Process) -> Column:
    """Compute ``span_id`` and ``parent_id`` of *rows* in place, from their ordinals (contract 1).

    A step's id is the hash that all ranks can compute; a row without a parent of its own hangs
    under its step, and under nothing outside any step. A parent in another process stays as it is.

    Returns:
        A mask of the steps among *rows*.
    """
    is_step = Descriptors.of(descriptors).is_kind(rows, semconv.STEP)
    if not len(rows):
        return is_step
    is_remote = rows["flags"] & _REMOTE != 0
    remote = rows["parent_id"][is_remote]
    numbers = np.empty((2, len(rows)), np.uint64)
    numbers[0], numbers[1] = rows["span_no"], rows["parent_no"]
    under_step = numbers[1] == 0
    under_step &= ~is_remote
    ids = span_id(np.uint64(process.nonce), rows["step"].astype(np.uint64), numbers)
    rows["span_id"], parents = ids
    parents[under_step] = 0
    parents[is_remote] = remote
    rows["parent_id"] = parents
    if process.bind is None:
        return is_step
    which = (is_step | under_step).nonzero()[0]
    steps, of_which = distinct(rows["step"][which])
    of_row = np.array(_rank_step_ids(process.bind, steps.tolist()), np.uint64)[of_which]
    rows["parent_id"][which] = of_row
    rows["span_id"][is_step] = of_row[is_step[which]]
    rows["parent_id"][is_step] = 0
    return is_step


def _rank_step_ids(bind: Bind, steps: list[int]) -> list[int]:
    return [0 if step == NO_STEP else hashed for step, hashed in zip(steps, rank_step_ids(bind, steps), strict=True)]

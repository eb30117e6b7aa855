"""Columns of a descriptor table: what a row's descriptor says, for all rows at once."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np

from otel_dltrace.model import semconv
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.operation import OTHER, Descriptor

KIND_NUMBERS = {
    kind: number
    for number, kind in enumerate(
        (semconv.STEP, semconv.STAGE, semconv.COLLECTIVE, semconv.P2P, semconv.PHASE, semconv.TICK, semconv.METRIC), 1
    )
}


@dataclass(frozen=True, eq=False)
class Descriptors(Sequence[Descriptor]):
    """A descriptor table and columns of it, each made once; in these `OTHER` comes last, for numbers not known."""

    table: tuple[Descriptor, ...]

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.table)

    @overload
    def __getitem__(self, number: int) -> Descriptor: ...
    @overload
    def __getitem__(self, number: slice) -> tuple[Descriptor, ...]: ...
    def __getitem__(self, number: int | slice) -> Descriptor | tuple[Descriptor, ...]:
        """Return the descriptor *number*, or several."""
        return self.table[number]

    @classmethod
    def of(cls, table: Sequence[Descriptor]) -> "Descriptors":
        """Return *table*, which may be one already."""
        return table if type(table) is cls else cls(tuple(table))

    def column(self, value: Callable[[Descriptor], Any], dtype: Any) -> Column:
        """Return *value* of each, shape (len + 1,)."""
        return np.array([value(d) for d in (*self.table, OTHER)], dtype)

    @cached_property
    def kinds(self) -> Column:
        """The kinds as numbers, shape (len + 1,), uint8."""
        return self.column(lambda d: KIND_NUMBERS.get(d.kind, 0), np.uint8)

    @cached_property
    def keys(self) -> Column:
        """The declared keys, -1 for none, shape (len + 1,), int64."""
        return self.column(lambda d: d.key, np.int64)

    @cached_property
    def requests(self) -> Column:
        """Which are pushes and pulls that a parameter server answers, shape (len + 1,)."""
        return self.column(
            lambda d: d.kind == semconv.PHASE and d.name in (semconv.PUSH, semconv.PULL) and not d.queue_type, bool
        )

    @cached_property
    def waits(self) -> Column:
        """Which are the time for which a program waits for an operation, shape (len + 1,)."""
        return self.column(lambda d: (d.kind, d.name) == (semconv.PHASE, semconv.WAIT), bool)

    @cached_property
    def buckets(self) -> Column:
        """Which are buckets of gradients, shape (len + 1,)."""
        return self.column(lambda d: d.is_bucket, bool)

    @cached_property
    def pauses(self) -> Column:
        """Which are garbage collections, shape (len + 1,)."""
        return self.column(lambda d: (d.kind, d.name) == (semconv.PHASE, semconv.GC), bool)

    @cached_property
    def fetches(self) -> Column:
        """Which are the stage in which batches are fetched, shape (len + 1,)."""
        return self.column(lambda d: (d.kind, d.name) == (semconv.STAGE, semconv.DATALOADER_NEXT), bool)

    @cached_property
    def blocks(self) -> Column:
        """Which are phases that a program marks itself, shape (len + 1,)."""
        return self.column(lambda d: d == Descriptor(semconv.PHASE, d.name) != OTHER, bool)

    @cached_property
    def rank_steps(self) -> Column:
        """Which are a rank's own steps, shape (len + 1,)."""
        return self.column(lambda d: (d.kind, d.name) == (semconv.STEP, semconv.RANK_STEP), bool)

    @cached_property
    def roots(self) -> Column:
        """Which are the steps of a whole job, shape (len + 1,)."""
        return self.column(lambda d: (d.kind, d.name) == (semconv.STEP, semconv.TRAIN_STEP), bool)

    def is_kind(self, rows: Column, kind: str) -> Column:
        """Return a mask, shape (n,), of the *rows* whose descriptor is of *kind*."""
        mask: Column = self.kinds[self.numbers(rows)] == KIND_NUMBERS[kind]
        return mask

    def numbers(self, rows: Column) -> Column:
        """Return where in such a column each of *rows* has its value, shape (n,)."""
        places: Column = np.minimum(rows["descriptor"], len(self.table)).astype(np.intp)  # what numpy indexes with
        return places

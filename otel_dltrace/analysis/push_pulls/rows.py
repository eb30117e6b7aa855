"""The rows of push_pull, of workers and of servers, by what they are about."""

from collections.abc import Callable, Iterable

import numpy as np

from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch

US = 1000


def by_descriptor(batch: SpanBatch, which: Callable[[Descriptor], bool]) -> Iterable[tuple[Descriptor, Column]]:
    """Yield the descriptors that *which* picks, with their closed rows."""
    closed = batch.take((batch["flags"] & s.Flag.TRUNCATED == 0) & batch.lookup(which, bool)).rows
    closed = closed[np.argsort(closed["descriptor"], kind="stable")]
    numbers, begins = np.unique(closed["descriptor"], return_index=True)
    for number, rows in zip(numbers.tolist(), np.split(closed, begins[1:]), strict=False):
        yield batch.descriptors[number], rows


def grouped(rows: Column, name: str) -> dict[int, Column]:
    """Return *rows* by the value of their column *name*, in their order."""
    rows = rows[np.argsort(rows[name], kind="stable")]
    values, begins = np.unique(rows[name], return_index=True)
    return dict(zip(values.tolist(), np.split(rows, begins[1:]), strict=False))

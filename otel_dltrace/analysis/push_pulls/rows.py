"""The rows of push_pull, of workers and of servers, by what they are about."""

from collections.abc import Callable, Iterable

from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, grouped
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch

US = 1000


def by_descriptor(batch: SpanBatch, which: Callable[[Descriptor], bool]) -> Iterable[tuple[Descriptor, Column]]:
    """Yield the descriptors that *which* picks, with their closed rows."""
    closed = batch.take((batch["flags"] & s.Flag.TRUNCATED == 0) & batch.lookup(which, bool)).rows
    for number, rows in grouped(closed["descriptor"], closed):
        yield batch.descriptors[number], rows

"""Several processes' spans as one batch, so that one pass of numpy encodes them all."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from otel_dltrace.model.arrays import Column
from otel_dltrace.model.descriptors import Descriptors
from otel_dltrace.model.operation import MAX_DESCRIPTORS, Descriptor
from otel_dltrace.model.spans import Process, SpanBatch


class Merger:
    """Merges batches; ranks of one job have mostly the same descriptors, so it remembers how theirs are numbered."""

    def __init__(self) -> None:
        self._numbers: dict[Descriptor, int] = {}
        self._table = Descriptors(())
        self._renumbered = lru_cache(maxsize=256)(self._renumber)

    def merge(self, batches: Sequence[SpanBatch], rows: Column) -> SpanBatch:
        """Return *rows*, those of *batches* one after the other, with times in Unix ns, as of no process; in place."""
        if len(self._numbers) > MAX_DESCRIPTORS:  # those of processes that are gone, too
            self._numbers.clear()
            self._renumbered.cache_clear()
            self._table = Descriptors(())
        errors: list[tuple[str, str]] = [("", "")]
        end = 0
        for batch in batches:
            begin, end = end, end + len(batch)
            part = rows[begin:end]
            part["descriptor"] = self._renumbered(batch.table)[batch.numbers]
            wall = np.uint64(batch.wall & 0xFFFF_FFFF_FFFF_FFFF)
            for name in ("start", "end"):
                part[name] = part[name].view(np.uint64) + wall
            if len(batch.errors) > 1:
                part["error"] += np.where(part["error"] > 0, np.uint32(len(errors) - 1), np.uint32(0))
                errors += batch.errors[1:]
        if len(self._table) != len(self._numbers):
            self._table = Descriptors(tuple(self._numbers))
        return SpanBatch(rows, self._table, Process(0, None), errors)

    def _renumber(self, table: Descriptors) -> Column:
        """Return for each of *table*, and for those that are not in it, its number here."""
        return table.column(lambda d: self._numbers.setdefault(d, len(self._numbers)), np.uint32)

"""Whether ranks that live stand still: what they have open may just be what they are at."""

from collections.abc import Sequence

import numpy as np

from otel_dltrace.model.arrays import Column
from otel_dltrace.model.semconv import Flag
from otel_dltrace.model.spans import SpanBatch

_TIMES = 2
"""So many times as long as the median step is nothing unusual."""


def is_open(rows: Column) -> Column:
    """Return which of *rows* their process, which lives, is still in, shape (n,)."""
    mask: Column = rows["flags"] & Flag.OPEN != 0
    return mask


def without_usual(batches: Sequence[SpanBatch]) -> list[SpanBatch]:
    """Return *batches* without what is open, if no rank has been in it for longer than two steps take.

    Where there are steps an asynchronous operation may be open for any time: who waits for it stands in a step.
    """
    over = np.concatenate([np.zeros(0, np.int64), *map(_steps, batches)])
    usual = _TIMES * float(np.median(over)) if len(over) else 0.0
    apart = Flag.ASYNC if len(over) else 0
    longest = max((int(_ages(batch, apart).max(initial=0)) for batch in batches), default=0)
    return [batch if longest > usual else batch.take(~is_open(batch.rows)) for batch in batches]


def _steps(batch: SpanBatch) -> Column:
    return _lengths(batch.rows[batch.is_rank_step & (batch["flags"] & Flag.TRUNCATED == 0)])


def _ages(batch: SpanBatch, apart: int) -> Column:
    return _lengths(batch.rows[is_open(batch.rows) & (batch["flags"] & apart == 0)])


def _lengths(rows: Column) -> Column:
    lengths: Column = rows["end"].astype(np.int64) - rows["start"].astype(np.int64)
    return lengths

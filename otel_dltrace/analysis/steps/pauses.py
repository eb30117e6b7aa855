"""When garbage collection held each rank's interpreter."""

from collections.abc import Sequence

import numpy as np

from otel_dltrace.analysis.steps.table import worker_batches
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.spans import SpanBatch


def pauses(batches: Sequence[SpanBatch]) -> dict[int, Column]:
    """Return each rank's collections, shape (n, 2), in ns of its host's clock."""
    found: dict[int, list[Column]] = {}
    for batch in worker_batches(batches):
        held = batch.rows[batch.is_pause]
        found.setdefault(batch.rank, []).append(np.stack((held["start"], held["end"]), axis=1))
    return {rank: np.concatenate(parts) for rank, parts in found.items()}

"""When each rank was ready for an operation of Horovod, as the rank itself saw it: when it called.

Horovod's own ready ticks are what rank 0 saw, once in a cycle, and are not there once its cache answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.collectives import join
from otel_dltrace.model import activities as h
from otel_dltrace.model.spans import Column, SpanBatch

READY = np.dtype([(name, "i8") for name in ("group", "rank", "at", "late")])
"""A rank is ready for operation *group*, counted from 0, at *at*, ns; *late* after the one before it, if it is last."""
_UNTOLD = tuple(name.lower() for name in h.UNCUT)


@dataclass(frozen=True)
class Called:
    """Ready ranks, sorted by operation and time; of each of g operations its tensor, name and how long it was waited.

    *waited*, shape (g,), is from the first rank that was ready to the last, ns.
    """

    ready: Column
    tensors: tuple[str, ...]
    names: tuple[str, ...]
    waited: Column


def called(workers: Sequence[SpanBatch]) -> Called:
    """Return who was ready when for each operation on a tensor that is known on all ranks of its process set."""
    joined = join(workers)
    is_ours = [d.backend == h.BACKEND and d.name not in _UNTOLD for d in joined.descriptors]
    joined = joined.take(np.array(is_ours, bool))
    ready = np.zeros(len(joined.rows), READY)
    ready["group"] = joined.to_rows(np.arange(len(joined)))
    ready["rank"], ready["at"] = joined["rank"], joined["start"]
    ready = ready[np.lexsort((ready["at"], ready["group"]))]
    first, last = joined.begins[:-1], joined.begins[1:] - 1
    late = ready["at"][last] - ready["at"][last - 1]
    ready["late"][last] = np.where(late > joined.uncertainty, late, 0)
    tensors, names = (tuple(getattr(d, name) for d in joined.descriptors) for name in ("tensor", "name"))
    return Called(ready, tensors, names, ready["at"][last] - ready["at"][first])

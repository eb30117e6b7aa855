"""When each rank was ready for an operation of Horovod, or else of MPI, as the rank itself saw it: when it called.

Horovod's own ready ticks are what rank 0 saw, once in a cycle, and are not there once its cache answers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.collectives.joined import Joined, join
from otel_dltrace.analysis.collectives.waits import widen
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch

READY = np.dtype([(name, "i8") for name in ("group", "rank", "at", "late")])
"""A rank is ready for operation *group*, counted from 0, at *at*, ns; *late* after the one before it, if it is last."""
_JOIN = h.JOIN.lower()


@dataclass(frozen=True)
class Called:
    """Ready ranks, sorted by operation and time; of each of g operations its tensor, name and how long it was waited.

    *waited*, shape (g,), is from the first rank that was ready to the last, ns. *joined* are the operations, of
    *backend* alone; those of MPI have no tensor, and are told by their communicator.
    """

    ready: Column
    tensors: tuple[str, ...]
    names: tuple[str, ...]
    waited: Column
    joined: Joined
    backend: str


def is_mpi(d: Descriptor) -> bool:
    """Return whether *d* is a communication of MPI; its begin and end are none."""
    return d.backend == s.MPI and d.kind in (s.COLLECTIVE, s.P2P) and d.name not in s.MPI_SETUP


def is_horovod(d: Descriptor) -> bool:
    """Return whether *d* is an operation of Horovod on a tensor, as a rank itself tells it."""
    return d.backend == h.BACKEND and d.kind == s.COLLECTIVE and d.name != _JOIN


def called(workers: Sequence[SpanBatch]) -> Called:
    """Return who was ready when for each operation that is known on all ranks of its process set."""
    everything = widen(join(workers))
    is_horovods = [is_horovod(d) for d in everything.descriptors]
    is_ours = is_horovods if any(is_horovods) else [is_mpi(d) for d in everything.descriptors]
    joined = everything.take(np.array(is_ours, bool))
    ready = np.zeros(len(joined.rows), READY)
    ready["group"] = joined.to_rows(np.arange(len(joined)))
    ready["rank"], ready["at"] = joined["rank"], joined["start"]
    ready = ready[np.lexsort((ready["at"], ready["group"]))]
    first, last = joined.begins[:-1], joined.begins[1:] - 1
    late = ready["at"][last] - ready["at"][last - 1]
    ready["late"][last] = np.where(late > joined.uncertainty, late, 0)
    tensors = tuple(d.tensor or f"{d.name} {d.group}".rstrip() for d in joined.descriptors)
    names = tuple(d.name for d in joined.descriptors)
    backend = joined.descriptors[0].backend if joined.descriptors else ""
    return Called(ready, tensors, names, ready["at"][last] - ready["at"][first], joined, backend)

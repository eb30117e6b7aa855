"""Which spans are drawn on lanes of their tensor, as the timelines that users know draw them.

Push_pulls as in BytePS's: a lane for each tensor, below it one for each partition. Horovod's operations as in its own:
a lane for each tensor, with the negotiation, its ready ticks, and the activities.
"""

import numpy as np

from otel_dltrace.export.chrome.lanes import TOTAL, Lanes
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch


def move_tensors(batch: SpanBatch, lanes: Lanes, family: Column) -> None:
    """Give what is drawn by tensor families of its own, in place; *family* has shape (n,)."""
    _move_push_pulls(batch, lanes, family)
    _move_horovod(batch, lanes, family)


def _move_push_pulls(batch: SpanBatch, lanes: Lanes, family: Column) -> None:
    is_total = batch.lookup(_is_push_pull, bool)
    is_part = batch.lookup(is_stage, bool) & (batch["level"] == s.Level.PARTITION)
    rows = np.flatnonzero(is_total | is_part)
    partition = np.where(is_total[rows], TOTAL, batch["partition"][rows].astype(np.int64))
    pairs, which = np.unique(batch["descriptor"][rows].astype(np.int64) << 17 | partition + 1, return_inverse=True)
    about = [(batch.descriptors[pair >> 17], (pair & 0x1FFFF) - 1) for pair in pairs.tolist()]
    for d, part in sorted(about, key=lambda one: (one[0].key < 0, one[0].key, one[1])):
        lanes.push_pull(d.tensor, d.key, part)  # new ones in this order: some viewers show lanes by thread id
    numbers = [lanes.push_pull(d.tensor, d.key, part) for d, part in about]
    family[rows] = np.array(numbers, np.int64)[which]


def _move_horovod(batch: SpanBatch, lanes: Lanes, family: Column) -> None:
    rows = np.flatnonzero(batch.lookup(_is_horovod, bool))
    known, firsts, which = np.unique(batch["descriptor"][rows], return_index=True, return_inverse=True)
    numbers = family[rows[firsts]]
    for i in np.argsort(batch["start"][rows[firsts]], kind="stable").tolist():
        of_tensor = lanes.horovod(batch.descriptors[int(known[i])].tensor)
        numbers[i] = numbers[i] if of_tensor is None else of_tensor
    family[rows] = numbers[which]


def _is_push_pull(d: Descriptor) -> bool:
    return d.kind == s.COLLECTIVE and d.name == s.PUSH_PULL


def is_stage(d: Descriptor) -> bool:
    """Return whether *d* is a stage of a push_pull; at partition level it is that of one partition."""
    return d.kind == s.PHASE and bool(d.queue_type) and bool(d.backend)


def _is_horovod(d: Descriptor) -> bool:
    return d.backend == h.BACKEND and bool(d.tensor)

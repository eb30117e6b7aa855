"""How much of the communication computation hides: |union(comm) and union(comp)| / |union(comm)|.

A rank that is blocked in a call or a wait computes nothing, also within a stage: `DistributedOptimizer` waits for its
gradients in the optimizer's step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.negotiation.shares import TIMES, covered, in_steps
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, grouped
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch

COMPUTATION = (s.FORWARD, s.BACKWARD, s.OPTIMIZER)
STAGES, UNBLOCKED = "stages", "unblocked"


@dataclass(frozen=True, slots=True)
class Overlap:
    """ns, summed over the ranks: in *communication* an operation ran, in *overlapped* of it computation did as well.

    Computation is what a rank does while no operation blocks it: by *of* in forward, backward and optimizer
    (``stages``), or, where none of them is recorded, from its first operation to its last (``unblocked``).
    """

    communication: int
    computation: int
    overlapped: int
    of: str = STAGES


def overlap_with_stages(operated: Column, workers: Sequence[SpanBatch]) -> Overlap | None:
    """Return how much of *operated* (`TIMES`) the stages of its ranks hide; None where no stage is recorded.

    Nor where waits are not, at level ``collective``: then nobody knows when the rank computed.
    """
    computing, blocked = np.zeros(0, TIMES), np.zeros(0, TIMES)
    for batch in workers:
        if (operated["rank"] == batch.rank).any():
            if not _tells_waits(batch):
                return None
            stages = batch.lookup(lambda d: d.kind == s.STAGE and d.name in COMPUTATION, bool)
            computing = np.concatenate((computing, _times(batch, stages)))
            blocked = np.concatenate((blocked, _times(batch, _blocks(batch, _communicates))))
    if not len(computing):
        return None
    operated = in_steps(operated)
    idle = covered(blocked)
    computation = covered(computing, blocked) - idle
    beside = computation + covered(operated, blocked) - covered(operated, computing, blocked)
    return Overlap(covered(operated), computation, beside)


def overlap_unblocked(workers: Sequence[SpanBatch], which: Callable[[Descriptor], bool]) -> Overlap | None:
    """Return how much of the operations that *which* picks goes on while their rank is not blocked; None without."""
    operated, blocked = np.zeros(0, TIMES), np.zeros(0, TIMES)
    for batch in workers:
        if not _tells_waits(batch):
            return None
        operated = np.concatenate((operated, _times(batch, batch.lookup(which, bool) & _ends(batch))))
        blocked = np.concatenate((blocked, _times(batch, _blocks(batch, which))))
    if not len(operated):
        return None
    operated = in_steps(operated)
    extents = np.zeros(0, TIMES)
    for rank, mine in grouped(operated["rank"], operated):
        extents = np.append(extents, np.array([(rank, 0, mine["start"].min(), mine["end"].max())], TIMES))
    idle = covered(blocked)
    beside = covered(operated, blocked) - idle
    return Overlap(covered(operated), covered(extents, blocked) - idle, beside, UNBLOCKED)


def _communicates(d: Descriptor) -> bool:
    return d.kind in (s.COLLECTIVE, s.P2P)


def _ends(batch: SpanBatch) -> Column:
    """Return which rows have an end that is known."""
    is_known: Column = batch["source"] != s.Source.HOST_ISSUE
    return is_known


def _tells_waits(batch: SpanBatch) -> bool:
    """Return whether it is known when the rank waited for what it was waiting for."""
    waited_for = (batch["flags"] & s.Flag.ASYNC != 0) & (batch["source"] == s.Source.HOST_DONE)
    return bool(batch.is_wait.any() or not (waited_for & batch.is_kind(s.COLLECTIVE, s.P2P)).any())


def _blocks(batch: SpanBatch, which: Callable[[Descriptor], bool]) -> Column:
    """Return which rows block their rank: waits, and operations that *which* picks, if not asynchronous."""
    blocks: Column = batch.is_wait | (batch.lookup(which, bool) & _ends(batch) & (batch["flags"] & s.Flag.ASYNC == 0))
    return blocks


def _times(batch: SpanBatch, which: Column) -> Column:
    rows = batch.rows[which & (batch["flags"] & s.Flag.TRUNCATED == 0)]
    times = np.zeros(len(rows), TIMES)
    times["rank"], times["step"] = batch.rank, rows["step"]
    times["start"], times["end"] = rows["start"] + np.int64(batch.wall), rows["end"] + np.int64(batch.wall)
    return times

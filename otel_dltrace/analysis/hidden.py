"""How much of the communication computation hides (spec: analyses C): |union(comm) and union(comp)| / |union(comm)|."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.shares import TIMES, covered
from otel_dltrace.model import semconv as s
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import Column, SpanBatch

COMPUTATION = (s.FORWARD, s.BACKWARD, s.OPTIMIZER)
STAGES, UNBLOCKED = "stages", "unblocked"


@dataclass(frozen=True, slots=True)
class Overlap:
    """ns, summed over the ranks: in *communication* an operation ran, in *overlapped* of it computation did as well.

    Computation is by *of* forward, backward and optimizer (``stages``), or, where none of them is recorded, all that
    a rank does from its first operation to its last while none blocks it (``unblocked``).
    """

    communication: int
    computation: int
    overlapped: int
    of: str = STAGES


def overlap_with_stages(operated: Column, workers: Sequence[SpanBatch]) -> Overlap | None:
    """Return how much of *operated* (`TIMES`) the stages of its ranks cover; None where no stage is recorded."""
    ranks = set(operated["rank"].tolist())
    parts = [
        _times(batch, batch.lookup(lambda d: d.kind == s.STAGE and d.name in COMPUTATION, bool))
        for batch in workers
        if batch.rank in ranks
    ]
    computing = np.concatenate([np.zeros(0, TIMES), *parts])
    if not len(computing):
        return None
    communication, computation = covered(operated), covered(computing)
    return Overlap(communication, computation, communication + computation - covered(operated, computing))


def overlap_unblocked(workers: Sequence[SpanBatch], which: Callable[[Descriptor], bool]) -> Overlap | None:
    """Return how much of the operations that *which* picks goes on while their rank is not blocked; None without."""
    operated, blocked = np.zeros(0, TIMES), np.zeros(0, TIMES)
    for batch in workers:
        operations = batch.lookup(which, bool) & (batch["source"] != s.Source.HOST_ISSUE)  # whose end is unknown
        waits = batch.lookup(lambda d: d.kind == s.PHASE and d.name == s.WAIT, bool)
        operated = np.concatenate((operated, _times(batch, operations)))
        is_blocking = operations & (batch["flags"] & s.Flag.ASYNC == 0)
        blocked = np.concatenate((blocked, _times(batch, is_blocking | waits)))
    if not len(operated):
        return None
    extent = sum(
        int(mine["end"].max() - mine["start"].min())
        for rank in np.unique(operated["rank"])
        for mine in [operated[operated["rank"] == rank]]
    )
    during = covered(blocked) + covered(operated) - covered(blocked, operated)
    return Overlap(covered(operated), max(0, extent - during), covered(operated) - during, UNBLOCKED)


def _times(batch: SpanBatch, which: Column) -> Column:
    rows = batch.rows[which & (batch["flags"] & s.Flag.TRUNCATED == 0)]
    times = np.zeros(len(rows), TIMES)
    times["rank"], times["step"] = batch.rank, rows["step"]
    times["start"], times["end"] = rows["start"] + np.int64(batch.wall), rows["end"] + np.int64(batch.wall)
    return times

"""How often each operation ran, how much it moved and how long it took; skew = max b_r - min b_r."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.collectives.joined import Joined
from otel_dltrace.analysis.spread import Spread, spread
from otel_dltrace.analysis.steps.table import worker_batches
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, grouped
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch

_DIGITS = re.compile(r"\d+")
Kind = tuple[str, str, str, str, str]


@dataclass(frozen=True, slots=True)
class RankOperation:
    """One operation on one rank; *time* is ns from its begin to what *source* calls its end."""

    rank: int
    count: int
    bytes: int
    time: Spread


@dataclass(frozen=True, slots=True)
class OperationRow:
    """One kind of operation: *tensor* with its digits folded, so that ``bucket 3`` is ``bucket N``.

    *count* and *bytes* are the (least, most) of any rank, *time* (ns) is over all ranks; *skew*, from the
    first rank's begin to the last one's, is over the collectives that are joined, and has a count of its own.
    """

    operation: str
    backend: str
    group: str
    dtype: str
    tensor: str
    source: str
    count: tuple[int, int]
    bytes: tuple[int, int]
    time: Spread
    skew: Spread
    ranks: tuple[RankOperation, ...]


def operations(batches: Sequence[SpanBatch], joined: Joined) -> tuple[OperationRow, ...]:
    """Return one row per kind of operation and source of its end, the one that took the most time first."""
    found: dict[tuple[Kind, int], dict[int, tuple[Column, Column]]] = {}
    for batch in worker_batches(batches):
        for key, sizes, times in _of_batch(batch):
            ranks = found.setdefault(key, {})
            before = ranks.get(batch.rank, (sizes[:0], times[:0]))
            ranks[batch.rank] = (np.concatenate((before[0], sizes)), np.concatenate((before[1], times)))
    skews = _skews(joined)
    rows = [_row(kind, source, ranks, skews) for (kind, source), ranks in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.time.total, row.operation, row.tensor, row.group, row.source)))


def _kind(d: Descriptor) -> Kind:
    return d.name, d.backend, d.group, d.dtype, _DIGITS.sub("N", d.tensor)


def _of_batch(batch: SpanBatch) -> Iterator[tuple[tuple[Kind, int], Column, Column]]:
    """Yield each kind of operation and source of its end with the sizes and the times of its spans."""
    over = batch.is_kind(s.COLLECTIVE, s.P2P) & (batch["flags"] & s.Flag.TRUNCATED == 0)
    kinds = list(dict.fromkeys(map(_kind, batch.descriptors)))
    index = {kind: i for i, kind in enumerate(kinds)}
    rows = batch.take(over)
    sources = np.minimum(rows["source"], s.Source.BOUND)  # a file of somebody else's may hold any number
    classes = rows.lookup(lambda d: index.get(_kind(d), 0), np.int64) * len(s.SOURCE_NAMES) + sources
    sizes, times = np.maximum(rows["size"].astype(np.int64), 0), rows["end"] - rows["start"]
    for number, which in grouped(classes, np.arange(len(rows))):
        kind, source = divmod(number, len(s.SOURCE_NAMES))
        yield (kinds[kind], source), sizes[which], times[which]


def _skews(joined: Joined) -> dict[Kind, Column]:
    skew = joined.reduce(np.maximum, joined["start"]) - joined.reduce(np.minimum, joined["start"])
    kinds: dict[Kind, list[int]] = {}
    for i, descriptor in enumerate(joined.descriptors):
        kinds.setdefault(_kind(descriptor), []).append(i)
    return {kind: skew[which] for kind, which in kinds.items()}


def _sum(sizes: Column) -> int:
    """Return the sum of *sizes*, each of which fits into 63 bits; they may not."""
    return (int((sizes >> 32).sum()) << 32) + int((sizes & 0xFFFF_FFFF).sum())


def _row(kind: Kind, source: int, ranks: dict[int, tuple[Column, Column]], skews: dict[Kind, Column]) -> OperationRow:
    of_ranks = tuple(
        RankOperation(rank, len(times), _sum(sizes), spread(times)) for rank, (sizes, times) in sorted(ranks.items())
    )
    counts, moved = [r.count for r in of_ranks], [r.bytes for r in of_ranks]
    everything = np.concatenate([times for _, times in ranks.values()])
    return OperationRow(
        *kind,
        s.SOURCE_NAMES[source],
        (min(counts), max(counts)),
        (min(moved), max(moved)),
        spread(everything),
        spread(skews.get(kind, everything[:0])),
        of_ranks,
    )

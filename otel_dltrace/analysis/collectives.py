"""The same collective on all its ranks: rows joined by the id that every rank computes alike."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.clocks import clocks
from otel_dltrace.model import semconv as s
from otel_dltrace.model.attributes import collective_ids
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import Column, SpanBatch

_FIELDS = ("start", "end", "rank", "host", "source", "flags", "step", "descriptor")


@dataclass(frozen=True)
class Joined:
    """n rows of g collectives; those of collective i are ``begins[i]:begins[i + 1]``, one for each rank.

    Every collective has its whole group: the group's size by its descriptor, else all ranks of the
    world. *descriptors* are the first rank's; *uncertainty* (g,) is 0 where all ranks share one host.
    Starts and ends are comparable (`clocks`).
    """

    begins: Column
    start: Column
    end: Column
    rank: Column
    source: Column
    flags: Column
    step: Column
    descriptors: tuple[Descriptor, ...]
    uncertainty: Column
    incomplete: int

    def __len__(self) -> int:
        """Return the number of collectives."""
        return len(self.begins) - 1

    @property
    def sizes(self) -> Column:
        """How many ranks each has, shape (g,)."""
        return np.diff(self.begins)

    def reduce(self, function: np.ufunc, values: Column) -> Column:
        """Return *function* (``np.maximum``, ...) over the ranks of each collective, shape (g,)."""
        return function.reduceat(values, self.begins[:-1]) if len(self) else values[:0]

    def spread_out(self, values: Column) -> Column:
        """Return one value per row of *values* per collective, shape (n,)."""
        return np.repeat(values, self.sizes)

    def take(self, which: Column) -> "Joined":
        """Return the collectives that the mask *which* (g,) picks."""
        rows = np.repeat(which, self.sizes)
        begins = np.concatenate(([0], np.cumsum(self.sizes[which])))
        columns = (self.start, self.end, self.rank, self.source, self.flags, self.step)
        descriptors = tuple(d for d, picked in zip(self.descriptors, which.tolist(), strict=True) if picked)
        return Joined(begins, *(c[rows] for c in columns), descriptors, self.uncertainty[which], self.incomplete)


def join(batches: Sequence[SpanBatch]) -> Joined:
    """Return the collectives of *batches* that are known on every rank of their group.

    One of which a rank's row is missing, or doubled, is counted in *incomplete*: which rank came
    last, and when the last one came, cannot be said of it.
    """
    descriptors: list[Descriptor] = []
    ids, rows = _rows(batches, descriptors)
    order = np.lexsort((rows["rank"], ids))
    ids, rows = ids[order], {name: column[order] for name, column in rows.items()}
    new = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1]))) if len(ids) else np.zeros(0, np.int64)
    begins = np.append(new, len(ids))
    named = tuple(descriptors[i] for i in rows["descriptor"][new].tolist())
    world = max((b.process.bind.world_size for b in batches if b.process.bind), default=1)
    expected = np.array([d.group_size or world for d in named], np.int64)
    twice = np.concatenate(([False], (ids[1:] == ids[:-1]) & (rows["rank"][1:] == rows["rank"][:-1])))[: len(ids)]
    doubled = np.logical_or.reduceat(twice, new) if len(new) else np.zeros(0, bool)
    hosts = clocks(batches)
    apart = np.zeros(len(new), bool)
    if len(new):
        apart = np.minimum.reduceat(rows["host"], new) != np.maximum.reduceat(rows["host"], new)
    columns = [rows[name] for name in ("start", "end", "rank", "source", "flags", "step")]
    everything = Joined(begins, *columns, named, np.where(apart, hosts.uncertainty, 0), 0)
    whole = (everything.sizes == expected) & ~doubled & (expected > 1)
    joined = everything.take(whole)
    missing = int(((expected > 1) & ~whole).sum())
    return Joined(
        joined.begins,
        *(joined.start, joined.end, joined.rank, joined.source, joined.flags, joined.step),
        joined.descriptors,
        joined.uncertainty,
        missing,
    )


def _rows(batches: Sequence[SpanBatch], descriptors: list[Descriptor]) -> tuple[Column, dict[str, Column]]:
    """Return the ids of all rows that have one, and their columns on one time line."""
    line = clocks(batches)
    ids, parts = [np.zeros(0, np.uint64)], [dict.fromkeys(_FIELDS, np.zeros(0, np.int64))]
    for batch, offset, host in zip(batches, line.offsets, line.hosts, strict=True):
        of_batch = collective_ids(batch)
        known = (of_batch != 0) & batch.is_kind(s.COLLECTIVE)
        rows = batch.rows[known]
        part = {name: rows[name].astype(np.int64) for name in ("start", "end", "source", "flags", "step", "descriptor")}
        part["start"], part["end"] = part["start"] + offset, part["end"] + offset
        part["rank"] = np.full(len(rows), batch.rank, np.int64)
        part["host"] = np.full(len(rows), host, np.int64)
        part["descriptor"] += len(descriptors)
        descriptors.extend(batch.descriptors)
        ids.append(of_batch[known])
        parts.append(part)
    return np.concatenate(ids), {name: np.concatenate([part[name] for part in parts]) for name in _FIELDS}

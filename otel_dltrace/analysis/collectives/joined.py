"""The same collective on all its ranks: rows joined by the id that every rank computes alike."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from otel_dltrace.analysis.collectives.clocks import clocks
from otel_dltrace.analysis.once import once
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, places_in
from otel_dltrace.model.attributes import collective_ids
from otel_dltrace.model.buckets import is_hooked
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch

_COPIED = ("start", "end", "source", "flags", "step", "descriptor")
_ROW = np.dtype([("id", "u8"), *((name, "i8") for name in (*_COPIED, "rank", "host", "blocked", "off"))])

_SYNCHRONISING = re.compile(
    r"_?(mpi_?)?i?(monitored_?)?(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|barrier|push_?pull)(?!.*[vw]$)",
    re.IGNORECASE,
)
"""Operations in which no rank is done before all have come; an all-to-all with sizes may send nothing."""


@dataclass(frozen=True)
class Joined:
    """g collectives, each with one row for each rank of its group.

    The rows of collective i are ``rows[begins[i]:begins[i + 1]]``, by rank; their starts and ends
    are comparable, give or take *uncertainty* (g,) ns: 0 where all ranks share the clock of one host. From *blocked*
    on a row blocks its rank; by how much a device's times may be *off* is uncertainty, too.
    *descriptors* are those of the first rank. *incomplete* counts what could not be joined.
    """

    rows: Column
    begins: Column
    descriptors: tuple[Descriptor, ...]
    uncertainty: Column
    incomplete: int = 0

    def __len__(self) -> int:
        """Return the number of collectives."""
        return len(self.descriptors)

    def __getitem__(self, column: str) -> Column:
        """Return one column, a value for each rank of each collective, shape (n,)."""
        return self.rows[column]

    @property
    def sizes(self) -> Column:
        """How many ranks each has, shape (g,)."""
        return np.diff(self.begins)

    @property
    def apart(self) -> Column:
        """Mask (g,) of those whose ranks are on several hosts."""
        apart: Column = self.reduce(np.minimum, self["host"]) != self.reduce(np.maximum, self["host"])
        return apart

    @property
    def synchronises(self) -> Column:
        """Mask (g,) of those in which no rank is done before all have come."""
        return np.array([is_synchronising(d.name) for d in self.descriptors], bool)

    def reduce(self, function: np.ufunc, values: Column) -> Column:
        """Return *function* (``np.maximum``, ...) of *values* (n,) over the ranks of each, shape (g,)."""
        reduced: Column = function.reduceat(values, self.begins[:-1]) if len(self) else values[:0]
        return reduced

    def to_rows(self, values: Column) -> Column:
        """Return *values* (g,) repeated for each rank, shape (n,)."""
        return np.repeat(values, self.sizes)

    def take(self, which: Column) -> "Joined":
        """Return the collectives that the mask *which* (g,) picks."""
        begins = np.concatenate(([0], np.cumsum(self.sizes[which])))
        descriptors = tuple(d for d, picked in zip(self.descriptors, which.tolist(), strict=True) if picked)
        return replace(
            self,
            rows=self.rows[self.to_rows(which)],
            begins=begins,
            descriptors=descriptors,
            uncertainty=self.uncertainty[which],
        )


def join(batches: Sequence[SpanBatch]) -> Joined:
    """Return the collectives of *batches* that are known on every rank of their group.

    The group's size is the descriptor's, else that of the world. One of which a rank's row is
    missing, or doubled, counts as incomplete: nobody can say who came last to it.
    Those in which no rank meets another are left out, whatever their ids: see `is_joint`.
    """
    rows, table = _rows(batches)
    rows = rows[np.lexsort((rows["rank"], rows["id"]))]
    same = rows["id"][1:] == rows["id"][:-1]
    begins = np.append(np.flatnonzero(np.append(True, ~same)) if len(rows) else 0, len(rows))
    if not len(rows):
        return Joined(rows, np.zeros(1, np.int64), (), np.zeros(0, np.int64))
    everything = Joined(rows, begins, tuple(table[i] for i in rows["descriptor"][begins[:-1]].tolist()), begins[:-1])
    unsure = np.where(everything.apart, clocks(batches).uncertainty, 0) + 2 * everything.reduce(np.maximum, rows["off"])
    everything = replace(everything, uncertainty=unsure)
    expected = _group_sizes(batches, everything.descriptors)
    doubled = np.append(False, same & (rows["rank"][1:] == rows["rank"][:-1]))
    whole = (everything.sizes == expected) & ~everything.reduce(np.logical_or, doubled)
    alone = expected < 2
    return replace(everything.take(whole & ~alone), incomplete=int((~whole & ~alone).sum()))


def is_joint(d: Descriptor) -> bool:
    """Return whether ranks meet in *d*: a server answers an asynchronous push_pull whoever else has come."""
    return not d.tensor.startswith(s.ASYNC_PARAM)


@once
def lateness_unknown(batch: SpanBatch) -> Column:
    """Return a mask of the rows to which nobody knows who came late: messages, and collectives without an id.

    To a bucket that a communication hook reduces, what the hook calls tells it.
    """
    joint = batch.lookup(lambda d: is_joint(d) and d.name not in s.MPI_SETUP, bool)
    unknown: Column = batch.is_kind(s.P2P) | (batch.is_kind(s.COLLECTIVE) & joint & (collective_ids(batch) == 0))
    return unknown & ~_told_by_calls(batch)


def _told_by_calls(batch: SpanBatch) -> Column:
    """Return a mask of the buckets of communication hooks in which calls are seen to begin."""
    calls = np.sort(batch["start"][batch.is_kind(s.COLLECTIVE, s.P2P) & ~batch.is_bucket])
    hooked = batch.lookup(is_hooked, bool)
    told: Column = hooked & (np.searchsorted(calls, batch["start"]) < np.searchsorted(calls, batch["end"], "right"))
    return told


@lru_cache
def is_synchronising(operation: str) -> bool:
    """Return whether no rank can end *operation* before all have begun it (N x N)."""
    return _SYNCHRONISING.match(operation) is not None


def _group_sizes(batches: Sequence[SpanBatch], descriptors: Sequence[Descriptor]) -> Column:
    world = max((b.process.bind.world_size for b in batches if b.process.bind), default=1)
    return np.array([d.group_size or world for d in descriptors], np.int64)


def _rows(batches: Sequence[SpanBatch]) -> tuple[Column, list[Descriptor]]:
    """Return the rows of all collectives with an id on one time line, and one descriptor table for all."""
    line, table = clocks(batches), list[Descriptor]()
    parts = [np.zeros(0, _ROW)]
    for batch, offset, host in zip(batches, line.offsets, line.hosts, strict=True):
        ids = collective_ids(batch)
        known = (ids != 0) & batch.is_kind(s.COLLECTIVE) & batch.lookup(is_joint, bool)
        part = np.zeros(int(known.sum()), _ROW)
        for name in _COPIED:
            part[name] = batch[name][known]
        part["blocked"] = _blocked_from(batch, batch.rows[known])
        part["off"] = _off(batch, batch.rows[known])
        for name in ("start", "end", "blocked"):
            part[name] += offset
        part["descriptor"] += len(table)
        part["id"], part["rank"], part["host"] = ids[known], batch.rank, host
        table.extend(batch.descriptors)
        parts.append(part)
    return np.concatenate(parts), table


def _off(batch: SpanBatch, rows: Column) -> Column:
    """Return by how many ns the device's times of *rows* of a batch may be off: as those of their step's stages."""
    stages = batch.rows[batch.is_kind(s.STAGE) & (batch["source"] == s.Source.DEVICE)]
    off = np.zeros(len(rows), np.int64)
    if len(stages):
        steps, place = np.unique(stages["step"], return_inverse=True)
        most = np.zeros(len(steps), np.int64)
        np.maximum.at(most, place, stages["b"])
        at = np.minimum(np.searchsorted(steps, rows["step"]), len(steps) - 1)
        off = np.where(rows["source"] == s.Source.DEVICE, most[at], 0)
    return off


def _blocked_from(batch: SpanBatch, rows: Column) -> Column:
    """Return from when on *rows* of a batch block their rank: from their begin, or the first wait, or not (the end)."""
    since: Column = np.where(rows["flags"] & s.Flag.ASYNC != 0, rows["end"], rows["start"])
    waits = batch.rows[batch.is_wait]
    which = places_in(waits["parent_id"], rows["span_id"])
    np.minimum.at(since, which[which >= 0], waits["start"][which >= 0])
    return since

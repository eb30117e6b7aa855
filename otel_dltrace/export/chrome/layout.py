"""Where slices are drawn in a Chrome trace: lanes on which they nest and never partly overlap.

Both writers draw by this: the one of batches (``writer``), and the exporter of SDK spans (``exporter``).
Push_pulls are drawn as BytePS's timeline draws them: a lane for each tensor, below it one for each partition.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from otel_dltrace.model import semconv as s
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import Column, SpanBatch

STEPS, STAGES, OPERATIONS, PHASES = range(4)
FAMILIES = ("steps", "stages", "operations", "phases")
MAX_DEPTH = 64
"""Slices nested deeper than this (a damaged file: parents in a circle) are drawn beside their parent."""
NOT_DRAWN = -1
TOTAL = -1
"""In place of a partition: the push_pull of the whole tensor."""
_FURTHER_TID, _FURTHER_PLACE = 1 << 24, 10_000_000
_MOST_FURTHER = 1 << 16
_PARTITIONS = 1 << 10
"""Partitions of a tensor that are kept in order; those of more than 4 GB come together at its end."""


@dataclass
class Lanes:
    """The lanes of one process: by family, the time until which each lane is taken.

    It outlives a batch, since a span may last into the next one.

    Attributes:
        families: The names of the families.
        stride: The largest number of families there will be.
        taken: For each family, for each of its lanes.
        further: Families beyond the stride, of push_pulls: by tensor, declared key and partition.
    """

    families: list[str] = field(default_factory=lambda: list(FAMILIES))
    stride: int = len(FAMILIES)
    taken: list[list[int]] = field(default_factory=lambda: [[] for _ in FAMILIES])
    further: dict[tuple[str, int, int], int] = field(default_factory=dict)
    _places: list[int] = field(default_factory=list)
    _tensors: dict[str, int] = field(default_factory=dict)

    def counts(self) -> list[int]:
        """Return how many lanes each family has."""
        return [len(lanes) for lanes in self.taken]

    def family(self, name: str) -> int:
        """Return the number of the family *name*, a new one if need be; the last of all takes what is too many."""
        if name not in self.families and len(self.families) < self.stride:
            self.families.append(name)
            self.taken.append([])
        return self.families.index(name) if name in self.families else self.stride - 1

    def push_pull(self, tensor: str, key: int, partition: int) -> int:
        """Return the family of a *partition* of *tensor* (or `TOTAL`); *key* is the declared one, -1 for none."""
        known = self.further.get((tensor, key, partition))
        if known is not None:
            return known
        if len(self.further) == _MOST_FURTHER:
            return len(self.families) - 1
        # By declaration, where that is known: as the tensors come in the model.
        at = key if key >= 0 else _MOST_FURTHER + self._tensors.setdefault(tensor, len(self._tensors))
        self._places.append(_FURTHER_PLACE + at * _PARTITIONS + min(partition + 1, _PARTITIONS - 1))
        number = key << 16 | partition if key >= 0 else partition
        self.families.append(f"{tensor or s.PUSH_PULL} " + ("total" if partition == TOTAL else f"key {number}"))
        self.taken.append([])
        self.further[tensor, key, partition] = len(self.families) - 1
        return len(self.families) - 1

    def thread(self, family: Any, lane: Any) -> Any:
        """Return the thread id of a lane; from 1, since Perfetto takes thread 0 for the kernel's idle task."""
        further = family >= self.stride
        # Lanes of one family are far apart there: how many families there will be is not known.
        return (1 + family + self.stride * lane) * (1 - further) + (_FURTHER_TID + family + (lane << 16)) * further

    def names(self, before: Sequence[int]) -> Iterator[tuple[int, str, int]]:
        """Yield (thread id, name, place among the others) of the lanes that are new since *before* (by family)."""
        for family, lanes in enumerate(self.taken):
            for lane in range(before[family] if family < len(before) else 0, len(lanes)):
                yield (self.thread(family, lane), *self.name_of(family, lane))

    def name_of(self, family: int, lane: int) -> tuple[str, int]:
        """Return the name of a lane and its place among the others."""
        if family >= self.stride:
            return self.families[family] + (f" {lane + 1}" if lane else ""), self._places[family - self.stride]
        return self.families[family] + (f" {lane + 1}" if lane else ""), family * 1_000_000 + lane


@dataclass(frozen=True)
class Slices:
    """What is to be drawn of one process, as columns of shape (n,).

    Attributes:
        start: ns after the trace's base; *arrange* moves it.
        end: The same, never before the start.
        family: Its number, or ``NOT_DRAWN``.
        parent: The row of the slice it is drawn inside, if it fits; -1 for none.
        ticks: Which rows are moments.
        may_be_cut: Which rows are shortened to stay inside their parent; others are drawn beside it.
    """

    start: Column
    end: Column
    family: Column
    parent: Column
    ticks: Column
    may_be_cut: Column


@dataclass(frozen=True)
class Layout:
    """What is drawn: columns of shape (n,), and the rows in file order.

    *start* and *end* are ns after the trace's base; *cut* is by how many ns a span was shortened
    to stay inside its parent, *ticks* marks the rows that are moments.
    """

    order: Column
    start: Column
    end: Column
    tid: Column
    cut: Column
    ticks: Column


def lay_out(batch: SpanBatch, lanes: Lanes, base: int) -> Layout:
    """Place every span of *batch* on a lane of its process; *base* is the Unix ns that is drawn as 0."""
    start = batch["start"] + np.int64(batch.wall - base)
    # A span that never ended (0) is drawn as a moment, not backwards.
    end = np.maximum(batch["end"] + np.int64(batch.wall - base), start)
    length = end - start
    family, ticks = _families(batch, lanes)
    _clamp_stages(batch, family, start, end)
    slices = Slices(start, end, family, _parents(batch, family, ticks, lanes.stride), ticks, np.ones(len(batch), bool))
    nest = Nest(slices)
    tid = place(slices, nest, lanes)
    return Layout(file_order(slices, nest), start, end, tid, length - (end - start), ticks)


def place(slices: Slices, nest: "Nest", lanes: Lanes, kept: Column | None = None) -> Column:
    """Return the thread id of each row, giving lanes to the roots; *kept* has the lanes already given, -1 for none."""
    family, start, end = slices.family, slices.start, slices.end
    lane = np.full(len(start), -1) if kept is None else kept
    own = np.arange(len(start))
    roots = np.flatnonzero((family != NOT_DRAWN) & (nest.root == own) & ~slices.ticks & (lane < 0))
    roots = roots[np.lexsort((end[roots], start[roots], family[roots]))]
    for some in np.split(roots, np.flatnonzero(np.diff(family[roots])) + 1) if len(roots) else ():
        lane[some] = colour(start[some], end[some], lanes.taken[family[some[0]]])
    lane = np.maximum(lane, 0)  # ticks below no slice
    for number in np.unique(family[slices.ticks]).tolist():
        if number != NOT_DRAWN and not lanes.taken[number]:
            lanes.taken[number].append(int(start.min()))
    tid: Column = lanes.thread(family[nest.root], lane[nest.root])
    return tid


def file_order(slices: Slices, nest: "Nest") -> Column:
    """Return the rows that are drawn, parents before children that begin with them: viewers nest in this order."""
    drawn = np.flatnonzero(slices.family != NOT_DRAWN)
    order: Column = drawn[np.lexsort((nest.level[drawn], -slices.end[drawn], slices.start[drawn]))]
    return order


def _families(batch: SpanBatch, lanes: Lanes) -> tuple[Column, Column]:
    """Return the family of each row, and a mask of the ticks; metrics are drawn as counters, on no lane."""
    by_kind = {s.STEP: STEPS, s.STAGE: STAGES, s.COLLECTIVE: OPERATIONS, s.P2P: OPERATIONS, s.TICK: OPERATIONS}
    by_kind[s.METRIC] = NOT_DRAWN
    family = batch.lookup(lambda d: by_kind.get(d.kind, PHASES), np.int64)
    _move_push_pulls(batch, lanes, family)
    return family, batch.is_kind(s.TICK)


def _move_push_pulls(batch: SpanBatch, lanes: Lanes, family: Column) -> None:
    """Give push_pulls, and the stages of their partitions, families of their own, in place."""
    is_total = batch.lookup(is_push_pull, bool)
    is_part = batch.lookup(is_stage, bool) & (batch["level"] == s.Level.PARTITION)
    rows = np.flatnonzero(is_total | is_part)
    partition = np.where(is_total[rows], TOTAL, batch["partition"][rows].astype(np.int64))
    pairs, which = np.unique(batch["descriptor"][rows].astype(np.int64) << 17 | partition + 1, return_inverse=True)
    about = [(batch.descriptors[pair >> 17], (pair & 0x1FFFF) - 1) for pair in pairs.tolist()]
    for d, part in sorted(about, key=lambda one: (one[0].key < 0, one[0].key, one[1])):
        lanes.push_pull(d.tensor, d.key, part)  # new ones in this order: some viewers show lanes by thread id
    numbers = [lanes.push_pull(d.tensor, d.key, part) for d, part in about]
    family[rows] = np.array(numbers, np.int64)[which]


def is_push_pull(d: Descriptor) -> bool:
    """Return whether *d* is the push_pull of a tensor."""
    return d.kind == s.COLLECTIVE and d.name == s.PUSH_PULL


def is_stage(d: Descriptor) -> bool:
    """Return whether *d* is a stage of a push_pull; at partition level it is that of one partition."""
    return d.kind == s.PHASE and bool(d.queue_type) and bool(d.backend)


def _clamp_stages(batch: SpanBatch, family: Column, start: Column, end: Column) -> None:
    """Cut stages, in place, to their step; one that lies outside it (evaluation comes before) stays as it is."""
    steps, stages = np.flatnonzero(family == STEPS), np.flatnonzero(family == STAGES)
    if not (len(steps) and len(stages)):
        return
    steps = steps[np.argsort(batch["step"][steps], kind="stable")]
    numbers = batch["step"][steps]
    at = np.minimum(np.searchsorted(numbers, batch["step"][stages]), len(steps) - 1)
    step = steps[at]
    inside = (numbers[at] == batch["step"][stages]) & (start[stages] < end[step]) & (end[stages] > start[step])
    stages, step = stages[inside], step[inside]
    start[stages] = np.maximum(start[stages], start[step])
    end[stages] = np.minimum(end[stages], end[step])


def _parents(batch: SpanBatch, family: Column, ticks: Column, stride: int) -> Column:
    """Return the row of each phase's or tick's parent, an operation or a phase of this batch; else -1."""
    ids = batch["span_id"]
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids[order], batch["parent_id"]), max(0, len(ids) - 1))
    found = order[at] if len(ids) else order
    good = (ids[found] == batch["parent_id"]) & (batch["parent_id"] != 0)
    good &= (family == PHASES) | ticks
    good &= (family[found] >= OPERATIONS) & ~ticks[found]
    good &= family < stride  # a partition has a lane of its own
    return np.where(good, found, -1)


class Nest:
    """The trees of slices below their roots; shortens *start* and *end* in place.

    A slice is drawn inside its parent if it touches it (or lies in it, where it may not be cut) and no
    sibling drawn there overlaps it (partitions run side by side); else it becomes a root, with its true
    extent. So no slice gets a length that it had not, except what sticks out of its parent.
    """

    def __init__(self, slices: Slices) -> None:
        self._slices = slices
        parent = slices.parent
        self.root = np.arange(len(parent))
        self.level = np.zeros(len(parent), np.int64)
        settled = parent < 0
        pending = np.flatnonzero(~settled)
        for depth in range(1, MAX_DEPTH):
            ready = pending[settled[parent[pending]]]
            if not len(ready):
                break
            self._attach(ready, parent[ready], depth)
            settled[ready] = True
            pending = pending[~settled[pending]]

    def _attach(self, rows: Column, parents: Column, depth: int) -> None:
        all_start, all_end, ticks = self._slices.start, self._slices.end, self._slices.ticks
        low, high = all_start[parents], all_end[parents]
        solid = ~ticks[rows]
        touches = (all_start[rows] <= high) & (all_end[rows] >= low)
        touches &= self._slices.may_be_cut[rows] | ((all_start[rows] >= low) & (all_end[rows] <= high))
        start, end = np.clip(all_start[rows], low, high), np.clip(all_end[rows], low, high)
        candidates = np.flatnonzero(solid & touches)
        candidates = candidates[np.lexsort((end[candidates], start[candidates], parents[candidates]))]
        fits = ~solid
        fits[candidates] = _disjoint(parents[candidates], start[candidates], end[candidates])
        inside = rows[fits]
        self.root[inside] = self.root[parents[fits]]
        self.level[inside] = depth
        shaped = fits & solid
        all_start[rows[shaped]], all_end[rows[shaped]] = start[shaped], end[shaped]


def _disjoint(parents: Column, starts: Column, ends: Column) -> Column:
    """Return which intervals to keep so that those of one parent do not overlap; sorted by parent and start."""
    kept = np.ones(len(parents), bool)
    clash = (parents[1:] == parents[:-1]) & (starts[1:] < ends[:-1])
    # Where no neighbours clash, none do: only families with a clash are gone through one by one.
    doubtful = np.flatnonzero(np.isin(parents, parents[1:][clash]))
    parent, free = -1, 0
    rows = (doubtful, parents[doubtful], starts[doubtful], ends[doubtful])
    for row, mine, start, end in zip(*(column.tolist() for column in rows), strict=True):
        if mine == parent and start < free:
            kept[row] = False
        else:
            parent, free = mine, end
    return kept


def colour(starts: Column, ends: Column, taken: list[int]) -> Sequence[int] | int:
    """Return a lane for each interval, the lowest that is free; *starts* ascend, *taken* grows.

    An instant takes 1 ns: two slices that begin together would nest in a viewer.
    """
    until = np.maximum(ends, starts + 1)
    if len(starts) and (starts[1:] >= until[:-1]).all() and (not taken or starts[0] >= taken[0]):
        taken[:1] = [int(until[-1])]
        return 0
    busy = [(end, lane) for lane, end in enumerate(taken)]
    heapify(busy)
    free: list[int] = []
    lanes = []
    for start, end in zip(starts.tolist(), until.tolist(), strict=True):
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        if free:
            lane = heappop(free)
        else:
            lane = len(taken)
            taken.append(0)
        taken[lane] = end
        heappush(busy, (end, lane))
        lanes.append(lane)
    return lanes

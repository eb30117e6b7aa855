"""Where each span is drawn in a Chrome trace: lanes on which slices nest and never partly overlap."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

import numpy as np

from otel_dltrace.model import semconv as s
from otel_dltrace.model.spans import Column, SpanBatch

STEPS, STAGES, OPERATIONS, PHASES = range(4)
FAMILIES = ("steps", "stages", "operations", "phases")
MAX_DEPTH = 64
"""Phases nested deeper than this (a damaged file: parents in a circle) are drawn beside their parent."""
_NOT_DRAWN = -1


@dataclass
class Lanes:
    """The lanes of one process: by family, the time until which each lane is taken.

    It outlives a batch, since a span may last into the next one.
    """

    taken: tuple[list[int], ...] = field(default_factory=lambda: tuple([] for _ in FAMILIES))

    def counts(self) -> list[int]:
        """Return how many lanes each family has."""
        return [len(lanes) for lanes in self.taken]


def thread_of(family: Any, lane: Any) -> Any:
    """Return the thread id of a lane; from 1, since Perfetto takes thread 0 for the kernel's idle task."""
    return 1 + family + len(FAMILIES) * lane


@dataclass(frozen=True)
class Layout:
    """What is drawn of a batch: columns of shape (n,), and the rows in file order.

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
    family, ticks = _families(batch)
    _clamp_stages(batch, family, start, end)
    parent = _parents(batch, family, ticks)
    nest = _Nest(parent, start, end, ~ticks)
    lane = np.zeros(len(batch), np.int64)
    own = np.arange(len(batch))
    for number, taken in enumerate(lanes.taken):
        roots = np.flatnonzero((family == number) & (nest.root == own) & ~ticks)
        roots = roots[np.lexsort((end[roots], start[roots]))]
        lane[roots] = colour(start[roots].tolist(), end[roots].tolist(), taken)
    if ticks.any() and not lanes.taken[OPERATIONS]:
        lanes.taken[OPERATIONS].append(int(start.min()))
    drawn = np.flatnonzero(family != _NOT_DRAWN)
    # Parents come before children that begin with them: viewers nest in the order of the file.
    order = drawn[np.lexsort((nest.level[drawn], -end[drawn], start[drawn]))]
    tid = thread_of(family[nest.root], lane[nest.root])
    return Layout(order, start, end, tid, length - (end - start), ticks)


def _families(batch: SpanBatch) -> tuple[Column, Column]:
    """Return the family of each row, and a mask of the ticks; metrics are not drawn."""
    by_kind = {s.STEP: STEPS, s.STAGE: STAGES, s.COLLECTIVE: OPERATIONS, s.P2P: OPERATIONS, s.TICK: OPERATIONS}
    by_kind[s.METRIC] = _NOT_DRAWN
    return batch.lookup(lambda d: by_kind.get(d.kind, PHASES), np.int64), batch.is_kind(s.TICK)


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


def _parents(batch: SpanBatch, family: Column, ticks: Column) -> Column:
    """Return the row of each phase's or tick's parent, an operation or a phase of this batch; else -1."""
    ids = batch["span_id"]
    order = np.argsort(ids, kind="stable")
    at = np.minimum(np.searchsorted(ids[order], batch["parent_id"]), max(0, len(ids) - 1))
    found = order[at] if len(ids) else order
    good = (ids[found] == batch["parent_id"]) & (batch["parent_id"] != 0)
    good &= (family == PHASES) | ticks
    good &= (family[found] >= OPERATIONS) & ~ticks[found]
    return np.where(good, found, -1)


class _Nest:
    """The trees of phases below their roots; shortens *start* and *end* in place.

    A phase is drawn inside its parent if it touches it and no sibling drawn there overlaps it
    (partitions run side by side); else it becomes a root, with its true extent. So no slice gets a
    length that it had not, except what sticks out of its parent.
    """

    def __init__(self, parent: Column, start: Column, end: Column, solid: Column) -> None:
        self.start, self.end, self.solid = start, end, solid
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
        low, high = self.start[parents], self.end[parents]
        solid = self.solid[rows]
        touches = (self.start[rows] <= high) & (self.end[rows] >= low)
        start, end = np.clip(self.start[rows], low, high), np.clip(self.end[rows], low, high)
        candidates = np.flatnonzero(solid & touches)
        candidates = candidates[np.lexsort((end[candidates], start[candidates], parents[candidates]))]
        fits = ~solid
        fits[candidates] = _disjoint(parents[candidates].tolist(), start[candidates].tolist(), end[candidates].tolist())
        inside = rows[fits]
        self.root[inside] = self.root[parents[fits]]
        self.level[inside] = depth
        shaped = fits & solid
        self.start[rows[shaped]], self.end[rows[shaped]] = start[shaped], end[shaped]


def _disjoint(parents: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> list[bool]:
    """Return which intervals to keep so that those of one parent do not overlap; sorted by parent and start."""
    kept, parent, free = [], -1, 0
    for mine, start, end in zip(parents, starts, ends, strict=True):
        keep = mine != parent or start >= free
        if keep:
            parent, free = mine, end
        kept.append(keep)
    return kept


def colour(starts: Sequence[int], ends: Sequence[int], taken: list[int]) -> list[int]:
    """Return a lane for each interval, the lowest that is free; *starts* ascend, *taken* grows.

    An instant takes 1 ns: two slices that begin together would nest in a viewer.
    """
    busy = [(end, lane) for lane, end in enumerate(taken)]
    heapify(busy)
    free: list[int] = []
    lanes = []
    for start, end in zip(starts, ends, strict=True):
        while busy and busy[0][0] <= start:
            heappush(free, heappop(busy)[1])
        if free:
            lane = heappop(free)
        else:
            lane = len(taken)
            taken.append(0)
        taken[lane] = max(end, start + 1)
        heappush(busy, (taken[lane], lane))
        lanes.append(lane)
    return lanes

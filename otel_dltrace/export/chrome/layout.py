"""Where slices are drawn in a Chrome trace: lanes on which they nest and never partly overlap.

Both writers draw by this: the one of batches (``writer``), and the exporter of SDK spans (``exporter``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

from otel_dltrace.export.chrome.lanes import OPERATIONS, PHASES, STAGES, STEPS, Lanes
from otel_dltrace.export.chrome.tensors import move_tensors
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, places_in
from otel_dltrace.model.spans import SpanBatch

MAX_DEPTH = 64
"""Slices nested deeper than this (a damaged file: parents in a circle) are drawn beside their parent."""
NOT_DRAWN = -1


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
    begun = batch["start"] + np.int64(batch.wall - base)
    # A span that never ended (0) is drawn as a moment, not backwards.
    length = np.maximum(batch["end"] + np.int64(batch.wall - base) - begun, 0)
    # What began long before all that was drawn before it is cut: viewers drop what is below 0.
    start, end = np.maximum(begun, 0), np.maximum(begun + length, 0)
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
    move_tensors(batch, lanes, family)
    return family, batch.is_kind(s.TICK)


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
    """Return the row of each phase's or tick's parent, an operation or a phase of this batch; else -1.

    On the lanes of a tensor phases nest with their own: a partition has a lane to itself.
    """
    found = places_in(batch["parent_id"], batch["span_id"])
    good = (found >= 0) & (batch["parent_id"] != 0)
    good &= (family == PHASES) | ticks | ((family >= stride) & (family == family[found]))
    good &= (family[found] >= OPERATIONS) & ~ticks[found]
    parent = np.where(good, found, -1)
    # Where Horovod itself tells what an operation does, the wait for its end would lie across that.
    told = np.unique(parent[(family >= stride) & ~ticks])
    parent[(family == PHASES) & np.isin(parent, told)] = -1
    return parent


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

"""From ended spans of the OpenTelemetry SDK to the lines of a Chrome trace, on the lanes that batches have too."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext

from otel_dltrace.export.chrome.arrows import Arrows, Line, Place
from otel_dltrace.export.chrome.lanes import FAMILIES, OPERATIONS, PHASES, STAGES, STEPS, Lanes
from otel_dltrace.export.chrome.layout import Nest, Slices, file_order, place
from otel_dltrace.export.chrome.marks import (
    UNKNOWN_ORDER,
    free_pid,
    lane_metadata,
    microseconds,
    process_metadata,
    process_names,
    rank_pid,
)
from otel_dltrace.export.chrome.roots import Root, Roots
from otel_dltrace.export.chrome.span_text import LATEST, Key, Row, line, moments, slice_line
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.record.guard import guarded

SPANS = "spans"
THREADS = 256
"""Threads that get lanes of their own, in a process; the others share."""
_THREAD_ID, _THREAD_NAME = "thread.id", "thread.name"
_MAX_PID = 1 << 31

Attributes = Mapping[str, Any]


@dataclass
class ResourceLanes:
    """What made spans, as a process of the trace."""

    pid: int
    metadata: list[Line]
    lanes: Lanes = field(default_factory=lambda: Lanes([*FAMILIES, SPANS], THREADS, [[] for _ in (*FAMILIES, SPANS)]))

    def __post_init__(self) -> None:
        """Begin with empty lanes."""
        self.lanes.pid = self.pid
        self.roots = Roots(self.lanes)

    def lane_metadata(self, tid: int) -> list[Line]:
        """Return the lines that name a lane."""
        lane, family = divmod(self.lanes.turned(tid) - 1, self.lanes.stride)
        return [line(self.pid, tid, text) for text in lane_metadata(self.pid, tid, *self.lanes.name_of(family, lane))]


class Drawn(NamedTuple):
    """What a batch of spans gave: its lines, where each span is (for arrows), and its processes."""

    lines: list[Line]
    places: list[tuple[Row, Place]]


class Drawing:
    """What is remembered between batches: lanes, and processes.

    Args:
        base: The Unix ns that is drawn as 0; what is before it is drawn there.
    """

    def __init__(self, base: int) -> None:
        self.base = base
        self.resources: dict[Any, ResourceLanes] = {}
        self.by_pid: dict[int, ResourceLanes] = {}

    def draw(self, spans: Sequence[ReadableSpan]) -> Drawn:
        """Return the events of *spans*; one that cannot be drawn is left out, and told once."""
        drawn = Drawn([], [])
        grouped: dict[int, tuple[Any, list[ReadableSpan]]] = {}
        for span in spans:
            grouped.setdefault(id(span.resource), (span.resource, []))[1].append(span)
        for of, group in grouped.values():
            resource = self._resource(of.attributes if of is not None else {})
            rows = [row for span in group if (row := _row(span, self.base, resource.lanes))]
            self._draw(resource, rows, drawn)
        return drawn

    def _draw(self, resource: ResourceLanes, rows: list[Row], drawn: Drawn) -> None:
        by_key = {row.key: number for number, row in enumerate(rows)}
        earlier = [root for root in resource.roots.take_below(by_key) if _inside(root, rows[by_key[root.parent]])]  # type: ignore[index]
        slices = _slices(rows, earlier, by_key)
        lengths = slices.end - slices.start
        nest = Nest(slices)
        kept = np.full(len(slices.start), -1)
        kept[len(rows) :] = [root.lane for root in earlier]
        _adopt(resource.roots, slices, nest, rows, earlier, kept)
        adopted = kept >= 0
        tid = place(slices, nest, resource.lanes, kept)
        order = [number for number in file_order(slices, nest).tolist() if number < len(rows)]
        columns = (
            tid,
            slices.start,
            slices.end,
            lengths - (slices.end - slices.start),
            nest.root == np.arange(len(tid)),
        )
        tids, starts, ends, cuts, is_root = (column.tolist() for column in columns)
        stamps = _stamps(slices)
        for number in order:
            row = rows[number]
            if is_root[number] and not adopted[number]:
                lane = (resource.lanes.turned(tids[number]) - 1) // THREADS
                resource.roots.add(_root(row, starts[number], ends[number], lane))
            text = slice_line(row, resource.pid, tids[number], stamps[number], cuts[number])
            if text is not None:
                drawn.lines.append(text)
                drawn.places.append((row, Place(resource.pid, tids[number], starts[number])))
                drawn.lines.extend(moments(row.span, resource.pid, tids[number], self.base))

    def _resource(self, attributes: Attributes) -> ResourceLanes:
        key = tuple(sorted((name, str(value)) for name, value in attributes.items()))
        found = self.resources.get(key)
        if found is None:
            found = self.resources[key] = _new_resource(attributes, self.by_pid)
            self.by_pid[found.pid] = found
        return found


def _new_resource(attributes: Attributes, used: Mapping[int, ResourceLanes]) -> ResourceLanes:
    pid = attributes.get("process.pid")
    pid = pid if isinstance(pid, int) and 0 < pid < _MAX_PID else os.getpid()
    host = str(attributes.get(s.HOST_NAME, ""))
    rank = attributes.get(s.DL_RANK)
    if isinstance(rank, int) and 0 <= rank < _MAX_PID:
        about = {s.DL_ROLE: "worker", s.DL_WORLD: "default", **attributes}
        name, order = process_names(about, host or f"pid {pid}")
        label = f"generation {attributes[s.DL_JOB_GENERATION]}" if s.DL_JOB_GENERATION in attributes else ""
        pid = rank_pid(about, used)
    else:
        name, label, order = f"{attributes.get(s.SERVICE_NAME, 'process')} (pid {pid})", host, UNKNOWN_ORDER
        pid = free_pid(pid, used)
    return ResourceLanes(pid, [line(pid, 0, text) for text in process_metadata(pid, name, label, order)])


@guarded
def _row(span: ReadableSpan, base: int, lanes: Lanes) -> Row:
    start = min(max(0, int(span.start_time or 0) - base), LATEST)
    # A span without end is drawn as a moment, not backwards.
    end = min(max(start, int(span.end_time or 0) - base), LATEST)
    parent = _key(span.parent) if span.parent is not None else None
    return Row(start, end, _family(span, lanes), _key(span.context), parent, span)


def _key(context: SpanContext) -> Key:
    return context.trace_id, context.span_id


def _family(span: ReadableSpan, lanes: Lanes) -> int:
    """Return the family of lanes that a span belongs to: our own by what they are, others by their thread if known."""
    attributes = span.attributes or {}
    if s.DL_PHASE in attributes:
        return STAGES
    if s.DL_COMM_OPERATION in attributes:
        return OPERATIONS
    if span.name in (s.TRAIN_STEP, s.RANK_STEP):
        return STEPS
    if s.DL_TIME_SOURCE in attributes:
        return PHASES
    thread = attributes.get(_THREAD_ID)
    if thread is None:
        return lanes.family(SPANS)
    return lanes.family(f"{attributes.get(_THREAD_NAME, 'thread')} ({thread})")


def _inside(root: Root, parent: Row) -> bool:
    return root.family == parent.family and parent.start < root.start and root.end <= parent.end


def _slices(rows: Sequence[Row], earlier: Sequence[Root], by_key: Mapping[Key, int]) -> Slices:
    every = [(row.start, row.end, row.family, _parent_of(number, rows, by_key)) for number, row in enumerate(rows)]
    every += [(root.start, root.end, root.family, by_key[root.parent]) for root in earlier]  # type: ignore[index]
    start, end, family, parent = np.array(every, np.int64).reshape(-1, 4).T.copy()
    return Slices(start, end, family, parent, np.zeros(len(every), bool), family == PHASES)


def _parent_of(number: int, rows: Sequence[Row], by_key: Mapping[Key, int]) -> int:
    """Return the row of the parent below which a span may be drawn, -1 for none."""
    row = rows[number]
    parent = by_key.get(row.parent, -1) if row.parent is not None else -1
    if parent in (-1, number):
        return -1
    family = rows[parent].family
    nests = (row.family == PHASES and family == OPERATIONS) or (row.family == family and family >= PHASES)
    return parent if nests else -1


def _adopt(
    roots: Roots, slices: Slices, nest: Nest, rows: Sequence[Row], earlier: Sequence[Root], kept: Column
) -> None:
    """Give each row below which slices of earlier batches are the lane that these have, in *kept*, if that can be."""
    below: dict[int, list[Root]] = {}
    for root, at in zip(earlier, nest.root[len(rows) :].tolist(), strict=True):
        if at < len(rows) and rows[at].family == root.family:
            below.setdefault(at, []).append(root)
    for number in sorted(below, key=lambda number: slices.start[number]):
        start, end = int(slices.start[number]), int(slices.end[number])
        members = sorted(below[number], key=lambda root: root.end)
        kept[number] = roots.adopt(_root(rows[number], start, end, -1), members)


def _root(row: Row, start: int, end: int, lane: int) -> Root:
    remote = row.span.parent is not None and row.span.parent.is_remote
    return Root(row.family, lane, start, end, max(end, start + 1), None if remote else row.parent)


def _stamps(slices: Slices) -> list[tuple[int, int, int, int]]:
    columns = (*microseconds(slices.start), *microseconds(slices.end - slices.start))
    return list(zip(*(column.tolist() for column in columns), strict=True))


# -- arrows -------------------------------------------------------------------------------------


def arrows_of(drawn: Drawn, arrows: Arrows) -> Iterator[Line]:
    """Yield the arrows that the spans of a batch begin or end: links, parents in other processes, collectives."""
    for row, at in drawn.places:
        if row.end == row.start:
            continue  # nothing to point at
        yield from arrows.drawn(row.key, at)
        span = row.span
        for link in span.links or ():
            yield from arrows.link("link", _key(link.context), at)
        if row.parent is not None and span.parent is not None and span.parent.is_remote:
            yield from arrows.link("parent", row.parent, at)
        collective = (span.attributes or {}).get(s.DL_COMM_COLLECTIVE_ID)
        if collective is not None:
            yield from arrows.chain("collective", collective, at)

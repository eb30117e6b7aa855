"""Batches of spans that are drawn as Chrome traces, and what is on the lanes of a trace."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from otel_dltrace.export.chrome.writer import write_chrome
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.metric_batch import MetricBatch, Point, batch_of
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.spans import Process, SpanBatch, empty_rows, fill_ids
from otel_dltrace.model.time import Anchor
from tests.support.chrome_rules import complaints, ns
from tests.support.runs import MS

WALL = 1_700_000_000_000_000_000
DESCRIPTORS = (
    RANK_STEP,
    Descriptor(s.STAGE, "dataloader_next"),
    Descriptor(s.STAGE, "forward"),
    Descriptor(s.STAGE, "backward"),
    Descriptor(s.COLLECTIVE, "all_reduce", group="0", group_size=2, backend="gloo", dtype="float32"),
    Descriptor(s.PHASE, "NEGOTIATE_ALLREDUCE", activity="NEGOTIATE_ALLREDUCE"),
    Descriptor(s.PHASE, "PUSH", tensor="layer.weight", key=3, queue_type="PUSH"),
    Descriptor(s.PHASE, s.WAIT),
    Descriptor(s.TICK, "ready"),
    Descriptor(s.P2P, "send", group="0", backend="gloo"),
)
STEP, DATA, FORWARD, BACKWARD, ALL_REDUCE, NEGOTIATE, PUSH, WAIT, READY, SEND = range(len(DESCRIPTORS))
DAY = 86_400_000
SECOND = 1000 * MS
ANCHOR = Anchor(0, WALL, 30)


def make_batch(rank: int, spans: list[dict[str, Any]], descriptors=DESCRIPTORS, errors=(("", ""),)) -> SpanBatch:
    """Return the batch of *rank* with *spans* (columns by name); the number of a span is its place from 1."""
    rows = empty_rows(len(spans))
    rows["span_no"] = np.arange(1, len(spans) + 1)
    rows["b"] = -1
    for row, span in zip(rows, spans, strict=True):
        for name, value in span.items():
            row[name] = value
    bind = Bind("job-1", "2.0011223344556677", "bert", rank=rank, local_rank=rank, world_size=2)
    process = Process(0x1000 + rank, bind, "node-a", "boot", 100 + rank, Anchor(0, WALL, 25))
    fill_ids(rows, descriptors, process)
    return SpanBatch(rows, descriptors, process, errors)


def span(descriptor: int, start: float, end: float, parent: int = 0, step: int = 0, **columns: Any) -> dict[str, Any]:
    """Return one span from *start* to *end*, in ms, below the span with number *parent*."""
    start, end = int(start * MS), int(end * MS)
    return {"descriptor": descriptor, "start": start, "end": end, "parent_no": parent, "step": step, **columns}


def rank_spans(late: float) -> list[dict[str, Any]]:
    """Return a step of a rank that begins *late* ms: stages that overlap, two buckets at once, phases."""
    t = late
    return [
        span(STEP, t, t + 100, size=7, a=32, b=1),
        span(DATA, t, t + 10, size=10 * MS, a=1),
        span(FORWARD, t + 10, t + 60, size=30 * MS, a=2),
        span(BACKWARD, t + 30, t + 104, size=60 * MS, a=2),
        span(ALL_REDUCE, t + 40, t + 70, seq=1, size=4096, flags=s.Flag.ASYNC),
        span(ALL_REDUCE, t + 50, t + 90, seq=2, size=1024, flags=s.Flag.TRUNCATED),
        span(NEGOTIATE, t + 40, t + 45, 5),
        span(PUSH, t + 45, t + 60, 5, partition=0, level=s.Level.PARTITION),
        span(PUSH, t + 50, t + 65, 5, partition=1, level=s.Level.PARTITION),
        span(WAIT, t + 60, t + 75, 5),
        span(NEGOTIATE, t + 95, t + 97.000001),
        span(READY, t + 41, t + 41, 7, a=1),
        span(ALL_REDUCE, t + 91, t + 92, error=1, flags=s.Flag.ERROR),
    ]


def two_ranks() -> list[SpanBatch]:
    """Return one step of two ranks, the second 3 ms late."""
    errors = (("", ""), ("RuntimeError", "connection closed by peer"))
    return [make_batch(rank, rank_spans(late), errors=errors) for rank, late in ((0, 1000), (1, 1003))]


def written(path: Path, batches: list[SpanBatch]) -> dict[str, Any]:
    """Return the trace of *batches*, written to *path* and read back."""
    events = write_chrome(batches, path)
    trace: dict[str, Any] = json.loads(path.read_bytes())
    assert len(trace["traceEvents"]) == events
    assert complaints(trace["traceEvents"]) == []
    return trace


def by_lane(trace: dict[str, Any]) -> dict[tuple[int, str], list[tuple[int, int, str]]]:
    """Return (start, end, name) of the slices, in ns, by process and lane name, outer ones first."""
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    lanes = defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            start = ns(e["ts"])
            lanes[e["pid"], names[e["pid"], e["tid"]]].append((start, start + ns(e["dur"]), e["name"]))
    return {lane: sorted(slices, key=lambda x: (x[0], -x[1])) for lane, slices in lanes.items()}


def lanes_of(trace: dict[str, Any], pid: int = 1) -> dict[str, list[tuple[str, float, float]]]:
    """Return (name, start, end) in ms of the slices of a process by lane, in the order of the lanes."""
    events = trace["traceEvents"]
    places = {(e["pid"], e["tid"]): e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    names = {(e["pid"], e["args"]["name"]): (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    found = {lane: slices for lane, slices in by_lane(trace).items() if lane[0] == pid}
    return {
        lane[1]: [(name, start / MS - DAY, end / MS - DAY) for start, end, name in found[lane]]
        for lane in sorted(found, key=lambda lane: places[names[lane]])
    }


def sampled(points: list[tuple[float, str, float, dict[str, str | int], int]], host: str = "node-0") -> MetricBatch:
    """Return metrics of *host*: (s, metric, value, attributes, rank) each."""
    rows = [
        (round(at * SECOND), -1, Point(metric, value, m.attributes_text(attributes), rank))
        for at, metric, value, attributes, rank in points
    ]
    return batch_of(rows, host, f"boot-{host}", WALL)

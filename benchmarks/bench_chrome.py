"""Spans a second into a Chrome trace, beside json.dumps and viztracer: ``python -m benchmarks chrome``.

*Column writer* is `write_chrome` from batches (two ranks, steps of 120 spans: the step, 5 stages, 16 all-reduces, 98
phases) to a file on tmpfs: lanes, nesting, arrows, text. *Exporter* is `ChromeTraceExporter.export` of the same spans
as the SDK's `ReadableSpan`, 512 at a time as a `BatchSpanProcessor` gives them.

*json.dumps* begins with the column writer's own events, ready as dictionaries, and writes them to the same tmpfs; it
lays nothing out. *viztracer* is `save` of as many function calls that it has in its buffer, which carry a name, a file
and no arguments; recording them is not in it.

All take turns in one process. Figures are medians over rounds; the intervals hold 95 % of the medians (and ratios
of medians) of resampled rounds.
"""

import json
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanContext, TraceFlags
from viztracer import VizTracer

from benchmarks._processes import scratch
from benchmarks._stats import in_turn, ranged, rate_of, ratio_of_medians, table
from otel_dltrace.export.chrome.exporter import ChromeTraceExporter
from otel_dltrace.export.chrome.writer import write_chrome
from otel_dltrace.model import semconv as s
from otel_dltrace.model.attributes import constant_attributes, number_columns, resource_attributes
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.spans import Process, SpanBatch, empty_rows, fill_ids
from otel_dltrace.model.time import Anchor

STEPS, RANKS, BATCH = 100, 2, 512
MS = 1_000_000
_STAGES = ("dataloader_next", "forward", "backward", "optimizer", "reduce_metrics")
_DESCRIPTORS = (
    RANK_STEP,
    *(Descriptor(s.STAGE, name) for name in _STAGES),
    Descriptor(s.COLLECTIVE, "all_reduce", group="0", group_size=2, backend="nccl", dtype="float32"),
    Descriptor(s.PHASE, "NEGOTIATE_ALLREDUCE", activity="NEGOTIATE_ALLREDUCE"),
    Descriptor(s.PHASE, "PUSH", tensor="layer.weight", key=3, queue_type="PUSH"),
)
_SPAN_COLUMNS = ("descriptor", "start", "end", "parent_no", "seq", "size", "a", "b")
OURS, EXPORTER, DUMPS, VIZTRACER = "column writer", "exporter", "json.dumps", "viztracer"
GOAL = 300_000


def _step() -> list[tuple[int, ...]]:
    """Return the spans of one step, `_SPAN_COLUMNS` each, in us after its begin."""
    spans = [(0, 0, 100_000, 0, 1, 7, 32, 1)]
    spans += [(1 + i, 20_000 * i, 20_000 * i + 19_000, 0, 0, 19 * MS, 1, -1) for i in range(5)]
    spans += [(6, 20_000 + 4000 * i, 26_000 + 4000 * i, 0, 1 + i, 4096 * i, 0, -1) for i in range(16)]
    for i in range(98):
        begin = 20_000 + 4000 * (i % 16) + 900 * (i // 16)
        spans.append((7 + i % 2, begin, begin + 800, 7 + i % 16, 0, 1024, 0, -1))
    return spans


def batch_of(rank: int) -> SpanBatch:
    """Return *rank*'s spans of `STEPS` steps."""
    one = np.array(_step(), np.int64)
    n = len(one)
    rows = empty_rows(n * STEPS)
    step = np.repeat(np.arange(STEPS), n)
    for name, column in zip(_SPAN_COLUMNS, np.tile(one, (STEPS, 1)).T, strict=True):
        rows[name] = column
    for name in ("start", "end"):
        rows[name] = rows[name] * 1000 + step * 101 * MS + rank * 1234
    rows["seq"] += np.where(rows["seq"] > 0, 16 * step, 0).astype(np.uint32)
    rows["parent_no"] += np.where(rows["parent_no"] > 0, n * step, 0).astype(np.uint32)
    rows["step"], rows["span_no"] = step, np.arange(1, len(rows) + 1)
    bind = Bind("job", "1.00", "bench", rank=rank, local_rank=rank, world_size=RANKS)
    process = Process(rank + 1, bind, "node", "boot", 100 + rank, Anchor(0, 1_700_000_000_000_000_000, 25))
    fill_ids(rows, _DESCRIPTORS, process)
    return SpanBatch(rows, _DESCRIPTORS, process)


def sdk_spans(batch: SpanBatch) -> list[ReadableSpan]:
    """Return *batch* as the SDK's spans, in the order in which they end."""
    columns = number_columns(batch)
    resource = Resource(dict(resource_attributes(batch.process)))
    out = []
    for row in np.argsort(batch["end"], kind="stable").tolist():
        r = batch.rows[row]
        trace = int(r["step"]) + 1
        parent = int(r["parent_id"])
        numbers = {name: int(values[row]) for name, values, mask in columns if mask[row]}
        out.append(
            ReadableSpan(
                batch.descriptor_of(row).name,
                SpanContext(trace, int(r["span_id"]), False, TraceFlags(1)),
                SpanContext(trace, parent, False, TraceFlags(1)) if parent else None,
                resource,
                constant_attributes(batch.descriptor_of(row), int(r["source"]), int(r["flags"]), "") | numbers,
                start_time=int(r["start"]) + batch.wall,
                end_time=int(r["end"]) + batch.wall,
            )
        )
    return out


def _functions(calls: int, path: Path) -> VizTracer:
    """Return a tracer that holds *calls* function calls."""

    def nothing() -> None:
        pass

    tracer = VizTracer(output_file=str(path), verbose=0, tracer_entries=calls + 1000)
    tracer.start()
    for _ in range(calls):
        nothing()
    tracer.stop()
    return tracer


def _cases(folder: Path) -> tuple[dict[str, Callable[[], float]], int]:
    """Return what takes the seconds of each case once, and how many spans each writes."""
    batches = [batch_of(rank) for rank in range(RANKS)]
    spans = [span for batch in batches for span in sdk_spans(batch)]
    path = folder / "ours.json"
    write_chrome(batches, path)
    trace = json.loads(path.read_bytes())

    def ours() -> float:
        begun = perf_counter()
        write_chrome(batches, path)
        return perf_counter() - begun

    def exporter() -> float:
        begun = perf_counter()
        out = ChromeTraceExporter(folder / "exporter.json", max_bytes=0)
        for first in range(0, len(spans), BATCH):
            out.export(spans[first : first + BATCH])
        out.shutdown()
        return perf_counter() - begun

    def dumps() -> float:
        begun = perf_counter()
        (folder / "dumps.json").write_text(json.dumps(trace))
        return perf_counter() - begun

    def viztracer() -> float:
        tracer = _functions(len(spans), folder / "viztracer.json")
        begun = perf_counter()
        tracer.save()
        seconds = perf_counter() - begun
        tracer.clear()
        tracer.terminate()
        return seconds

    return {OURS: ours, EXPORTER: exporter, DUMPS: dumps, VIZTRACER: viztracer}, len(spans)


def run(rounds: int) -> str:
    """Measure and return the table in markdown."""
    with scratch() as folder:
        cases, spans = _cases(folder)
        seen = in_turn(cases, rounds, spans)
    return table(
        ["case", "spans/s (95 %)", "times the speed of json.dumps (95 %)", "of viztracer (95 %)", "goal"],
        [_row(name, seen) for name in seen],
    )


def _row(name: str, seen: dict[str, list[float]]) -> list[str]:
    own = seen[name]
    ratios = [
        "" if peer == name else ranged(ratio_of_medians(seen[peer], own), len(own), ".2f", "x")
        for peer in (DUMPS, VIZTRACER)
    ]
    return [name, ranged(rate_of(own), len(own), ",.0f"), *ratios, f">= {GOAL:,}" if name == OURS else ""]

"""Run directories, written as drains write them."""

from pathlib import Path

import numpy as np

from otel_dltrace.export.rundir.compaction import compact
from otel_dltrace.export.rundir.host_folder import host_folder_name
from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.operation import OTHER, RANK_STEP, Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, PHASE, Level
from otel_dltrace.model.spans import Process, SpanBatch, empty_rows, fill_ids
from otel_dltrace.model.time import Anchor
from tests.support.runs import ddp

DESCRIPTORS = [
    OTHER,
    RANK_STEP,
    Descriptor(COLLECTIVE, "all_reduce", "0", 2, "gloo", "bucket 0", dtype="float32"),
    Descriptor(PHASE, "PUSH", tensor="w", key=3, queue_type="PUSH"),
]
ERRORS = [("", ""), ("ValueError", "no"), ("OSError", "gone")]


def a_run(root: Path, *, compacted: bool) -> Path:
    """Write a run of two ranks, each on a host of its own."""
    for host, batch in zip("ab", ddp(2, steps=10), strict=True):
        write(root, host, batch, compacted=compacted)
    return root


def write(root: Path, host: str, batch: SpanBatch, *, compacted: bool) -> None:
    """Write what one host's drain would."""
    assert batch.process.bind is not None
    writer = RunWriter(root, host_folder_name(host, "boot"))
    writer.open()
    writer.name_run(batch.process.bind)
    writer.append(batch.process.nonce, batch.rows, batch.descriptors, batch.errors)
    writer.know(batch.process)
    writer.close_segment()
    if compacted:
        compact(writer.folder, writer.number)
    writer.write_summary({"spans": len(batch)}, ended=True)
    writer.close()


def a_process(rank: int = 0, host: str = "node-0") -> Process:
    """Return who writes."""
    bind = Bind("job", "1.00", "demo", rank=rank, world_size=2)
    return Process(rank + 1, bind, host, f"{host}-boot", 7, Anchor(1000, 1_700_000_000_000_000_000, 5))


def rows_of(process: Process, steps: range) -> np.ndarray:
    """Return four spans for each of *steps*: the step, an operation that failed, two phases."""
    rows = empty_rows(4 * len(steps))
    rows["step"] = np.repeat(steps, 4)
    rows["descriptor"] = np.tile([1, 2, 3, 3], len(steps))
    rows["level"] = np.tile([Level.STEP, Level.COLLECTIVE, Level.PHASE, Level.PHASE], len(steps))
    rows["error"] = np.tile([0, 1, 0, 2], len(steps))
    rows["span_no"] = steps.start * 4 + 1 + np.arange(len(rows))
    rows["start"] = 5000 + rows["span_no"] * 10
    rows["end"] = rows["start"] + 7
    fill_ids(rows, DESCRIPTORS, process)
    return rows


def a_writer(root: Path, *processes: Process) -> RunWriter:
    """Return the writer of the first process's host."""
    writer = RunWriter(root, processes[0].host)
    writer.open()
    for process in processes:
        writer.name_run(process.bind)
        writer.know(process)
    return writer


def comparable(rows: np.ndarray, errors: list[tuple[str, str]]) -> list[tuple]:
    """Return rows as tuples, in the order of their numbers, with their errors in words."""
    ordered = rows[np.argsort(rows["span_no"])].copy()
    words = [tuple(errors[n]) for n in ordered["error"].tolist()]
    ordered["error"] = 0
    return list(zip(ordered.tolist(), words, strict=True))


def read_back(root: Path) -> list[tuple]:
    """Return the only process's rows as they are read."""
    (batch,) = read_run(root)
    return comparable(batch.rows, batch.errors)


def write_segments(writer: RunWriter, process: Process, segments: int, steps: int = 10) -> np.ndarray:
    """Write *segments* segments of *steps* steps, each in two batches; return all rows."""
    written = []
    for n in range(segments):
        for half in (range(n * steps, n * steps + steps // 2), range(n * steps + steps // 2, (n + 1) * steps)):
            written.append(rows_of(process, half))
            writer.append(process.nonce, written[-1], DESCRIPTORS, ERRORS)
        writer.close_segment()
    return np.concatenate(written)

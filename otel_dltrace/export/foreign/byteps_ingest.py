"""What BytePS itself wrote of a traced worker: at the run's end its stages come below the operations that we saw."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from otel_dltrace.export.rundir.reader import read_descriptors, read_host
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.formats.comm_json import read_comm
from otel_dltrace.formats.comm_spans import BACKEND, Rows, rows_of
from otel_dltrace.model.arrays import Column, places_in
from otel_dltrace.model.errors import TraceFormatError
from otel_dltrace.model.identity import h64
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, Flag, Level
from otel_dltrace.model.spans import Process, SpanBatch, concatenate, fill_ids

FILE = "comm.json"
_MOST_OFF = 5_000_000
"""From the begin of an operation to that of its total, ns: for as long another thread may keep the interpreter."""


def ingest(writer: RunWriter, traces: Path) -> list[str]:
    """Add to a host's folder what ``<local rank>/comm.json`` below *traces* tells of its workers that run BytePS.

    What another drain has added already is not added again. Return what is missing, a sentence each.

    Raises:
        OSError: A file is there and cannot be read, or the folder cannot be written.
    """
    tables = read_descriptors(writer.folder)
    if not any(_is_ours(d) for table in tables.values() for d in table):
        return []
    parts: dict[int, list[SpanBatch]] = {}
    for batch in read_host(writer.folder):
        parts.setdefault(batch.process.nonce, []).append(batch.take(batch.lookup(_is_ours, bool)))
    notes: list[str] = []
    for part in parts.values():
        operations, author = concatenate(part), author_of(part[0].process)
        if operations is not None and len(operations) and author.nonce not in parts:
            notes += _add(writer, operations, author, traces)
    return notes


def _is_ours(d: Descriptor) -> bool:
    return d.kind == COLLECTIVE and d.backend == BACKEND


def author_of(process: Process) -> Process:
    """Return who BytePS's file is by: *process* as well, whose own span numbers it must not use."""
    return replace(process, nonce=h64(FILE, process.nonce))


def _add(writer: RunWriter, operations: SpanBatch, author: Process, traces: Path) -> list[str]:
    assert author.bind is not None
    path = traces / str(author.bind.local_rank) / FILE
    begun = int(operations["start"].min()) + operations.wall
    if not path.parent.is_dir():
        return [f"BytePS has not written {path}: the folder is missing, and BytePS does not create it"]
    if not path.exists() or path.stat().st_mtime_ns < begun:
        return [f"BytePS has not written {path}: it does when every tensor has reached BYTEPS_TRACE_END_STEP"]
    try:
        comm = read_comm(path.read_bytes())
        stages = _below(rows_of(comm), operations)
    except TraceFormatError as error:
        return [f"{path}: {error}"]
    if not len(stages.rows):
        return [f"{path} holds no stage of a push_pull of this run"]
    fill_ids(stages.rows, stages.descriptors, author)
    writer.append(author.nonce, stages.rows, stages.descriptors, [("", "")])
    writer.know(author)
    return [f"{path}: {note}" for note in (*comm.notes, *stages.notes)]


def _below(read: Rows, operations: SpanBatch) -> Rows:
    """Return the stages of *read*, each below the operation of its tensor and occurrence; others are left out.

    Raises:
        TraceFormatError: The totals begin when none of *operations* does.
    """
    rows = read.rows
    rows["start"] -= operations.wall
    rows["end"] -= operations.wall
    tensors = _numbered(read, operations)
    rows["seq"] += np.uint32(_first(rows, tensors[0], operations.rows, tensors[1]))
    place = places_in(_keys(tensors[0], rows["seq"]), _keys(tensors[1], operations["seq"]))
    is_known = place >= 0
    rows, parents = rows.compress(is_known), operations.rows.take(place.compress(is_known))
    _refuse_others(rows, parents)
    stages = rows["level"] == Level.PARTITION
    rows, parents = rows.compress(stages), parents.compress(stages)
    rows["step"], rows["parent_id"], rows["parent_no"] = parents["step"], parents["span_id"], 0
    rows["flags"] |= np.uint16(Flag.REMOTE)
    return Rows(rows, read.descriptors, read.notes)


def _refuse_others(rows: Column, operations: Column) -> None:
    """Raise if the totals among *rows* do not begin with the *operations* that they would be of.

    BytePS begins a total within the call, but a tensor's first one on a thread, once all workers have the tensor.
    """
    totals = rows["level"] == Level.COLLECTIVE
    start, ours = rows["start"][totals], operations[totals]
    latest = np.where(ours["seq"] == 1, ours["end"], ours["start"])
    off = np.maximum(ours["start"] - start, start - latest).clip(0)
    if len(off) and np.median(off) > _MOST_OFF:
        raise TraceFormatError(
            f"none of it is used, since its push_pulls begin {np.median(off) / 1e6:,.1f} ms (median) off those "
            "of this worker: another machine wrote it, or the clock was set; "
            "give each machine a BYTEPS_TRACE_DIR of its own"
        )


def _numbered(read: Rows, operations: SpanBatch) -> tuple[Column, Column]:
    """Return the number of each row's tensor, in *read* and in *operations*, alike in both."""
    known: dict[str, int] = {}

    def numbered(table: Sequence[str], rows: Column) -> Column:
        numbers = np.array([known.setdefault(name, len(known)) for name in table], np.int64)
        column: Column = numbers[rows["descriptor"]]
        return column

    ours = numbered([d.tensor for d in operations.descriptors], operations.rows)
    return numbered([d.tensor for d in read.descriptors], read.rows), ours


def _first(rows: Column, tensors: Column, operations: Column, of: Column) -> int:
    """Return how many occurrences of each tensor came before the file's first one.

    The file does not say: so each total is the operation of its tensor that began nearest to it, and the median of
    what follows from these holds for all.
    """
    is_total = rows["level"] == Level.COLLECTIVE
    totals, tensors, order = rows[is_total], tensors[is_total], np.lexsort((operations["start"], of))
    of, starts = of[order], operations["start"][order].tolist()
    first, behind = np.searchsorted(of, tensors), np.searchsorted(of, tensors, "right")
    begins = zip(totals["start"].tolist(), first.tolist(), behind.tolist(), strict=True)
    nearest = np.array([_nearest(starts, *one) for one in begins], np.int64)
    is_known = nearest >= 0
    ahead = operations["seq"][order][nearest[is_known]].astype(np.int64) - totals["seq"][is_known]
    return max(0, int(np.median(ahead))) if len(ahead) else 0


def _nearest(starts: Sequence[int], start: int, first: int, behind: int) -> int:
    """Return where from *first* on, and before *behind*, the sorted *starts* are nearest to *start*; -1 for nowhere."""
    place = bisect(starts, start, first, behind)
    return min(range(max(place - 1, first), min(place + 1, behind)), key=lambda at: abs(starts[at] - start), default=-1)


def _keys(tensors: Column, occurrences: Column) -> Column:
    keys: Column = tensors.astype(np.int64) << 32 | occurrences.astype(np.int64)
    return keys

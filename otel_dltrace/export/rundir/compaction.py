"""Segments become Parquet by step range, which DuckDB, Spark and pandas read; a quota bounds the host's share."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from otel_dltrace.export.files import renamed, sync_folder
from otel_dltrace.export.rundir import columns
from otel_dltrace.export.rundir.arrow_files import UNREADABLE, open_parquet, read_through
from otel_dltrace.export.rundir.reader import read_descriptors, read_processes
from otel_dltrace.export.rundir.span_files import (
    PARQUETS,
    SEGMENTS,
    newest_segment,
    replaced_segments,
    segment_number,
    span_files,
)
from otel_dltrace.model.arrays import Column, distinct
from otel_dltrace.model.arrays import compact as compact_codes
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import OTHER, Descriptor
from otel_dltrace.model.semconv import Level

COMPACT_SEGMENTS = 2
"""Few, since rings are not read while segments become Parquet: about a second for each."""
_READABLE = ("name", "kind", "group", "backend", "tensor", "queue_type", "activity", "dtype")
_NUMBERS = ("group_size", "key")
_EACH_ITS_OWN = ("span_no", "start", "end", "start_unix_ns", "span_id")
"""Columns in which hardly a value comes twice: to look for those that do costs a fifth of the writing."""
_GROWING = ("span_no", "start", "end", "start_unix_ns")
"""Columns of which the differences are small: they take a tenth less room."""
_BELOW = b"kept_below"
"""In a Parquet's metadata: the level from which on the quota took its spans."""


def compact(folder: Path, open_segment: int | None = None) -> int:
    """Turn the closed segments in *folder* into one Parquet file; return how many it replaces.

    The file names them, so a kill between writing it and removing them shows no span twice.
    *open_segment* is still being written; one that is damaged stays, and the report names it.
    """
    for path in folder.glob(f".{PARQUETS}.*"):
        path.unlink()  # half written by a drain that was killed
    _remove(folder, [folder / name for path in folder.glob(PARQUETS) for name in replaced_segments(path)])
    closed = [p for p in sorted(folder.glob(SEGMENTS)) if segment_number(p) != open_segment]
    paths = {path: batches for path in closed if (batches := _batches_in(path)) is not None}
    if any(paths.values()):
        table = pa.Table.from_batches([batch for batches in paths.values() for batch in batches]).sort_by(
            [("step", "ascending"), ("process", "ascending"), ("start", "ascending")]
        )
        readable = _with_names(table, folder)
        metadata = {
            b"segments": ",".join(p.name for p in paths).encode(),
            b"schema": str(columns.SCHEMA_VERSION).encode(),
        }
        target = _free_name(folder, *_step_range(table))
        _write(readable.replace_schema_metadata(metadata), target)
    _remove(folder, paths)
    return len(paths)


def _remove(folder: Path, replaced: Iterable[Path]) -> None:
    """Remove the segments that a Parquet in *folder* replaces, once no crash of the host can take that one away."""
    there = [path for path in replaced if path.exists()]
    if there:
        sync_folder(folder)
    for path in there:
        path.unlink()


def _batches_in(segment: Path) -> list[pa.RecordBatch] | None:
    """Return what is in *segment*, whose end a kill may have torn; None if it is damaged, or somebody else's."""
    try:
        if not segment.stat().st_size:
            return []
        stream = read_through(segment)
    except UNREADABLE:
        return None
    return stream.batches if stream.is_read and stream.schema.equals(columns.SPANS) else None


def _write(table: pa.Table, target: Path) -> None:
    names = table.column_names
    with renamed(target) as out:
        pq.write_table(
            table,
            out,
            compression="zstd",
            write_page_checksum=True,
            use_dictionary=[name for name in names if name not in _EACH_ITS_OWN],
            column_encoding={name: "DELTA_BINARY_PACKED" for name in names if name in _GROWING},
        )
        out.flush()
        os.fsync(out.fileno())  # what it replaces is removed at once


def _with_names(table: pa.Table, folder: Path) -> pa.Table:
    """Add what the numbers mean, for readers that are not ours: rank, role, wall start, and the descriptor's words."""
    names, processes = read_descriptors(folder), read_processes(folder)
    nonces, who = _processes_in(table)
    numbers, descriptor = distinct(columns.numbers_of(table.column("descriptor")))
    pairs, which = compact_codes(who * len(numbers) + descriptor, len(nonces) * len(numbers))
    words = [
        _descriptor(names, int(nonces[pair // len(numbers)]), int(numbers[pair % len(numbers)]))
        for pair in pairs.tolist()
    ]
    for field in _READABLE:
        table = table.append_column(field, _looked_up(which, [getattr(d, field) for d in words]))
    for field in _NUMBERS:
        values = columns.with_gaps([getattr(d, field) for d in words], pa.int64())
        table = table.append_column(field, values.take(columns.numbers(which, pa.int64())))
    known = [processes.get(nonce) for nonce in nonces.tolist()]
    binds = [process.bind if process else None for process in known]
    offsets = columns.with_gaps([process.anchor.offset if process else None for process in known], pa.int64())
    ranks = columns.with_gaps([bind.rank if bind else None for bind in binds], pa.int32())
    at = columns.numbers(who, pa.int64())
    table = table.append_column("rank", ranks.take(at))
    table = table.append_column("role", _looked_up(who, [bind.role if bind else None for bind in binds]))
    return table.append_column("start_unix_ns", pc.add(table.column("start"), offsets.take(at)))


def _processes_in(table: pa.Table) -> tuple[Column, Column]:
    """Return the nonces in *table*, and for each row which of them it has; by hashing, since there are few."""
    encoded = table.column("process").combine_chunks().dictionary_encode()
    which = columns.numbers_of(pa.chunked_array([encoded.indices]))
    return columns.numbers_of(pa.chunked_array([encoded.dictionary])), which.astype(np.intp)


def _looked_up(numbers: Column, values: list[str | None]) -> pa.DictionaryArray:
    """Return the text of each number, shape (n,): millions of rows share few texts."""
    texts = sorted({value for value in values if value is not None})
    at = {text: i for i, text in enumerate(texts)}
    places = columns.with_gaps([None if value is None else at[value] for value in values], pa.int32())
    return pa.DictionaryArray.from_arrays(places.take(columns.numbers(numbers, pa.int64())), columns.strings(texts))


def _descriptor(names: dict[int, list[Descriptor]], nonce: int, number: int) -> Descriptor:
    table = names.get(nonce, [])
    return table[number] if number < len(table) else OTHER


def _step_range(table: pa.Table) -> tuple[int, int]:
    steps = columns.numbers_of(table.column("step"))
    steps = steps[steps != NO_STEP]
    return (int(steps.min()), int(steps.max())) if len(steps) else (0, 0)


def _free_name(folder: Path, low: int, high: int) -> Path:
    path = folder / f"steps-{low:08d}-{high:08d}.parquet"
    n = 1
    while path.exists():  # late spans of steps that were compacted before
        path = folder / f"steps-{low:08d}-{high:08d}.{n}.parquet"
        n += 1
    return path


def spans_bytes(folder: Path) -> int:
    """Return how many bytes the spans in *folder* fill."""
    return sum(path.stat().st_size for path in span_files(folder))


def keep_within(folder: Path, quota: int) -> Iterator[int]:
    """Drop the oldest detail until *folder* is within *quota* bytes; yield how many spans went, as they go.

    Phases and partitions go first, those first that were written first, then operations; steps and stages stay.
    """
    sizes = {path: path.stat().st_size for path in span_files(folder)}
    for level in (Level.PHASE, Level.COLLECTIVE):
        for path in sorted((path for path in sizes if path.suffix == ".parquet"), key=newest_segment):
            if sum(sizes.values()) <= quota:
                return
            yield _drop_from(path, level)
            sizes[path] = path.stat().st_size


def _drop_from(parquet: Path, level: int) -> int:
    """Drop the spans of *level* and finer; return how many went. The file says so, and is not read again for it."""
    try:
        with open_parquet(parquet) as file:
            metadata = file.schema_arrow.metadata or {}
            if not columns.are_spans(file.schema_arrow) or int(metadata.get(_BELOW, b"255")) <= level:
                return 0
            table = file.read()
    except (*UNREADABLE, ValueError):
        return 0  # written anew it would no longer be known to be damaged
    kept = table.filter(pc.less(table.column("level"), int(level)))
    _write(kept.replace_schema_metadata({**metadata, _BELOW: str(int(level)).encode()}), parquet)
    return int(table.num_rows - kept.num_rows)

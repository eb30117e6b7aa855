"""Segments become Parquet by step range, which DuckDB, Spark and pandas read; a quota bounds the host's share."""

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from otel_dltrace.export import columns
from otel_dltrace.export.files import read_stream
from otel_dltrace.export.run_reader import read_descriptors, read_processes, replaced_segments, span_files
from otel_dltrace.export.rundir import PARQUETS, SEGMENTS, segment_number
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import OTHER, Descriptor
from otel_dltrace.model.semconv import Level

_READABLE = ("name", "kind", "group", "backend", "tensor", "queue_type", "activity", "dtype")


def compact(folder: Path, open_segment: int | None = None) -> int:
    """Turn the closed segments in *folder* into one Parquet file; return how many there were.

    The file names the segments it replaces, so a kill between writing it and removing them shows
    no span twice. *open_segment* is still being written.
    """
    for path in folder.glob(PARQUETS):
        for name in replaced_segments(path):
            (folder / name).unlink(missing_ok=True)
    paths = [p for p in sorted(folder.glob(SEGMENTS)) if segment_number(p) != open_segment]
    tables = [table for path in paths if (table := read_stream(path)) is not None]
    if tables:
        table = pa.concat_tables(tables).sort_by(
            [("step", "ascending"), ("process", "ascending"), ("start", "ascending")]
        )
        readable = _with_names(table, folder)
        metadata = {
            b"segments": ",".join(p.name for p in paths).encode(),
            b"schema": str(columns.SCHEMA_VERSION).encode(),
        }
        target = _free_name(folder, *_step_range(table))
        _write(readable.replace_schema_metadata(metadata), target)
    for path in paths:
        path.unlink()
    return len(paths)


def _write(table: pa.Table, target: Path) -> None:
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    pq.write_table(table, partial, compression="zstd")
    partial.replace(target)


def _with_names(table: pa.Table, folder: Path) -> pa.Table:
    """Add what the numbers mean, for readers that are not ours: rank, role, wall start, and the descriptor's words."""
    names, processes = read_descriptors(folder), read_processes(folder)
    numbers = list(zip(table.column("process").to_pylist(), table.column("descriptor").to_pylist(), strict=True))
    words = {pair: _descriptor(names, *pair) for pair in set(numbers)}
    for field in _READABLE:
        values = pa.array([getattr(words[pair], field) for pair in numbers], pa.string())
        table = table.append_column(field, values.dictionary_encode())
    binds = {nonce: process.bind for nonce, process in processes.items()}
    ranks = [bind.rank if (bind := binds.get(nonce)) else None for nonce, _ in numbers]
    roles = [bind.role if (bind := binds.get(nonce)) else None for nonce, _ in numbers]
    offsets = [processes[nonce].anchor.offset if nonce in processes else None for nonce, _ in numbers]
    table = table.append_column("rank", pa.array(ranks, pa.int32()))
    table = table.append_column("role", pa.array(roles, pa.string()).dictionary_encode())
    wall = pc.add(table.column("start"), pa.array(offsets, pa.int64()))
    return table.append_column("start_unix_ns", wall)


def _descriptor(names: dict[int, list[Descriptor]], nonce: int, number: int) -> Descriptor:
    table = names.get(nonce, [])
    return table[number] if number < len(table) else OTHER


def _step_range(table: pa.Table) -> tuple[int, int]:
    steps = table.filter(pc.not_equal(table.column("step"), NO_STEP)).column("step")
    if not len(steps):
        return 0, 0
    ends = pc.min_max(steps).as_py()
    return ends["min"], ends["max"]


def _free_name(folder: Path, low: int, high: int) -> Path:
    path = folder / f"steps-{low:08d}-{high:08d}.parquet"
    n = 1
    while path.exists():  # late spans of steps that were compacted before
        path = folder / f"steps-{low:08d}-{high:08d}.{n}.parquet"
        n += 1
    return path


def keep_within(folder: Path, quota: int) -> int:
    """Drop the oldest detail until *folder* is within *quota* bytes; return how many spans went.

    Phases and partitions go first, oldest steps first, then operations; steps and stages stay.
    """
    dropped = 0
    for level in (Level.PHASE, Level.COLLECTIVE):
        for path in sorted(folder.glob(PARQUETS)):
            if sum(p.stat().st_size for p in span_files(folder)) <= quota:
                return dropped
            table = pq.read_table(path)
            kept = table.filter(pc.less(table.column("level"), int(level)))
            if kept.num_rows < table.num_rows:
                _write(kept.replace_schema_metadata(table.schema.metadata), path)
                dropped += table.num_rows - kept.num_rows
    return dropped

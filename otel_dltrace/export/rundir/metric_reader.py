"""Read the metrics of a run directory back: one batch per host, whatever state its writers left it in."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from otel_dltrace.export.metrics.segments import METRICS, NO_ATTRIBUTES, SCHEMA
from otel_dltrace.export.rundir.arrow_files import read_stream
from otel_dltrace.export.rundir.reader import host_folders, read_processes
from otel_dltrace.export.rundir.span_files import segment_number
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.metric_batch import MetricBatch


def read_metrics(run: Path) -> list[MetricBatch]:
    """Return the metrics of *run*, one batch for each host that has any, ordered by time.

    Raises:
        RunNotFoundError: There is no run directory at *run*.
    """
    return [batch for folder in host_folders(run) if len(batch := read_host_metrics(folder))]


def read_host_metrics(folder: Path) -> MetricBatch:
    """Return the metrics in a host's *folder*, ordered by time; each value once, though a drain was killed.

    What is no number, or endless, is left out: no sampler has seen it.
    """
    paths = sorted(folder.glob(METRICS), key=segment_number)
    tables = [table for path in paths if (table := read_stream(path)) is not None and table.schema.equals(SCHEMA)]
    table = pa.concat_tables(tables) if tables else SCHEMA.empty_table()
    process = next(iter(read_processes(folder).values()), None)
    metric, metrics = _coded(table.column("metric"))
    attribute, attributes = _coded(table.column("attributes"))
    plain = {name: table.column(name).to_numpy() for name in ("time", "rank", "step", "value")}
    batch = MetricBatch(
        **plain,
        metric=metric,
        attribute=attribute,
        metrics=metrics,
        attributes=tuple("" if text == NO_ATTRIBUTES else text for text in attributes),
        host=process.host if process else folder.name,
        boot_id=process.boot_id if process else "",
        wall=process.anchor.offset if process else 0,
    )
    return _each_once(batch.take(np.isfinite(batch.value)))


def _each_once(batch: MetricBatch) -> MetricBatch:
    """Return *batch* ordered by time; a drain that took over may have written some values again."""
    columns = np.stack(
        [batch.value.view(np.int64), batch.attribute, batch.step, batch.rank, batch.metric, batch.time], dtype=np.int64
    )
    order = np.lexsort(columns)
    ordered = columns[:, order]
    is_new = np.append(True, (ordered[:, 1:] != ordered[:, :-1]).any(axis=0))
    return batch.take(order[is_new[: len(order)]])


def _coded(column: pa.ChunkedArray) -> tuple[Column, tuple[str, ...]]:
    """Return *column*'s texts as numbers, shape (n,), and what they stand for."""
    coded = pa.concat_arrays([*column.cast(pa.string()).chunks, pa.array([], pa.string())]).dictionary_encode()
    return np.asarray(coded.indices.to_numpy(zero_copy_only=False), np.int32), tuple(coded.dictionary.to_pylist())

"""Who wrote a host's spans, by the columns of its Parquet files: for where its drain.json does not say it."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from otel_dltrace.export.files import read_object
from otel_dltrace.export.rundir import columns
from otel_dltrace.export.rundir.arrow_files import UNREADABLE, open_parquet
from otel_dltrace.export.rundir.drain_json import read_bind, whole
from otel_dltrace.export.rundir.span_files import PARQUETS
from otel_dltrace.model.spans import Process
from otel_dltrace.model.time import Anchor

_COLUMNS = ["process", "start", "rank", "role", "start_unix_ns"]


def authors(folder: Path) -> dict[int, Process]:
    """Return the processes whose rank and role are in the rows of *folder*; their job is that of the run."""
    run = read_object(folder.parents[1] / "run.json")
    found = {}
    for path in sorted(folder.glob(PARQUETS)):
        for row in _first_rows(path):
            with suppress(KeyError, TypeError):  # not known when the file was written, or none of ours
                found[row["process"]] = _process(run, row, folder.name)
    return found


def _first_rows(path: Path) -> list[dict[str, Any]]:
    """Return a row of each process in *path*."""
    try:
        with open_parquet(path) as file:
            if not columns.are_spans(file.schema_arrow, _COLUMNS[:2]):
                return []
            table = file.read(_COLUMNS)
    except UNREADABLE:
        return []
    if columns.has_gaps(table.select(_COLUMNS[:2])):
        return []
    _, first = np.unique(columns.numbers_of(table.column("process")), return_index=True)
    rows: list[dict[str, Any]] = table.take(columns.numbers(first.astype(np.int64), pa.int64())).to_pylist()
    return rows


def _process(run: dict[str, Any], row: dict[str, Any], host: str) -> Process:
    bind = read_bind({"job": "", "generation": "", **run, "rank": row["rank"], "role": row["role"]})
    return Process(row["process"], bind, host, anchor=whole(Anchor(row["start"], row["start_unix_ns"], 0)))

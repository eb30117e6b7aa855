"""Folders of hosts that somebody has copied inside their run: what is in them would count twice."""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

from otel_dltrace.export.rundir.columns import numbers_of
from otel_dltrace.export.rundir.span_files import NAMES, span_files
from otel_dltrace.export.rundir.span_tables import read_table
from otel_dltrace.model.arrays import Column
from otel_dltrace.record.ring_file import open_for_reading, version_of

_HEAD = 1 << 13
"""Bytes of the names' file: behind the schema is the first process that described anything, which no other host has."""


def copies_among(folders: Sequence[Path]) -> dict[Path, Path]:
    """Return those of *folders* whose spans are all in another one of them as well, which is their value."""
    alike: dict[bytes, list[Path]] = {}
    for folder in folders:
        with suppress(OSError), os.fdopen(open_for_reading(folder / NAMES), "rb") as names:
            alike.setdefault(names.read(_HEAD), []).append(folder)
    # The drain's own name is shorter than what file managers make of it.
    groups = (sorted(group, key=lambda path: (len(path.name), path.name)) for group in alike.values())
    return {copy: group[0] for group in groups for copy in group[1:] if _has_all_of(group[0], copy)}


def _has_all_of(folder: Path, copy: Path) -> bool:
    """Return whether there are spans in *copy*, and all of them in *folder*: other drains of a host have others."""
    ids = _ids_in(copy, version_of(copy))
    return bool(len(ids)) and bool(np.isin(ids, _ids_in(folder, version_of(folder))).all())


@lru_cache(maxsize=16)
def _ids_in(folder: Path, _version: tuple[int, int]) -> Column:
    tables = (read_table(path, ["span_id"]) for path in span_files(folder))
    found = [numbers_of(table.column("span_id")) for table in tables if table is not None]
    return np.concatenate([np.zeros(0, np.uint64), *found])

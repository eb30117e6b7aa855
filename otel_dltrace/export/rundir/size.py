"""How much of a run can be looked at at once: who analyses it holds it in memory."""

from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import numpy as np

from otel_dltrace.export.memory import available_memory
from otel_dltrace.export.rundir.columns import numbers_of
from otel_dltrace.export.rundir.reader import host_folders, read_processes
from otel_dltrace.export.rundir.span_files import held_files, span_files
from otel_dltrace.export.rundir.span_tables import read_table
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.plan import Window

SPAN_BYTES = 520
"""What a report holds for each span at its most; 80 MB are there before.

That is 450, as measured with a million and with four, and 70, where all are steps, for what is computed once of
their tables.
"""
SPAN_BYTES_ON_DISK = 4
"""What a span takes in a file at least; in a Parquet of many alike it is ten."""
LEAST = 1_000_000
"""So many are tried anyway: what a container's files keep in memory does not count as available, though it is."""


def spans_that_fit() -> int:
    """Return how many spans may be held here."""
    return max(available_memory() // SPAN_BYTES, LEAST)


def latest_steps(run: Path, most: int, ranks: Collection[int] | None = None) -> Window | None:
    """Return the latest steps of *run* that have no more than *most* spans of *ranks* (None: all); None if all fit.

    Of a run without steps all is taken, and of another one step at least; spans outside any step are in no window.

    Raises:
        RunNotFoundError: There is no run directory at *run*.
    """
    if sum(map(_bytes_in, host_folders(run))) <= most * SPAN_BYTES_ON_DISK:
        return None
    steps, counts = _counts(run, ranks)
    inside = steps != NO_STEP
    if counts.sum() <= most or not inside.any():
        return None
    steps, later = steps[inside], np.cumsum(counts[inside][::-1])[::-1]
    first = min(int(np.searchsorted(-later, -most)), len(steps) - 1)
    return Window(((int(steps[first]), int(steps[-1])),))


def newest_steps(run: Path, most: int, among: Window | None) -> Window | None:
    """Return the newest steps of *run*, *most* of them, that are *among* these (None: all); *among* if there is none.

    Raises:
        RunNotFoundError: There is no run directory at *run*.
    """
    steps, _ = _counts(run, None)
    inside = [step for step in steps.tolist() if step != NO_STEP and (among is None or step in among)]
    return Window(((inside[-most:][0], inside[-1]),)) if inside else among


def _bytes_in(folder: Path) -> int:
    sizes = 0
    for path in span_files(folder):
        with suppress(OSError):  # compacted just now, into something smaller
            sizes += path.stat().st_size
    return sizes


def _counts(run: Path, ranks: Collection[int] | None) -> tuple[Column, Column]:
    """Return the steps of *run*, ascending, NO_STEP the last, and how many spans of *ranks* are in each."""
    found = [np.zeros((0, 2), np.int64)]
    for folder in host_folders(run):
        processes = read_processes(folder).values()
        asked = None if ranks is None else [p.nonce for p in processes if p.bind is not None and p.bind.rank in ranks]
        for file in held_files(folder):
            table = read_table(file.source, ["process", "step"])
            if table is not None:
                steps = numbers_of(table.column("step"))
                if asked is not None:
                    steps = steps[np.isin(numbers_of(table.column("process")), np.array(asked, np.uint64))]
                found.append(np.stack(np.unique(steps, return_counts=True), axis=1))
    every = np.concatenate(found)
    known, which = np.unique(every[:, 0], return_inverse=True)
    return known, np.bincount(which, every[:, 1], len(known)).astype(np.int64)

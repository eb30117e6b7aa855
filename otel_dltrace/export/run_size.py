"""How much of a run can be looked at at once: who analyses it holds it in memory."""

from collections.abc import Collection, Iterator
from pathlib import Path

import numpy as np

from otel_dltrace.export.columns import numbers_of
from otel_dltrace.export.metrics.container import available_memory
from otel_dltrace.export.run_reader import host_folders, read_processes, read_table, spans_in
from otel_dltrace.export.span_files import held_files
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.plan import Window

SPAN_BYTES = 400
"""What a report holds for each span, at its most; four million spans took 310 each."""
LEAST = 1_000_000
"""So many are tried anyway: what a container's files keep in memory does not count as available, though it is."""


def spans_that_fit() -> int:
    """Return how many spans may be held here."""
    return max(available_memory() // SPAN_BYTES, LEAST)


def latest_steps(run: Path, most: int, ranks: Collection[int] | None = None) -> Window | None:
    """Return the latest steps of *run* that have no more than *most* spans of *ranks* (None: all); None if all fit.

    Of a run without steps all is taken, and of another one step at least.

    Raises:
        RunNotFoundError: There is no run directory at *run*.
    """
    if sum(_sizes(run)) <= most:
        return None
    steps, counts = _counts(run, ranks)
    if not len(steps) or counts.sum() <= most:
        return None
    later = np.cumsum(counts[::-1])[::-1]
    first = min(int(np.searchsorted(-later, -most)), len(steps) - 1)
    return Window(((int(steps[first]), int(steps[-1])),))


def _sizes(run: Path) -> Iterator[int]:
    """Yield how many spans each file of *run* holds."""
    for folder in host_folders(run):
        for file in held_files(folder):
            try:
                yield max(spans_in(file.source), 0)
            except OSError:  # removed just now
                yield 0


def _counts(run: Path, ranks: Collection[int] | None) -> tuple[Column, Column]:
    """Return the steps of *run*, ascending, and how many spans of *ranks* are in each."""
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
                found.append(np.stack(np.unique(steps[steps != NO_STEP], return_counts=True), axis=1))
    every = np.concatenate(found)
    known, which = np.unique(every[:, 0], return_inverse=True)
    return known, np.bincount(which, every[:, 1], len(known)).astype(np.int64)

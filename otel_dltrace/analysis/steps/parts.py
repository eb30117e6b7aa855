"""Processes of one rank that went on one after the other: a timeline in several files, a job that started again."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.descriptors import Descriptors
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import OTHER
from otel_dltrace.model.spans import SpanBatch, concatenate


def parts_of(batches: Sequence[SpanBatch]) -> list[SpanBatch]:
    """Return those *batches* of one rank whose steps go on where another's end, in the order of the steps.

    Of those that have done the same steps the one with the most of them is taken. If there are several parts, each has
    the steps that it has done alone: what a kill left open may be another one's step.
    """
    if len(batches) == 1:
        return [*batches]
    parts: dict[tuple[int, int], SpanBatch] = {}
    for batch in sorted(batches, key=lambda one: -len(_done(one))):
        steps = _done(batch)
        first, last = (int(steps[0]), int(steps[-1])) if len(steps) else (0, NO_STEP)
        if all(last < begin or end < first for begin, end in parts):
            parts[first, last] = batch
    ordered = [parts[extent] for extent in sorted(parts)]
    if len(ordered) == 1:
        return ordered
    return [batch.take(np.isin(batch["step"], [*_done(batch), NO_STEP])) for batch in ordered]


def is_done(batch: SpanBatch) -> Column:
    """Return which rows are steps that ended well: in one that failed a rank may have waited for minutes for others."""
    failed = batch["flags"] & (s.Flag.TRUNCATED | s.Flag.ERROR) != 0
    done: Column = batch.is_kind(s.STEP) & ~failed & (batch["step"] != NO_STEP)
    return done


def _done(batch: SpanBatch) -> Column:
    """Return the steps that a process has done, ascending."""
    return np.unique(batch["step"][is_done(batch)].astype(np.int64))


def joined(parts: Sequence[SpanBatch]) -> SpanBatch:
    """Return *parts* as one batch, of the last one's process and clock."""
    if len(parts) == 1:
        return parts[0]
    table = Descriptors.of([d for part in parts for d in (*part.descriptors, OTHER)])
    out: list[SpanBatch] = []
    first, reached = 0, np.iinfo(np.int64).min
    for part in parts:
        rows, is_step = part.rows.copy(), part.is_kind(s.STEP)
        # Files that do not tell from when they count, or come in another order, still go on after each other.
        shift = max(part.wall - parts[-1].wall, reached - int(rows["start"][is_step].min()))
        rows["start"] += shift
        rows["end"] += shift
        rows["descriptor"] = np.minimum(rows["descriptor"], len(part.descriptors)) + first
        first, reached = first + len(part.descriptors) + 1, int(rows["end"][is_step].max())
        out.append(replace(part, rows=rows, descriptors=table))
    whole = concatenate(out)
    assert whole is not None
    return whole

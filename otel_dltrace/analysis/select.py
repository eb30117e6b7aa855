"""Which part of a run is looked at."""

from collections.abc import Collection, Container, Sequence
from itertools import pairwise

import numpy as np

from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.metric_batch import HOST, MetricBatch
from otel_dltrace.model.spans import SpanBatch

MOST_STRETCHES = 16
"""A sentence names at most so many stretches of numbers: hundreds, as of every other rank, nobody reads."""


def select(
    batches: Sequence[SpanBatch], steps: Container[int] | None = None, ranks: Collection[int] | None = None
) -> list[SpanBatch]:
    """Return *batches* cut to *steps* (anything with ``in``, such as a ``Window``) and *ranks*; None is all.

    Raises:
        RunNotFoundError: A rank is not there, or none of the steps is.
    """
    chosen = list(batches) if ranks is None else _of_ranks(batches, ranks)
    return chosen if steps is None else _in_steps(chosen, steps)


def by_world(batches: Sequence[SpanBatch]) -> dict[str, list[SpanBatch]]:
    """Return *batches* by the world of their processes, by name: each has ranks and steps of its own.

    A process that was never bound is of the first.
    """
    names = sorted({b.process.bind.world for b in batches if b.process.bind}) or [""]
    worlds: dict[str, list[SpanBatch]] = {name: [] for name in names}
    for batch in batches:
        worlds[batch.process.bind.world if batch.process.bind else names[0]].append(batch)
    return worlds


def select_metrics(metrics: Sequence[MetricBatch], batches: Sequence[SpanBatch]) -> list[MetricBatch]:
    """Return *metrics* cut to the time and the ranks of *batches*, with the next sample of each host around them."""
    out = []
    for metric in metrics:
        here = [b for b in batches if (b.process.boot_id, b.process.host) == (metric.boot_id, metric.host) and len(b)]
        if here and len(metric):
            first, last = min(int(b["start"].min()) for b in here), max(int(b["end"].max()) for b in here)
            times = np.unique(metric.time)
            low = times[max(int(np.searchsorted(times, first)) - 1, 0)]
            high = times[min(int(np.searchsorted(times, last)), len(times) - 1)]
            inside = (metric.time >= low) & (metric.time <= high)
            out.append(metric.take(inside & np.isin(metric.rank, [HOST, *(b.rank for b in here)])))
    return out


def _of_ranks(batches: Sequence[SpanBatch], ranks: Collection[int]) -> list[SpanBatch]:
    known = {batch.rank for batch in batches}
    missing = sorted(set(ranks) - known)
    if missing:
        raise RunNotFoundError(f"rank {spell(missing)} is not in this run; it has {spell(known) or 'no ranks'}")
    return [batch for batch in batches if batch.rank in ranks]


def _in_steps(batches: Sequence[SpanBatch], steps: Container[int]) -> list[SpanBatch]:
    chosen = [batch.in_steps(steps) for batch in batches]
    if not any(map(len, chosen)):
        known = {step for batch in batches for step in np.unique(batch["step"]).tolist()} - {NO_STEP}
        has = f"it has steps {spell(known)}" if known else "it has no steps"
        raise RunNotFoundError(f"none of the steps asked for is in this run; {has}")
    return chosen


def spell(numbers: Collection[int]) -> str:
    """Return *numbers* in words: ``0-3, 7``."""
    parts: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1] = parts[-1][0], number
        else:
            parts.append((number, number))
    return spell_stretches(parts)


def spell_stretches(stretches: Sequence[tuple[int, int]]) -> str:
    """Return the numbers of *stretches*, each (first, last), in words, as `spell` does.

    Of those behind the first `MOST_STRETCHES` it says only how many they are.
    """
    told = ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in stretches[:MOST_STRETCHES])
    more = sum(high - low + 1 for low, high in stretches[MOST_STRETCHES:])
    return f"{told} and {more:,} more" if more else told


def gaps(numbers: Collection[int], end: int) -> tuple[tuple[int, int], ...]:
    """Return the (first, last) of each stretch of numbers from 0 to *end* - 1 that are not among *numbers*.

    The cost grows with *numbers* alone: *end* is the world's size as processes claim it, and may be nonsense.
    """
    edges = [-1, *sorted(number for number in {*numbers} if 0 <= number < end), end]
    return tuple((low + 1, high - 1) for low, high in pairwise(edges) if high > low + 1)

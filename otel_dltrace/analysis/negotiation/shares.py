"""Which share of the steps is negotiation: by step, by epoch, and the first ones apart.

A timeline of Horovod tells when rank 0 negotiates, and when an operation runs. Without a coordinator, in MPI, ranks
negotiate by waiting: with b_r, e_r the begin and end of a collective on rank r and L = max b_r, rank r negotiates from
b_r to min(L, e_r) and operates until e_r. Each moment of a rank counts once, however many operations are under way.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.collectives.joined import Joined
from otel_dltrace.analysis.intervals import unions
from otel_dltrace.analysis.spread import Spread, spread
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.spans import SpanBatch

FIRST_STEP, FIRST_EPOCH = "the first step", "the first epoch"
TIMES = np.dtype([(name, "i8") for name in ("rank", "step", "start", "end")])
"""When something went on, on which rank and in which step, ns."""


@dataclass(frozen=True, slots=True)
class Share:
    """Of *steps* steps, each rank's counted, ns, summed over them: *extent* is begin to end of each.

    In *negotiation* something was negotiated, in *operation* an operation ran, in *communication* either.
    """

    steps: int
    extent: int
    negotiation: int
    operation: int
    communication: int


@dataclass(frozen=True, slots=True)
class Numbered:
    """The share of one step, or of one epoch, by its *number*."""

    number: int
    share: Share


@dataclass(frozen=True, slots=True)
class Shares:
    """Of all, of the first epoch (or step: *apart* says which), of the others, of each step and each epoch.

    A part of a run that begins later has no *first*, and all of it is *others*. *per_step* is the time of negotiation
    in a rank's step. Without steps there is *whole* alone, without epochs that the program told there are no *epochs*.
    """

    whole: Share | None = None
    apart: str = FIRST_STEP
    first: Share | None = None
    others: Share | None = None
    per_step: Spread = Spread()
    steps: tuple[Numbered, ...] = ()
    epochs: tuple[Numbered, ...] = ()


def shares(negotiated: Column, operated: Column, workers: Sequence[SpanBatch]) -> Shares:
    """Return the shares of what was *negotiated* and *operated* (`TIMES`) in the steps of *workers*."""
    both = np.concatenate((negotiated, operated))
    if not len(both):
        return Shares()
    if not (both["step"] != NO_STEP).any():
        return Shares(_total(_by_rank_step(negotiated, operated, {})[1], steps=0))
    negotiated, operated = (times[times["step"] != NO_STEP] for times in (negotiated, operated))
    extents = _extents(workers)
    steps, figures = _by_rank_step(negotiated, operated, extents)
    epochs = epochs_of(workers)
    of_step = np.array([epochs.get(step, -1) for step in steps.tolist()], np.int64)
    has_epochs = bool((of_step >= 0).all()) and len(np.unique(of_step)) > 1
    # Of the steps that these workers did, not of those alone that a timeline, begun later, has.
    begun = min((step for _, step in extents), default=0)
    first_epoch = min(epochs.values(), default=0)
    is_first = of_step == first_epoch if has_epochs else steps == 0
    is_first &= begun == 0 or (has_epochs and first_epoch == 0)
    return Shares(
        _total(figures),
        FIRST_EPOCH if has_epochs else FIRST_STEP,
        _total(figures[is_first]),
        _total(figures[~is_first]),
        spread(figures[:, 1]),
        _numbered(steps, figures),
        _numbered(of_step, figures) if has_epochs else (),
    )


def waited(joined: Joined) -> tuple[Column, Column]:
    """Return what was negotiated and operated (`TIMES`) of collectives that nobody coordinates."""
    negotiated, operated = np.zeros(len(joined.rows), TIMES), np.zeros(len(joined.rows), TIMES)
    latest = joined.to_rows(joined.reduce(np.maximum, joined["start"]))
    reached = np.clip(latest, joined["start"], joined["end"])
    for times, start, end in ((negotiated, joined["start"], reached), (operated, reached, joined["end"])):
        times["rank"], times["step"], times["start"], times["end"] = joined["rank"], joined["step"], start, end
    return negotiated, operated


def in_steps(times: Column) -> Column:
    """Return those of *times* that are in steps, or all where none is: what comes before the first is not training."""
    with_step = times["step"] != NO_STEP
    return times[with_step] if with_step.any() else times


def epochs_of(workers: Iterable[SpanBatch]) -> dict[int, int]:
    """Return the epoch of each step of which a rank tells it."""
    found: dict[int, int] = {}
    for batch in workers:
        own = batch.rows[batch.is_rank_step]
        own = own[own["b"] >= 0]
        found.update(zip(own["step"].tolist(), own["b"].tolist(), strict=True))
    return found


def covered(*times: Column) -> int:
    """Return how much time of the ranks any of *times* covers, each of its own time; fields as in `TIMES`."""
    both = np.concatenate(times)
    ranks, group = np.unique(both["rank"], return_inverse=True)
    return int(unions(group, both["start"], both["end"], len(ranks)).sum())


def _by_rank_step(
    negotiated: Column, operated: Column, extents: Mapping[tuple[int, int], int]
) -> tuple[Column, Column]:
    """Return the step of each (rank, step), and its extent, negotiation, operation and communication, (k, 4)."""
    both = np.concatenate((negotiated, operated))
    lowest = both["rank"].min()
    width = both["rank"].max() - lowest + 1
    keys, group = np.unique(both["step"] * width + both["rank"] - lowest, return_inverse=True)
    steps, ranks = keys // width, keys % width + lowest
    count, apart = len(keys), len(negotiated)
    parts = [
        unions(group[which], both["start"][which], both["end"][which], count)
        for which in (slice(0, apart), slice(apart, None), slice(None))
    ]
    pairs = zip(ranks.tolist(), steps.tolist(), parts[2].tolist(), strict=True)
    extent = np.array([extents.get((rank, step), covered) for rank, step, covered in pairs], np.int64)
    return steps, np.column_stack((extent, *parts))


def _extents(workers: Iterable[SpanBatch]) -> dict[tuple[int, int], int]:
    found: dict[tuple[int, int], int] = {}
    for batch in workers:
        own = batch.rows[batch.is_rank_step]
        lengths = (own["end"] - own["start"]).tolist()
        found.update({(batch.rank, step): length for step, length in zip(own["step"].tolist(), lengths, strict=True)})
    return found


def _total(figures: Column, steps: int | None = None) -> Share | None:
    if not len(figures):
        return None
    return Share(len(figures) if steps is None else steps, *(int(total) for total in figures.sum(axis=0)))


def _numbered(numbers: Column, figures: Column) -> tuple[Numbered, ...]:
    """Return the share of each of *numbers*, ascending: the sums of its *figures*."""
    distinct, place, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    sums = np.zeros((len(distinct), figures.shape[1]), np.int64)
    np.add.at(sums, place, figures)
    rows = zip(distinct.tolist(), counts.tolist(), sums.tolist(), strict=True)
    return tuple(Numbered(number, Share(count, *times)) for number, count, times in rows)

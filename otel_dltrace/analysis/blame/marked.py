"""The phases that a program marks itself (`phase()`): how long they take, and which of them is behind a slow stage."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.blame.excess import beside_the_rest
from otel_dltrace.analysis.intervals import covered
from otel_dltrace.analysis.spread import Spread, spread
from otel_dltrace.analysis.steps.blocked import blocked_at
from otel_dltrace.analysis.steps.own import columns
from otel_dltrace.analysis.steps.table import StepTable, worker_batches
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, grouped
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import OTHER
from otel_dltrace.model.spans import SpanBatch

MOST_OF_IT = 0.5
"""A phase is behind what a rank's stage exceeds the others' by if it makes up this share of it."""
ABOUT_ALL = 0.9
_OURS = frozenset((s.WAIT, s.GC, s.EXIT))


@dataclass(frozen=True, slots=True)
class RankPhase:
    """One phase on one rank, ns: *per_step* is its time in a step, the mean over all of the rank's, 0 without steps."""

    rank: int
    count: int
    per_step: int


@dataclass(frozen=True, slots=True)
class PhaseRow:
    """One phase, by its name: *count* is the (least, most) of any rank, *time* (ns) that of one, over all ranks."""

    name: str
    count: tuple[int, int]
    time: Spread
    ranks: tuple[RankPhase, ...]


def marked_phases(batches: Sequence[SpanBatch], tables: Sequence[StepTable]) -> tuple[PhaseRow, ...]:
    """Return the phases that the program marks, the one that took the most time first."""
    num_steps = {t.rank: len(t.steps) for t in tables}
    found: dict[str, dict[int, list[SpanBatch]]] = {}
    for batch in worker_batches(batches):
        for name, part in _by_name(batch.take(_is_marked(batch))).items():
            found.setdefault(name, {}).setdefault(batch.rank, []).append(part)
    rows = [_row(name, ranks, num_steps) for name, ranks in found.items()]
    return tuple(sorted(rows, key=lambda row: (-row.time.total, row.name)))


def behind(
    tables: Sequence[StepTable], steps: Column, rank: int, stage: str, excess: int, slow: Sequence[int] = ()
) -> tuple[str, int]:
    """Return the phase that is most of the *excess* (ns) of *rank* in *stage*, and how much of it; or ``("", 0)``.

    Args:
        tables: One per rank.
        steps: Those in which it exceeds the others, in the median.
        rank: The straggler.
        stage: Where it does: a column of `own`.
        excess: By how much.
        slow: The ranks that do, as well as this one.
    """
    names = columns(tables[0].stages)[1:]  # `stage_at` tells of no time between steps
    if stage not in names:
        return "", 0
    spent = [_per_step(t, steps, names.index(stage)) for t in tables]
    ranks = [t.rank for t in tables]
    mine, out = ranks.index(rank), np.isin(ranks, slow)[:, None]
    longer = {}
    for name in spent[mine]:
        times = np.stack([of_rank.get(name, np.zeros(len(steps))) for of_rank in spent])[:, :, None]
        longer[name] = float(np.median((times - beside_the_rest(times, out))[mine]))
    most = max(longer.values(), default=0.0)
    if not longer or most < MOST_OF_IT * excess:
        return "", 0
    # Of phases inside one another that are as much longer it is the innermost.
    name = min((n for n in longer if longer[n] >= ABOUT_ALL * most), key=lambda n: float(np.median(spent[mine][n])))
    return name, min(round(longer[name]), excess)


def _per_step(t: StepTable, steps: Column, stage: int) -> dict[str, Column]:
    """Return how long each phase that begins in column *stage* of the table takes in *steps*, without waits, ns."""
    marked = t.batch.take(_is_marked(t.batch) & np.isin(t.batch["step"], steps))
    row = np.searchsorted(t.steps, marked["step"])
    waits = blocked_at(t) if len(marked) else (row, row)
    out = {}
    for name, part in _by_name(marked.take(t.stage_at(row, marked["start"]) == stage)).items():
        times = out[name] = np.zeros(len(steps))
        begin, end = part["start"], part["end"]
        np.add.at(times, np.searchsorted(steps, part["step"]), end - begin - covered(waits, begin, end))
    return out


def _is_marked(batch: SpanBatch) -> Column:
    closed = batch["flags"] & s.Flag.TRUNCATED == 0
    # What found no room among the process's names is `OTHER`, whatever it was: else nobody sees that it is there.
    named = batch.is_block & ~batch.lookup(lambda d: d.name in _OURS, bool)
    marked: Column = closed & (named | batch.lookup(lambda d: d == OTHER, bool))
    return marked


def _by_name(batch: SpanBatch) -> dict[str, SpanBatch]:
    names = [*dict.fromkeys((*(d.name for d in batch.descriptors), OTHER.name))]
    places = {name: place for place, name in enumerate(names)}
    numbers = batch.lookup(lambda d: places[d.name], np.int64)
    return {names[number]: batch.take(which) for number, which in grouped(numbers, np.arange(len(batch)))}


def _row(name: str, ranks: dict[int, list[SpanBatch]], num_steps: dict[int, int]) -> PhaseRow:
    of_ranks = tuple(_of_rank(rank, ranks[rank], num_steps.get(rank, 0)) for rank in sorted(ranks))
    counts = [one.count for one in of_ranks]
    times = np.concatenate([batch["end"] - batch["start"] for batches in ranks.values() for batch in batches])
    return PhaseRow(name, (min(counts), max(counts)), spread(times), of_ranks)


def _of_rank(rank: int, batches: Sequence[SpanBatch], num_steps: int) -> RankPhase:
    times = np.concatenate([(batch["end"] - batch["start"])[batch["step"] != NO_STEP] for batch in batches])
    return RankPhase(rank, sum(map(len, batches)), round(int(times.sum()) / num_steps) if num_steps else 0)

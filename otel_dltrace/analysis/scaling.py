"""How a job scales: the same figures of several runs, with the number of ranks as the axis, the first epoch apart.

As the Horovod analyses of ANL do it: bad scaling may be the first epoch's alone. Of a run of n ranks, against the run
with the fewest, n_0: speed-up = rate / rate_0, efficiency = speed-up / (n / n_0). The rate is that of samples, of all
ranks together; where a run does not tell them it is that of rank-steps, which takes each rank's batch to be as large in
all runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from otel_dltrace.analysis.intervals import union
from otel_dltrace.analysis.negotiation.coordinator import negotiations
from otel_dltrace.analysis.negotiation.shares import FIRST_EPOCH
from otel_dltrace.analysis.spread import Spread, spread
from otel_dltrace.analysis.steps.blocked import blocked
from otel_dltrace.analysis.steps.breakdown import num_warm_up_steps
from otel_dltrace.analysis.steps.table import StepTable, step_tables, worker_batches
from otel_dltrace.analysis.steps.throughput import rank_throughput
from otel_dltrace.analysis.steps.untold import tells_waits
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch

SAMPLES, RANK_STEPS = "samples/s", "rank-steps/s"
WARM_UP = "the first steps"


@dataclass(frozen=True, slots=True)
class Part:
    """Some of a run's steps.

    *step* (ns) is of the slowest rank in each. The shares are of the time of the ranks, of steps and between them:
    *communication* is under way (the union of operations), *exposed* of it blocks the rank (None: cannot be told,
    as where several ranks record no operation, at level ``step``).
    *negotiation* is its share of communication: by Horovod's timeline, without one by the ranks' waits, else None.
    """

    steps: int
    step: Spread
    steps_per_second: float
    samples_per_second: float | None
    communication: float | None
    exposed: float | None
    negotiation: float | None


@dataclass(frozen=True, slots=True)
class RunScaling:
    """One run of *ranks* ranks, of which *told* tell of steps; *first* are the steps called *apart*, *steady* the rest.

    *generation* is how often its job had begun, 0 if that is not known.
    *speed_up* and *efficiency* are None where a rate is not known, *efficiency* also of a run with no more ranks than
    the first.
    """

    name: str
    generation: int
    ranks: int
    told: int
    apart: str
    first: Part | None
    steady: Part
    speed_up: float | None
    efficiency: float | None

    @property
    def title(self) -> str:
        """What it is called among others."""
        return titled(self.name, self.generation)


@dataclass(frozen=True, slots=True)
class Scaling:
    """All runs, the one with the fewest ranks first: it is what the others are compared with, by *rate*."""

    rate: str
    runs: tuple[RunScaling, ...]


def scaling(runs: Mapping[str, Sequence[SpanBatch]]) -> Scaling:
    """Return how the steps of *runs*, batches (one per process) by the run's name, change with the ranks."""
    measured = sorted((_measure(name, batches) for name, batches in runs.items()), key=lambda run: run.ranks)
    by_samples = all(run.steady.samples_per_second is not None for run in measured)
    rates = [_rate(run, by_samples) for run in measured]
    compared = (_compared(run, rate, measured[0].ranks, rates[0]) for run, rate in zip(measured, rates, strict=True))
    return Scaling(SAMPLES if by_samples else RANK_STEPS, tuple(compared))


def generation_of(batches: Sequence[SpanBatch]) -> int:
    """Return how often the job of *batches* had begun, with this run; 0 if that is not known."""
    return max((batch.process.bind.generation_number for batch in batches if batch.process.bind), default=0)


def titled(name: str, generation: int) -> str:
    """Return what tells a run from others: of a job that began anew, also how often it had begun."""
    return name + (f", generation {generation}" if generation > 1 else "")


def _rate(run: RunScaling, by_samples: bool) -> float:
    return (run.steady.samples_per_second or 0.0) if by_samples else run.steady.steps_per_second * run.ranks


def _compared(run: RunScaling, rate: float, base_ranks: int, base_rate: float) -> RunScaling:
    speed_up = rate / base_rate if rate and base_rate else None
    has_more = run.ranks > base_ranks  # with as many, efficiency would be the speed-up again
    efficiency = speed_up * base_ranks / run.ranks if speed_up is not None and has_more else None
    return replace(run, speed_up=speed_up, efficiency=efficiency)


def _measure(name: str, batches: Sequence[SpanBatch]) -> RunScaling:
    tables = [table for table in step_tables(batches) if len(table.steps)]
    ranks = max((b.process.bind.world_size for b in batches if b.process.bind), default=max(1, len(tables)))
    apart, first = _first_steps(tables)
    steps = np.unique(np.concatenate([table.steps for table in tables])) if tables else first
    first, steady = np.intersect1d(first, steps), np.setdiff1d(steps, first)
    return RunScaling(
        name,
        generation_of(batches),
        ranks,
        len(tables),
        apart,
        _part(tables, batches, first, ranks) if len(first) else None,
        _part(tables, batches, steady, ranks),
        None,
        None,
    )


def _first_steps(tables: Sequence[StepTable]) -> tuple[str, Column]:
    """Return what the steps apart are called, and which they are: an epoch where it is known, else the warm-up.

    The first epoch of a part of a run is the run's first if it is number 0, or has the first step.
    """
    for table in tables:
        own = table.batch.rows[table.batch.is_rank_step]
        epochs = own["b"]
        begins = len(epochs) > 0 and 0 in (own["step"].min(), epochs.min())
        if begins and epochs.min() >= 0 and epochs.max() > epochs.min():
            return FIRST_EPOCH, np.unique(own["step"][epochs == epochs.min()].astype(np.int64))
    return WARM_UP, np.arange(num_warm_up_steps(tables))


def _part(tables: Sequence[StepTable], batches: Sequence[SpanBatch], steps: Column, ranks: int) -> Part:
    chosen = [batch.take(np.isin(batch["step"], steps)) for batch in worker_batches(batches)]
    done = [rank_throughput(table, table.rows_of(steps)) for table in tables]
    rates = [rank.rates for rank in done if rank.steps]  # a rank that came later, or left, has no step here
    samples = [rate.samples_per_second for rate in rates if rate.samples_per_second is not None]
    span = sum(int((table.duration + table.between)[table.rows_of(steps)].sum()) for table in tables)
    share = negotiations(chosen).whole
    is_told = ranks < 2 or any(table.batch.lookup(_communicates, bool).any() for table in tables)
    return Part(
        len(steps),
        spread(_slowest(tables, steps)),
        min((rate.steps_per_second for rate in rates), default=0.0),
        sum(samples) if rates and len(tables) == ranks and len(samples) == len(rates) else None,
        (_communication(tables, steps) / span if span else 0.0) if is_told else None,
        _exposed(tables, steps, span) if is_told else None,
        share.negotiation / share.communication if share and share.communication else None,
    )


def _slowest(tables: Sequence[StepTable], steps: Column) -> Column:
    """Return how long each of *steps* took on the rank that took longest, shape (n,)."""
    longest = np.zeros(len(steps), np.int64)
    for table in tables:
        here = table.rows_of(steps)
        np.maximum.at(longest, np.searchsorted(steps, table.steps[here]), table.duration[here])
    return longest


def _communication(tables: Sequence[StepTable], steps: Column) -> int:
    """Return for how long any operation was under way on the ranks, summed over them."""
    return sum(_communicating(table, steps) for table in tables if table.rows_of(steps).any())


def _communicating(table: StepTable, steps: Column) -> int:
    batch, here = table.batch, table.rows_of(steps)
    rows = batch.rows[batch.lookup(_communicates, bool) & np.isin(batch["step"], table.steps[here])]
    rows = rows[rows["flags"] & s.Flag.TRUNCATED == 0]
    # What comes after a loop has the number of its last step, and is not of its time.
    extent = (table.start - table.between)[here].min(), table.end[here].max()
    return union(np.clip(rows["start"], *extent), np.clip(rows["end"], *extent))


def _communicates(d: Descriptor) -> bool:
    return d.kind in (s.COLLECTIVE, s.P2P) or (
        d.backend == h.BACKEND
        and d.kind == s.PHASE
        and (d.activity.startswith(h.NEGOTIATE) or d.activity in h.OPERATIONS)
    )


def _exposed(tables: Sequence[StepTable], steps: Column, span: int) -> float | None:
    """Return the share of the time in which ranks were blocked; a timeline of Horovod alone does not tell it.

    Nor do its operations without their waits.
    """
    if not span or not all((table.stages or not _is_timeline(table)) and tells_waits(table) for table in tables):
        return None
    return float(sum(int(_blocked(table)[table.rows_of(steps)].sum()) for table in tables)) / span


def _blocked(table: StepTable) -> Column:
    """Return for how long each step, and the time before it that counts, is blocked, shape (n,): `MPI_Init` is not."""
    time = blocked(table)
    total: Column = time[:, 1:].sum(axis=1) + np.minimum(time[:, 0], table.between)
    return total


def _is_timeline(table: StepTable) -> bool:
    return any(d.backend == h.BACKEND for d in table.batch.descriptors)

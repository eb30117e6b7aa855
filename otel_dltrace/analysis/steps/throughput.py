"""How much the ranks get done: steps, batches and samples per second, the time between steps included."""

from collections.abc import Sequence
from dataclasses import dataclass

from otel_dltrace.analysis.steps.table import StepTable
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column

_FETCH = s.DATALOADER_NEXT


@dataclass(frozen=True, slots=True)
class Rates:
    """What was done in so many seconds; batches are known where a DataLoader gave them, samples where all told."""

    seconds: float
    steps_per_second: float
    batches_per_second: float | None
    samples_per_second: float | None


@dataclass(frozen=True, slots=True)
class RankThroughput:
    """One rank's *rates* over *steps* steps; *batches* and *samples* are None where they are not known."""

    rank: int
    steps: int
    batches: int | None
    samples: int | None
    rates: Rates


@dataclass(frozen=True, slots=True)
class Throughput:
    """All ranks from step *warm_up* on, and *overall*: the slowest rank's steps, all ranks' batches and samples.

    Ranks that share a batch (tensor parallel ones) each count it.
    """

    warm_up: int
    ranks: tuple[RankThroughput, ...]
    overall: Rates | None


def throughput(tables: Sequence[StepTable], warm_up: int = 0) -> Throughput:
    """Return what each rank of *tables*, and all of them, did per second in the steps from *warm_up* on."""
    ranks = tuple(rank_throughput(t, t.steps >= warm_up) for t in tables)
    return Throughput(warm_up, ranks, _overall([r.rates for r in ranks if r.steps]))


def rank_throughput(t: StepTable, which: Column) -> RankThroughput:
    """Return what one rank did in the steps that *which*, a mask of shape (n,), picks."""
    seconds = float(t.duration[which].sum() + t.between[which].sum()) / 1e9
    steps = int(which.sum())
    batches = None
    if _FETCH in t.stages:
        batches = int(t.pieces[which, t.stages.index(_FETCH)].sum()) or None
    sizes = t.samples[which]
    samples = int(sizes.sum()) if steps and (sizes > 0).all() else None
    rates = (None if count is None else _per(count, seconds) for count in (batches, samples))
    return RankThroughput(t.rank, steps, batches, samples, Rates(seconds, _per(steps, seconds), *rates))


def _per(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _overall(ranks: Sequence[Rates]) -> Rates | None:
    if not ranks:
        return None
    return Rates(
        max(r.seconds for r in ranks),
        min(r.steps_per_second for r in ranks),
        _sum([r.batches_per_second for r in ranks]),
        _sum([r.samples_per_second for r in ranks]),
    )


def _sum(rates: Sequence[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if len(known) == len(rates) else None

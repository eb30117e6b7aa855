"""Which errors ranks and servers had, and who had one first: the others' often follow from it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from otel_dltrace.analysis.collectives.clocks import Clocks, clocks
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.semconv import EXIT, Flag
from otel_dltrace.model.spans import SpanBatch

WORKER = "worker"
_NEVER = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that processes of one *role* had in the span called *operation*.

    *kind* is the exception's class, *message* what is recorded of its text. *ranks* had it, *first* of them before the
    others, *count* times together; *step* (None: outside any) and *after*, ns since the run's first error, are
    of the first time. *other_host*: that was on another host than the run's first error. *vague*: ranks of another host
    than that of *first* had it at about the same time.
    """

    kind: str
    message: str
    operation: str
    role: str
    ranks: tuple[int, ...]
    first: int
    step: int | None
    count: int
    after: int
    other_host: bool = False
    vague: bool = False


@dataclass(frozen=True, slots=True)
class Missing:
    """Worker *ranks* that had no error, and recorded nothing after the step *last* (None: in none)."""

    ranks: tuple[int, ...]
    last: int | None


@dataclass(frozen=True, slots=True)
class Failures:
    """The errors of a run, the first one first. Times of different hosts are known to within *uncertainty* ns.

    *missing* left nothing open, and never began the first error's step, or recorded nothing after one in no step.
    """

    found: tuple[Failure, ...] = ()
    uncertainty: int = 0
    missing: tuple[Missing, ...] = ()


@dataclass(frozen=True, slots=True)
class _Had:
    """How processes had an error: *at*, on *host* and in *step*, by *rank* for the first time; how often, and who.

    *elsewhere* is when one on another host had it first.
    """

    at: int
    rank: int
    step: int
    host: int
    count: int
    ranks: frozenset[int]
    elsewhere: int = _NEVER


def failures(batches: Sequence[SpanBatch], line: Clocks | None = None) -> Failures:
    """Return the errors of *batches*, by the clocks of *line* (theirs, unless told)."""
    line = line or clocks(batches)
    found: dict[tuple[str, str, str, str], _Had] = {}
    for batch, offset, host in zip(batches, line.offsets, line.hosts, strict=True):
        role = _role(batch)
        for error, operation, rows in _kinds(batch):
            first = rows[np.argmin(rows["end"])]
            had = _Had(
                int(first["end"]) + offset, batch.rank, int(first["step"]), host, len(rows), frozenset({batch.rank})
            )
            place = (*error, operation, role)
            found[place] = _together(found[place], had) if place in found else had
    order = sorted(found.items(), key=lambda item: item[1].at)
    told = tuple(_failure(place, had, order[0][1], line.uncertainty) for place, had in order)
    return Failures(told, line.uncertainty, _missing(batches, line, told, order[0][1].at) if told else ())


def _role(batch: SpanBatch) -> str:
    return batch.process.bind.role if batch.process.bind else WORKER


def _missing(batches: Sequence[SpanBatch], line: Clocks, told: Sequence[Failure], at: int) -> tuple[Missing, ...]:
    step = told[0].step
    if step is None and told[0].operation == EXIT:
        return ()  # the cause is there; who had ended before had perhaps ended well
    there = {-1, *(rank for one in told if one.role == WORKER for rank in one.ranks)}
    last: dict[int, int] = {}
    for batch, offset in zip(batches, line.offsets, strict=True):
        if _role(batch) != WORKER or not len(batch):
            continue
        steps = batch["step"].astype(np.int64)
        reached = -1 if step is None else int(steps.max(initial=-1, where=steps != NO_STEP))
        is_later = reached >= step if step is not None else int(batch["end"].max()) + offset + line.uncertainty >= at
        if is_later or (batch["flags"] & Flag.TRUNCATED != 0).any():
            there.add(batch.rank)
        last[batch.rank] = max(reached, last.get(batch.rank, -1))
    by_last: dict[int, list[int]] = {}
    for rank in sorted(last.keys() - there):
        by_last.setdefault(last[rank], []).append(rank)
    return tuple(Missing(tuple(ranks), None if reached < 0 else reached) for reached, ranks in by_last.items())


def _kinds(batch: SpanBatch) -> Iterator[tuple[tuple[str, str], str, Column]]:
    """Yield each error with the name of the span that had it, and the rows."""
    failed = _telling(batch.take((batch["flags"] & Flag.ERROR != 0) | (batch["error"] > 0)))
    found: dict[tuple[tuple[str, str], str], list[int]] = {}
    for i, error in _innermost(failed):
        found.setdefault((error, failed.descriptor_of(i).name), []).append(i)
    for (error, operation), which in found.items():
        yield error, operation, failed.rows.take(which)


def _telling(failed: SpanBatch) -> SpanBatch:
    """Return *failed* without the waits whose operation has failed as well: its name says more."""
    return failed.take(~(failed.is_wait & np.isin(failed["parent_id"], failed["span_id"])))


def _innermost(failed: SpanBatch) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield the rows that had their error first, and it: it passes through the spans around, which have it too."""
    latest: dict[tuple[tuple[str, str], int], int] = {}
    order = np.lexsort((-failed["start"], failed["end"]))
    columns = (failed[name][order].tolist() for name in ("error", "step", "start"))
    for i, number, step, start in zip(order.tolist(), *columns, strict=True):
        # Not by its number: two of them may be one error; and of a damaged run one may not be there.
        error = failed.errors[number] if number < len(failed.errors) else ("", "")
        is_around = start <= latest.get((error, step), start - 1)  # one that has ended before
        if not is_around and not ((error, step) in latest and failed.descriptor_of(i).name == EXIT):
            latest[error, step] = start
            yield i, error


def _together(one: _Had, other: _Had) -> _Had:
    first, then = sorted((one, other), key=lambda had: had.at)
    elsewhere = min(first.elsewhere, then.elsewhere if then.host == first.host else then.at)
    return replace(first, count=one.count + other.count, ranks=one.ranks | other.ranks, elsewhere=elsewhere)


def _failure(place: tuple[str, str, str, str], had: _Had, origin: _Had, uncertainty: int) -> Failure:
    step = None if had.step == NO_STEP else had.step
    ranks, after = tuple(sorted(had.ranks)), had.at - origin.at
    vague = had.elsewhere - had.at <= uncertainty
    return Failure(*place, ranks, had.rank, step, had.count, after, had.host != origin.host, vague)

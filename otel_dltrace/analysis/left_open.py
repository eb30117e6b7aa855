"""What was open when ranks ended, after a hang or a kill: who stood in which operation, and who never came to it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.table import worker_batches
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.attributes import series_name
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch

_Series = tuple[str, str, str, str]
"""What numbers operations together: kind, backend, group, and the tensor where each counts for itself."""


@dataclass(frozen=True, slots=True)
class Standing:
    """An operation that *ranks* had begun and not ended.

    *number* is its place among those that are numbered together, from what each rank had ended (0: not known). Of
    the others that know its group, *absent* ones had not come to it, and *past* ones had ended it. *peer* is the
    other side of a message, -1 if unknown or of none.
    """

    operation: str
    backend: str
    group: str
    tensor: str
    number: int
    peer: int
    ranks: tuple[int, ...]
    absent: tuple[int, ...]
    past: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """*ranks* that had no operation open: in *step*, which they had not ended (None: in none), after *last*."""

    step: int | None
    last: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LeftOpen:
    """Where ranks were when they were cut off, and those that others stood waiting for."""

    standing: tuple[Standing, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()


@dataclass(frozen=True)
class _Rank:
    """The process that recorded last of one rank: its *open* operations, and how many of each series it had *done*."""

    batch: SpanBatch
    open: Column
    done: dict[_Series, int]

    @property
    def rank(self) -> int:
        return self.batch.rank


def left_open(batches: Sequence[SpanBatch]) -> LeftOpen:
    """Return where the ranks of *batches* were that were cut off; nothing where all ended by themselves."""
    latest: dict[int, SpanBatch] = {}
    for batch in sorted((b for b in worker_batches(batches) if len(b)), key=_last_end):
        latest[batch.rank] = batch
    if not any(_is_cut(batch).any() for batch in latest.values()):
        return LeftOpen()
    ranks = [_rank(batch) for _, batch in sorted(latest.items())]
    standing = _standing(ranks)
    awaited = {rank for one in standing for rank in one.absent}
    return LeftOpen(standing, _elsewhere([r for r in ranks if not len(r.open)], awaited))


def _last_end(batch: SpanBatch) -> int:
    return int(batch["end"].max()) + batch.wall


def _is_cut(batch: SpanBatch) -> Column:
    cut: Column = batch["flags"] & s.Flag.TRUNCATED != 0
    return cut


def _rank(batch: SpanBatch) -> _Rank:
    is_operation, cut = batch.is_kind(s.COLLECTIVE, s.P2P), _is_cut(batch)
    open_now = batch.rows[is_operation & cut]
    innermost = open_now[~np.isin(open_now["span_id"], open_now["parent_id"])]
    done: dict[_Series, int] = {}
    over = batch.rows[is_operation & ~cut]
    for number in np.unique(over["descriptor"]).tolist():
        series = _series(batch.descriptors[number])
        most = int(over["seq"][over["descriptor"] == number].max())
        done[series] = max(most, done.get(series, 0))
    return _Rank(batch, innermost[np.argsort(innermost["start"], kind="stable")], done)


def _series(d: Descriptor) -> _Series:
    return d.kind, d.backend, d.group, series_name(d)


# -- in operations ------------------------------------------------------------------------------


def _standing(ranks: Sequence[_Rank]) -> tuple[Standing, ...]:
    found: dict[tuple[_Series, Descriptor, int, int], list[int]] = {}
    for rank in ranks:
        for d, number, peer in _numbered(rank):
            named = Descriptor(d.kind, d.name, d.group, d.group_size, d.backend, d.tensor)
            found.setdefault((_series(d), named, number, peer), []).append(rank.rank)
    here: dict[_Series, set[int]] = {}
    for (series, *_), standing in found.items():
        here.setdefault(series, set()).update(standing)
    out = []
    for (series, d, number, peer), standing in found.items():
        others = [r for r in ranks if r.rank not in here[series] and _knows(r, d)] if d.kind == s.COLLECTIVE else []
        past = tuple(r.rank for r in others if r.done.get(series, 0) >= number > 0)
        absent = tuple(r.rank for r in others if r.rank not in past and number > 0)
        out.append(Standing(d.name, d.backend, d.group, d.tensor, number, peer, tuple(standing), absent, past))
    return tuple(sorted(out, key=lambda one: (one.backend, one.group, one.number, one.operation, one.ranks)))


def _numbered(rank: _Rank) -> Iterable[tuple[Descriptor, int, int]]:
    """Yield the rank's open operations, each with its number in its series and its peer."""
    begun = dict(rank.done)
    for row in rank.open:
        d = rank.batch.descriptors[int(row["descriptor"])]
        series = _series(d)
        counts = d.kind == s.COLLECTIVE and (series not in begun or begun[series] > 0)  # else they have no numbers
        begun[series] = number = int(row["seq"]) or (begun.get(series, 0) + 1 if counts else 0)
        yield d, number, int(row["a"]) if d.kind == s.P2P else -1


def _knows(rank: _Rank, d: Descriptor) -> bool:
    """Return whether *rank* is of the group of *d*: it is everybody's, or the rank has done something in it."""
    bind = rank.batch.process.bind
    is_everybodys = bind is not None and d.group_size == bind.world_size
    return is_everybodys or any(series[1:3] == (d.backend, d.group) for series in rank.done)


# -- elsewhere ----------------------------------------------------------------------------------


def _elsewhere(ranks: Sequence[_Rank], awaited: set[int]) -> tuple[Elsewhere, ...]:
    """Return where *ranks* were, of those that were cut off or are *awaited*."""
    found: dict[tuple[int | None, str], list[int]] = {}
    for rank in ranks:
        cut = _is_cut(rank.batch)
        if cut.any() or rank.rank in awaited:
            steps = rank.batch["step"][cut & rank.batch.is_rank_step]
            at = int(steps[-1]) if len(steps) and int(steps[-1]) != NO_STEP else None
            found.setdefault((at, _last_thing(rank.batch, ~cut)), []).append(rank.rank)
    return tuple(Elsewhere(step, last, tuple(who)) for (step, last), who in found.items())


def _last_thing(batch: SpanBatch, over: Column) -> str:
    """Return the name of what ended last, of what is *over*; a step ends when all in it has, and says the least."""
    which = np.flatnonzero(over & ~batch.is_kind(s.STEP) & ~batch.is_pause)
    return batch.descriptor_of(int(which[np.argmax(batch["end"][which])])).name if len(which) else ""

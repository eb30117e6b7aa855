"""Where ranks stand still, or were when they were cut off: who is in which operation, and who never came to it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.steps.table import worker_batches
from otel_dltrace.analysis.stops.standstill import is_open, without_usual
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, grouped
from otel_dltrace.model.attributes import series_name
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.model.time import LONG_NS

_Series = tuple[str, str, str, str]
"""What numbers operations together: kind, backend, group, and the tensor where each counts for itself."""


@dataclass(frozen=True, slots=True)
class Standing:
    """An operation that *ranks* had begun and not ended.

    *number* is its place among those that are numbered together, from what each rank had ended (0: not known). Of
    the others that know its group, *absent* ones had not come to it, and *past* ones had ended it. *peer* is the
    other side of a message, -1 if unknown or of none. One that *is_asynchronous* blocks nobody until it is waited for.
    *lasts* is for how long (ns) they have been in it, None if they were cut off.
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
    is_asynchronous: bool = False
    lasts: int | None = None


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """*ranks* that blocked in no operation: in *step*, which they had not ended (None: in none), after *last*.

    *lasts* is for how long (ns) they have been in the step, None if they were cut off.
    """

    step: int | None
    last: str
    ranks: tuple[int, ...]
    lasts: int | None = None


@dataclass(frozen=True, slots=True)
class LeftOpen:
    """Where ranks stand, or were when they were cut off, and those that others stand waiting for."""

    standing: tuple[Standing, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()


@dataclass(frozen=True)
class _Rank:
    """The process that recorded last of one rank: its *open* operations, and how many of each series it had *done*.

    *joined*: it has ended a join of Horovod, from which on all ranks count from a number that is not known here.
    """

    batch: SpanBatch
    open: Column
    done: dict[_Series, int]
    joined: bool

    @property
    def rank(self) -> int:
        return self.batch.rank


def left_open(batches: Sequence[SpanBatch]) -> LeftOpen:
    """Return where the ranks of *batches* stand, or were that were cut off; nothing where all go on, or have ended."""
    latest: dict[int, SpanBatch] = {}
    for batch in sorted((b for b in worker_batches(batches) if len(b)), key=_last_end):
        latest[batch.rank] = batch
    ranks = [_rank(batch) for batch in without_usual([batch for _, batch in sorted(latest.items())])]
    if not any(_is_cut(rank.batch).any() for rank in ranks):
        return LeftOpen()
    standing = _standing(ranks)
    awaited = {rank: one.lasts for one in standing for rank in one.absent}
    blocked = {r.rank for r in ranks if (r.open["flags"] & s.Flag.ASYNC == 0).any()}
    return LeftOpen(
        tuple(one for one in standing if one.lasts is None or one.lasts >= LONG_NS),
        _elsewhere([r for r in ranks if r.rank not in blocked], awaited),
    )


def _last_end(batch: SpanBatch) -> int:
    return int(batch["end"].max()) + batch.wall


def _is_cut(batch: SpanBatch) -> Column:
    """Return what was cut off; not in a step that the process has gone past: there the ring overwrote the end."""
    cut: Column = batch["flags"] & s.Flag.TRUNCATED != 0
    steps = batch["step"][batch.is_rank_step]
    overwritten = steps[cut[batch.is_rank_step] & (steps < steps.max(initial=0))]
    return cut & ~np.isin(batch["step"], overwritten)


def _rank(batch: SpanBatch) -> _Rank:
    is_operation, cut = batch.is_kind(s.COLLECTIVE, s.P2P), _is_cut(batch)
    open_now = batch.rows[is_operation & cut]
    innermost = open_now[~np.isin(open_now["span_id"], open_now["parent_id"])]
    done: dict[_Series, int] = {}
    joined = False
    over = batch.rows[is_operation & ~cut]
    for number, seqs in grouped(over["descriptor"], over["seq"]):
        d = batch.descriptors[number]
        series = _series(d)
        joined |= d.backend == h.BACKEND and d.name == h.JOIN.lower()
        done[series] = max(int(seqs.max()), done.get(series, 0))
    for d in _failed_at_last(batch, over):
        done[_series(d)] = done.get(_series(d), 0) + 1
    return _Rank(batch, innermost[np.argsort(innermost["start"], kind="stable")], done, joined)


def _failed_at_last(batch: SpanBatch, over: Column) -> list[Descriptor]:
    """Return the last one of the operations that are *over*, if it failed: it was come to, and has no number."""
    last = over[np.argsort(over["end"], kind="stable")[-1:]]
    failed = last[(last["flags"] & s.Flag.ERROR != 0) & (last["seq"] == 0)]
    return [batch.descriptors[number] for number in failed["descriptor"].tolist()]


def _series(d: Descriptor) -> _Series:
    return d.kind, d.backend, d.group, series_name(d)


# -- in operations ------------------------------------------------------------------------------


def _standing(ranks: Sequence[_Rank]) -> tuple[Standing, ...]:
    found: dict[tuple[_Series, Descriptor, int, int, bool, bool], dict[int, int]] = {}
    for rank in ranks:
        for row, number in _numbered(rank):
            d = rank.batch.descriptors[int(row["descriptor"])]
            named = Descriptor(d.kind, d.name, d.group, d.group_size, d.backend, d.tensor)
            peer = int(row["a"]) if d.kind == s.P2P else -1
            place = _series(d), named, number, peer, bool(row["flags"] & s.Flag.ASYNC), bool(is_open(row))
            found.setdefault(place, {})[rank.rank] = int(row["end"]) - int(row["start"])
    at: dict[tuple[_Series, int], set[int]] = {}
    for (series, _, number, *_), standing in found.items():
        for who in standing:
            at.setdefault((series, who), set()).add(number)
    out = []
    for (series, d, number, peer, is_asynchronous, lives), standing in found.items():
        is_told = d.kind == s.COLLECTIVE and number > 0
        others = [r for r in ranks if is_told and not at.get((series, r.rank), set()) & {0, number} and _knows(r, d)]
        past = tuple(r.rank for r in others if r.done.get(series, 0) >= number)
        absent = tuple(r.rank for r in others if max([r.done.get(series, 0), *at.get((series, r.rank), ())]) < number)
        ranks_of = tuple(standing), absent, past
        lasts = max(standing.values()) if lives else None
        out.append(Standing(d.name, d.backend, d.group, d.tensor, number, peer, *ranks_of, is_asynchronous, lasts))
    return tuple(sorted(out, key=_importance))


def _importance(one: Standing) -> tuple[object, ...]:
    return one.is_asynchronous, one.backend, one.group, one.number, one.operation, one.ranks


def _numbered(rank: _Rank) -> Iterable[tuple[Column, int]]:
    """Yield the rank's open operations, each with its number in its series."""
    begun = dict(rank.done)
    for row in rank.open:
        d = rank.batch.descriptors[int(row["descriptor"])]
        series = _series(d)
        number = int(row["seq"]) or (begun.get(series, 0) + 1 if _counts(rank, d) else 0)
        begun[series] = number
        yield row, number


def _counts(rank: _Rank, d: Descriptor) -> bool:
    """Return whether *d* has the next number of its series: what programs number themselves, or nobody, has not.

    So it is in Horovod of unnamed tensors, and behind a join.
    """
    if d.kind != s.COLLECTIVE or not rank.done.get(_series(d), 1):
        return False
    return d.backend != h.BACKEND or not (rank.joined or h.UNNAMED in d.tensor)


def _knows(rank: _Rank, d: Descriptor) -> bool:
    """Return whether *rank* is of the group of *d*: it is everybody's, or the rank has done something in it."""
    bind = rank.batch.process.bind
    is_everybodys = bind is not None and d.group_size == bind.world_size
    return is_everybodys or any(series[1:3] == (d.backend, d.group) for series in rank.done)


# -- elsewhere ----------------------------------------------------------------------------------


def _elsewhere(ranks: Sequence[_Rank], awaited: Mapping[int, int | None]) -> tuple[Elsewhere, ...]:
    """Return where *ranks* are, of those that were cut off or are *awaited*, which others have been for so long."""
    found: dict[tuple[int | None, str, bool], dict[int, int]] = {}
    for rank in ranks:
        cut = _is_cut(rank.batch)
        if cut.any() or rank.rank in awaited:
            steps = rank.batch.rows[cut & rank.batch.is_rank_step][-1:]
            at = next((int(step) for step in steps["step"] if step != NO_STEP), None)
            lives = bool(is_open(rank.batch.rows).any()) if cut.any() else awaited[rank.rank] is not None
            place = at, _last_thing(rank.batch, ~cut), lives
            found.setdefault(place, {})[rank.rank] = int((steps["end"] - steps["start"]).sum())
    return tuple(
        Elsewhere(step, last, tuple(who), max(who.values()) if lives else None)
        for (step, last, lives), who in found.items()
    )


def _last_thing(batch: SpanBatch, over: Column) -> str:
    """Return the name of what ended last, of what is *over*; a step ends when all in it has, and says the least."""
    which = np.flatnonzero(over & ~batch.is_kind(s.STEP) & ~batch.is_pause)
    return batch.descriptor_of(int(which[np.argmax(batch["end"][which])])).name if len(which) else ""

"""What Horovod's coordinator, or MPI's ranks, tell: the share of negotiation, who was ready last, each activity.

Bars of tensors that Horovod fused are there once for each tensor, so durations are never added up over tensors: what is
shared is the time in which anything at all was negotiated, or communicated (the union of the bars). A rank is late by
how much it is ready after the one before it.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from otel_dltrace.analysis.collectives.readiness import READY, Called, called, is_horovod, is_mpi
from otel_dltrace.analysis.negotiation.hidden import Overlap, overlap_unblocked, overlap_with_stages
from otel_dltrace.analysis.negotiation.phases import Activity, activities, library_of
from otel_dltrace.analysis.negotiation.shares import FIRST_STEP, Numbered, Share, Shares, shares, waited
from otel_dltrace.analysis.negotiation.tensors import ReadyRank, TensorNegotiation, ready_ranks, tensors, tensors_called
from otel_dltrace.analysis.spread import Spread
from otel_dltrace.analysis.steps.table import worker_batches
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, places_in
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch

_FIELDS = ["rank", "step", "start", "end"]
_ROW = np.dtype([(name, "i8") for name in (*_FIELDS, "descriptor")] + [("id", "u8")])


@dataclass(frozen=True, slots=True)
class Negotiations:
    """The shares of negotiation: of all, of the *first* epoch or step, as *apart* says, of the others, of each.

    *per_step* is the time of negotiation in a rank's step. *overlap* is None where it cannot be told what computation
    hides. Where ranks are *called* on several hosts, their clocks agree to *uncertainty* ns.
    *ticked* negotiations say who was ready when; *silent* ones do not, as Horovod's cache answered them.
    Where they are *called*, the ranks themselves say it, all of them, and *ticked* are operations. *coordinated* shares
    are of Horovod's timeline. Without one, and in *backend* ``mpi``, the ranks tell them by their waits; a tensor's
    negotiation is from the first rank that was ready to the last, its bar is each rank's operation. What ranks do
    inside the operations of Horovod they do not know: then there are no activities.
    """

    whole: Share | None
    first: Share | None
    others: Share | None
    per_step: Spread
    overlap: Overlap | None
    ticked: int
    silent: int
    ranks: tuple[ReadyRank, ...]
    tensors: tuple[TensorNegotiation, ...]
    activities: tuple[Activity, ...]
    called: bool = False
    coordinated: bool = True
    backend: str = h.BACKEND
    apart: str = FIRST_STEP
    steps: tuple[Numbered, ...] = ()
    epochs: tuple[Numbered, ...] = ()
    libraries: tuple[Activity, ...] = ()
    uncertainty: int = 0


def negotiations(batches: Sequence[SpanBatch]) -> Negotiations:
    """Return what *batches*, one per process, say of Horovod's operations, or else of MPI's.

    Times are of the host that coordinates, or where nobody tells of that, of the ranks, summed over them.
    """
    workers = worker_batches(batches)
    # Not by its descriptors: a process keeps those of the timeline that another part of the run has.
    told = [batch for batch in workers if batch.lookup(_is_told, bool).any()]
    calls = called(workers)
    if not told:
        for backend, is_one in ((h.BACKEND, is_horovod), (s.MPI, is_mpi)):
            if calls.backend in ("", backend) and any(is_one(d) for batch in workers for d in batch.descriptors):
                return _of_ranks(workers, calls, backend, is_one)
    rows, table = _rows(told, _is_told)
    kinds = np.array([_kind(d) for d in table], np.int8)[rows["descriptor"]]
    negotiated, bars = rows[kinds == _NEGOTIATION], rows[kinds == _BAR]
    negotiated = negotiated[_is_genuine(negotiated, bars, table, _ticked(told))]
    is_called = len(calls.ready) > 0
    ready, whose = (calls.ready, calls.tensors) if is_called else _ready(told, negotiated, table)
    ticked = len(np.unique(ready["group"]))
    libraries = [library_of(d.activity) for d in table]
    activity = rows[kinds == _ACTIVITY]
    return Negotiations(
        **_fields(shares(negotiated[_FIELDS], bars[_FIELDS], told)),
        overlap=overlap_with_stages(bars[_FIELDS], workers),
        ticked=ticked,
        silent=0 if is_called else len(negotiated) - ticked,
        ranks=ready_ranks(ready),
        tensors=tensors(negotiated, bars, table, ready, whose),
        activities=activities([d.activity for d in table], libraries, activity),
        libraries=activities(libraries, libraries, activity),
        called=is_called,
        uncertainty=int(calls.joined.uncertainty.max(initial=0)),
    )


def _of_ranks(
    workers: Sequence[SpanBatch], calls: Called, backend: str, is_one: Callable[[Descriptor], bool]
) -> Negotiations:
    rows, table = _rows(workers, is_one)
    names, libraries = [d.name for d in table], ["MPI"] * len(table)
    inside = rows if backend == s.MPI else rows[:0]  # a rank does not know what Horovod does inside its operations
    return Negotiations(
        **_fields(shares(*waited(calls.joined), workers)),
        overlap=overlap_with_stages(rows[_FIELDS], workers) or overlap_unblocked(workers, is_one),
        ticked=len(calls.tensors),
        silent=0,
        ranks=ready_ranks(calls.ready),
        tensors=tensors_called(calls),
        activities=activities(names, libraries, inside),
        libraries=activities(libraries, libraries, inside),
        called=True,
        coordinated=False,
        backend=backend,
        uncertainty=int(calls.joined.uncertainty.max(initial=0)),
    )


def _fields(found: Shares) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in fields(found)}


_NEGOTIATION, _BAR, _ACTIVITY = range(3)


def _is_told(d: Descriptor) -> bool:
    return d.backend == h.BACKEND and d.kind == s.PHASE and bool(d.activity)


def _kind(d: Descriptor) -> int:
    if d.activity.startswith(h.NEGOTIATE):
        return _NEGOTIATION
    return _BAR if d.activity in h.OPERATIONS else _ACTIVITY


def _rows(batches: Iterable[SpanBatch], which: Callable[[Descriptor], bool]) -> tuple[Column, list[Descriptor]]:
    """Return the complete rows that *which* picks, in Unix ns, and one descriptor table for all."""
    table: list[Descriptor] = []
    parts = [np.zeros(0, _ROW)]
    for batch in batches:
        held = batch.take((batch["flags"] & s.Flag.TRUNCATED == 0) & batch.lookup(which, bool))
        part = np.zeros(len(held), _ROW)
        for name in ("start", "end", "step", "descriptor"):
            part[name] = held[name]
        part["id"], part["rank"] = held["span_id"], batch.rank
        part["start"] += batch.wall
        part["end"] += batch.wall
        part["descriptor"] += len(table)
        table += batch.descriptors
        parts.append(part)
    return np.concatenate(parts), table


def _ticked(batches: Iterable[SpanBatch]) -> Column:
    """Return the ids of the negotiations that have ready ticks."""
    ticks = (batch["parent_id"][batch.lookup(_is_tick, bool)] for batch in batches)
    return np.concatenate([np.zeros(0, np.uint64), *ticks])


def _is_tick(d: Descriptor) -> bool:
    return d.kind == s.TICK and d.name == h.READY


def _is_genuine(negotiated: Column, bars: Column, table: Sequence[Descriptor], ticked: Column) -> Column:
    """Return a mask of the *negotiated* that took place: while a rank has joined, Horovod marks some that did not.

    They are of cached tensors, and have neither ticks nor an operation after them. A tensor with an operation for each
    of its negotiations has none.
    """
    names = {name: i for i, name in enumerate(dict.fromkeys(d.tensor for d in table))}
    number = np.array([names[d.tensor] for d in table], np.int64)
    events = np.concatenate((negotiated, bars))
    is_bar = np.arange(len(events)) >= len(negotiated)
    tensor = number[events["descriptor"]]
    order = np.lexsort((is_bar, events["start"], events["rank"], tensor))
    same = (tensor[order[1:]] == tensor[order[:-1]]) & (events["rank"][order[1:]] == events["rank"][order[:-1]])
    is_followed = np.zeros(len(events), bool)
    is_followed[order[:-1]] = same & is_bar[order[1:]]
    of_tensor = tensor[~is_bar]
    more = np.bincount(of_tensor, minlength=len(names)) > np.bincount(tensor[is_bar], minlength=len(names))
    has_bars = np.isin(of_tensor, tensor[is_bar])
    genuine: Column = is_followed[~is_bar] | np.isin(negotiated["id"], ticked) | ~(more[of_tensor] & has_bars)
    return genuine


def _ready(batches: Sequence[SpanBatch], negotiated: Column, table: Sequence[Descriptor]) -> tuple[Column, list[str]]:
    """Return the ready ticks of whole negotiations of several ranks, and the tensor of each negotiation."""
    parts = [np.zeros(0, READY)]
    for batch in batches:
        ticks = batch.take(batch.lookup(_is_tick, bool))
        part = np.zeros(len(ticks), READY)
        part["group"] = places_in(ticks["parent_id"], negotiated["id"])
        part["rank"], part["at"] = ticks["a"], ticks["start"] + batch.wall
        parts.append(part[part["group"] >= 0])
    ready = np.concatenate(parts)
    ready = ready[np.lexsort((ready["at"], ready["group"]))]
    _, first, sizes = np.unique(ready["group"], return_index=True, return_counts=True)
    ends = (first + sizes - 1)[sizes > 1]
    ready["late"][ends] = ready["at"][ends] - ready["at"][ends - 1]
    ready = ready[np.repeat(sizes > 1, sizes)]
    return ready, [table[number].tensor for number in negotiated["descriptor"].tolist()]

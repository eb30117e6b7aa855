"""Who is ready last for an operation: of all operations, and of those on each tensor."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.collectives.readiness import Called
from otel_dltrace.analysis.spread import Spread, spread
from otel_dltrace.model import activities as h
from otel_dltrace.model.arrays import Column, grouped
from otel_dltrace.model.operation import Descriptor


@dataclass(frozen=True, slots=True)
class ReadyRank:
    """A rank (of its process set): in *times* of *negotiations* ready last, *late* after the one before it, ns."""

    rank: int
    negotiations: int
    times: int
    late: Spread


@dataclass(frozen=True, slots=True)
class TensorNegotiation:
    """A tensor's negotiations and bars of operations, ns; *last* is who was ready last most often, -1 for not known."""

    tensor: str
    operation: str
    negotiation: Spread
    bar: Spread
    ticked: int
    last: int
    last_times: int
    late: int


def ready_ranks(ready: Column) -> tuple[ReadyRank, ...]:
    """Return how often each rank was last to be *ready* (`READY`), by rank."""
    return tuple(
        ReadyRank(rank, len(mine), int((mine["late"] > 0).sum()), spread(mine["late"][mine["late"] > 0]))
        for rank, mine in grouped(ready["rank"], ready)
    )


def _last(ready: Column) -> ReadyRank:
    """Return who was ready last most often."""
    return max(ready_ranks(ready), key=lambda one: (one.times, -one.rank), default=ReadyRank(-1, 0, 0, Spread()))


def tensors(
    negotiated: Column, bars: Column, table: Sequence[Descriptor], ready: Column, whose: Sequence[str]
) -> tuple[TensorNegotiation, ...]:
    """Return the tensors of what was *negotiated* and of the *bars* of operations, whose descriptors are in *table*.

    Ranks were *ready* (`READY`) for numbered operations, each on the tensor that is its entry in *whose*.
    """
    names = {name: i for i, name in enumerate(dict.fromkeys([*(d.tensor for d in table), *whose]))}
    number = np.array([names[d.tensor] for d in table], np.int64)
    of_bars = dict(grouped(number[bars["descriptor"]], bars))
    of_negotiation = dict(grouped(number[negotiated["descriptor"]], negotiated))
    of_ready = dict(grouped(np.array([names[whose[group]] for group in ready["group"].tolist()], np.int64), ready))
    out = []
    for name, i in names.items():
        before, during = of_negotiation.get(i, negotiated[:0]), of_bars.get(i, bars[:0])
        if not (len(before) or len(during)):
            continue
        ticks = of_ready.get(i, ready[:0])
        last = _last(ticks)
        activity = table[int((before if len(before) else during)["descriptor"][0])].activity
        out.append(
            TensorNegotiation(
                name,
                activity.removeprefix(h.NEGOTIATE).lower(),
                spread(before["end"] - before["start"]),
                spread(during["end"] - during["start"]),
                len(np.unique(ticks["group"])),
                last.rank,
                last.times,
                last.late.p50,
            )
        )
    return tuple(sorted(out, key=lambda one: (-one.negotiation.total, one.tensor)))


def tensors_called(calls: Called) -> tuple[TensorNegotiation, ...]:
    """Return the tensors where only the ranks themselves tell of them."""
    numbers = {tensor: i for i, tensor in enumerate(dict.fromkeys(calls.tensors))}
    number = np.array([numbers[tensor] for tensor in calls.tensors], np.int64)
    names = dict(zip(calls.tensors, calls.names, strict=True))
    of_ready = dict(grouped(number[calls.ready["group"]], calls.ready))
    of_rows, lasted = calls.joined.to_rows(number), calls.joined["end"] - calls.joined["start"]
    out = []
    for tensor, i in numbers.items():
        last, waited, bar = _last(of_ready[i]), calls.waited[number == i], spread(lasted[of_rows == i])
        told = len(waited), last.rank, last.times, last.late.p50
        out.append(TensorNegotiation(tensor, names[tensor], spread(waited), bar, *told))
    return tuple(sorted(out, key=lambda one: (-one.negotiation.total, one.tensor)))

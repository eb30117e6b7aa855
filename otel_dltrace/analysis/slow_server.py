"""Which server takes long to add a push: what waits behind it looks as if its worker had come late."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.spread import median
from otel_dltrace.model.arrays import Column

_TIMES = 2
_LEAST = 1_000_000


@dataclass(frozen=True, slots=True)
class SlowServer:
    """A *server* that adds *pushes* in *push* ns (p50) each, where the *others* take that for pushes as large."""

    server: int
    pushes: int
    push: int
    others: int


def slow_server(requests: Column, places: Sequence[tuple[int, str]]) -> SlowServer | None:
    """Return the server that is slower than the others by most, None if none is by a factor of two and 1 ms."""
    found = (_compared(*one) for one in _alike(requests, [server for server, _ in places]))
    slow = [one for one in found if one and one.push >= max(_TIMES * one.others, one.others + _LEAST)]
    return max(slow, key=lambda one: (one.push - one.others) * one.pushes, default=None)


def _alike(requests: Column, servers: Sequence[int]) -> Iterator[tuple[int, Column, Column, Column]]:
    """Yield each server, how long each push took, the power of two that its size is below, and whether it is its."""
    pushes = requests[(requests["is_push"] > 0) & (requests["size"] > 0)]
    took, magnitude = pushes["end"] - pushes["start"], np.frexp(pushes["size"])[1]
    whose = np.array(servers, np.int64)[pushes["tensor"]]
    for server in np.unique(whose).tolist():
        yield server, took, magnitude, whose == server


def _compared(server: int, took: Column, magnitude: Column, is_own: Column) -> SlowServer | None:
    """Compare *server* with the others by pushes of the same magnitude; it may keep the largest tensors."""
    rows = [(took[is_own & of], took[~is_own & of]) for of in (magnitude == each for each in np.unique(magnitude))]
    rows = [(own, others) for own, others in rows if len(own) and len(others)]
    number = sum(len(own) for own, _ in rows)
    if not number:
        return None
    push = sum(len(own) * median(own) for own, _ in rows)
    others = sum(len(own) * median(others) for own, others in rows)
    return SlowServer(server, number, round(push / number), round(others / number))

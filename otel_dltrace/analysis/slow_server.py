"""Which server takes long to add a push: what waits behind it looks as if its worker had come late."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.spread import median
from otel_dltrace.model.arrays import Column

_TIMES = 2
_LEAST = 1_000_000
_FEWEST = 5
"""So many pushes of a magnitude are compared with so many: the median of fewer is moved by one or two outliers."""
_Row = tuple[int, int, int]
"""A server's pushes of one magnitude: how many, how long they took and how long the others' did (p50, ns)."""


@dataclass(frozen=True, slots=True)
class SlowServer:
    """A *server* that adds *pushes* in *push* ns (p50) each, where the *others* take that for pushes as large."""

    server: int
    pushes: int
    push: int
    others: int


def slow_server(requests: Column, places: Sequence[tuple[int, str]]) -> SlowServer | None:
    """Return the server that is slower than the others by most, None if none is by a factor of two and 1 ms."""
    rows = defaultdict[int, list[_Row]](list)
    for took, whose in _alike(requests, [server for server, _ in places]):
        for server, row in _compared(took, whose):
            rows[server].append(row)
    found = (_joined(server, rows[server]) for server in sorted(rows))
    slow = [one for one in found if one.push >= max(_TIMES * one.others, one.others + _LEAST)]
    return max(slow, key=lambda one: (one.push - one.others) * one.pushes, default=None)


def _alike(requests: Column, servers: Sequence[int]) -> Iterator[tuple[Column, Column]]:
    """Yield of pushes whose sizes are below the same power of two how long each took and whose it is, by server."""
    pushes = requests[(requests["is_push"] > 0) & (requests["size"] > 0)]
    magnitude, whose = np.frexp(pushes["size"])[1], np.array(servers, np.int64)[pushes["tensor"]]
    order = np.lexsort((whose, magnitude))
    took, whose = (pushes["end"] - pushes["start"])[order], whose[order]
    ends = np.flatnonzero(np.diff(magnitude[order])) + 1
    yield from zip(np.split(took, ends), np.split(whose, ends), strict=True)


def _compared(took: Column, whose: Column) -> Iterator[tuple[int, _Row]]:
    """Yield each server with what its pushes took, and the others'; of a few of them one may have been held up."""
    for server, begin, number in zip(*np.unique(whose, return_index=True, return_counts=True), strict=True):
        if min(number, len(took) - number) >= _FEWEST:
            own = slice(begin, begin + number)
            yield int(server), (int(number), median(took[own]), median(np.delete(took, own)))


def _joined(server: int, rows: Sequence[_Row]) -> SlowServer:
    """Compare *server* with the others by pushes of the same magnitude; it may keep the largest tensors."""
    pushes = sum(number for number, _, _ in rows)
    push, others = (sum(row[0] * row[at] for row in rows) for at in (1, 2))
    return SlowServer(server, pushes, round(push / pushes), round(others / pushes))

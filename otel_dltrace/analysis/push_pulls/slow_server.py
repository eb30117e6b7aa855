"""Which server takes long to add a push, or lets pushes wait: what waits there looks as if its worker had come late."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.push_pulls.rows import by_descriptor
from otel_dltrace.analysis.spread import median
from otel_dltrace.model.arrays import Column, grouped
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.queue_types import QueueType
from otel_dltrace.model.spans import SpanBatch

_TIMES = 2
_LEAST = 1_000_000
_FEWEST = 5
"""So many pushes of a magnitude are compared with so many: the median of fewer is moved by one or two outliers."""
_SMALL = 16
"""Below 64 KiB, the 16th power of two, the bytes of a push are not what takes a ms."""
_PUSH = np.dtype([(name, "i8") for name in ("server", "magnitude", "rank", "seq", "start", "took")])
"""Pushes are alike if they have the same *magnitude*: their bytes are below the same power of two, or `_SMALL`."""
_Row = tuple[int, int, int]
"""A server's pushes of one magnitude: how many, how long they took and how long the others' did (p50, ns)."""


@dataclass(frozen=True, slots=True)
class SlowServer:
    """One *server*, of whose *pushes* each takes *push* ns (p50), and one as large to the *others* that many."""

    server: int
    pushes: int
    push: int
    others: int


def slow_server(requests: Column, places: Sequence[tuple[int, str]]) -> SlowServer | None:
    """Return the server that adds pushes more slowly than the others by most, None if none does."""
    return _slowest(_added(requests, places), {})


def slow_way(batches: Sequence[SpanBatch], requests: Column, places: Sequence[tuple[int, str]]) -> SlowServer | None:
    """Return the server whose pushes take longest as the workers in *batches* see them, None if all take as long.

    A server that stands still, or is far, takes a push late: it records nothing of the time before. So does one that
    has much to do, as on a busy machine: what goes to it is taken into account.
    """
    pushes = requests[requests["is_push"] > 0]
    return _slowest(_firsts(_sent(batches, requests, places)), _loads(_servers(pushes, places), pushes["size"]))


def _loads(servers: Column, sizes: Column) -> dict[int, float]:
    """Return how many times what the others get in the mean goes to each server, of pushes or bytes; at least 1."""
    numbers, which = np.unique(servers, return_inverse=True)
    own = np.stack((np.bincount(which), np.bincount(which, sizes)))
    others = (own.sum(axis=1, keepdims=True) - own) / max(len(numbers) - 1, 1)
    more = np.maximum(own / np.maximum(others, 1), 1).max(axis=0)
    return dict(zip(numbers.tolist(), more.tolist(), strict=True))


def _slowest(pushes: Column, loads: Mapping[int, float]) -> SlowServer | None:
    """Return the server that is slower than the others by most, None if none is by a factor of two and 1 ms.

    The factor is multiplied by the server's load, of those that have one.
    """
    as_large, larger = defaultdict[int, list[_Row]](list), defaultdict[int, list[_Row]](list)
    sized = pushes[pushes["magnitude"] > 0]
    alike = [rows for _, rows in grouped(sized["magnitude"], sized)]  # the smallest first
    for place in range(len(alike)):
        for server, row, is_as_large in _compared(alike[place:]):
            (as_large if is_as_large else larger)[server].append(row)
    found = (_joined(server, as_large[server] or larger[server]) for server in sorted({*as_large, *larger}))
    slow = [one for one in found if _is_slow(one, loads.get(one.server, 1))]
    return max(slow, key=lambda one: (one.push - one.others) * one.pushes, default=None)


def _is_slow(one: SlowServer, load: float) -> bool:
    return one.push >= max(_TIMES * load * one.others, one.others + _LEAST)


def _added(requests: Column, places: Sequence[tuple[int, str]]) -> Column:
    """Return how long each push was added, as the servers saw it, as rows of `_PUSH`."""
    pushes = requests[requests["is_push"] > 0]
    rows = np.zeros(len(pushes), _PUSH)
    rows["server"] = _servers(pushes, places)
    rows["magnitude"], rows["took"] = _magnitudes(pushes["size"]), pushes["end"] - pushes["start"]
    return rows


def _sent(batches: Sequence[SpanBatch], requests: Column, places: Sequence[tuple[int, str]]) -> Column:
    """Return how long each PUSH took, as the workers saw it, of keys that a server is known to keep."""
    keys, first = np.unique(requests["key"], return_index=True)
    servers = _servers(requests[first], places)
    parts = [np.zeros(0, _PUSH)]
    for batch in batches if len(keys) else ():
        for d, stages in by_descriptor(batch, _is_push):
            key = stages["partition"].astype(np.uint64) | np.uint64(d.key << 16)
            at = np.minimum(np.searchsorted(keys, key), len(keys) - 1)
            part = np.zeros(len(stages), _PUSH)
            part["server"], part["magnitude"], part["rank"] = servers[at], _magnitudes(stages["size"]), batch.rank
            part["seq"], part["start"], part["took"] = stages["seq"], stages["start"], stages["end"] - stages["start"]
            parts.append(part[keys[at] == key])
    return np.concatenate(parts)


def _servers(requests: Column, places: Sequence[tuple[int, str]]) -> Column:
    """Return which server each of *requests* went to."""
    servers: Column = np.array([server for server, _ in places], np.int64)[requests["tensor"]]
    return servers


def _magnitudes(sizes: Column) -> Column:
    """Return the magnitude of each push, 0 where its size is not known."""
    found: Column = np.where(sizes > 0, np.maximum(np.frexp(sizes)[1], _SMALL), 0)
    return found


def _is_push(d: Descriptor) -> bool:
    return d.queue_type == QueueType.PUSH.name and d.key >= 0


def _firsts(pushes: Column) -> Column:
    """Return of each occurrence the first of *pushes* from a rank to a server: it waits for no other of these."""
    pushes = pushes[np.lexsort((pushes["start"], pushes["seq"], pushes["rank"], pushes["server"]))]
    whose = pushes[["server", "rank", "seq"]]
    firsts: Column = pushes[np.append(True, whose[1:] != whose[:-1])[: len(pushes)]]
    return firsts


def _compared(alike: Sequence[Column]) -> Iterator[tuple[int, _Row, bool]]:
    """Yield each server with what its pushes took, the first of *alike*, the others', and whether those are as large.

    Else they are larger, which takes longer: a server's first push may always be a bias, and the others' a weight.
    Of a few of them one may have been held up.
    """
    for server, mine in grouped(alike[0]["server"], alike[0]["took"]):
        if len(mine) < _FEWEST:
            continue
        for place, pushes in enumerate(alike):
            others = pushes["took"][pushes["server"] != server]
            if len(others) >= _FEWEST:
                yield server, (len(mine), median(mine), median(others)), place == 0
                break


def _joined(server: int, rows: Sequence[_Row]) -> SlowServer:
    """Compare *server* with the others by pushes of no larger magnitude; it may keep the largest tensors."""
    pushes = sum(number for number, _, _ in rows)
    push, others = (sum(row[0] * row[at] for row in rows) for at in (1, 2))
    return SlowServer(server, pushes, round(push / pushes), round(others / pushes))

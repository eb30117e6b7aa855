"""How long a key's server gathers its pushes and answers its pulls, and who pushes last."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.collectives.joined import is_joint
from otel_dltrace.analysis.push_pulls.last_comers import Last, last_of
from otel_dltrace.analysis.push_pulls.rows import US, by_descriptor
from otel_dltrace.analysis.spread import Spread, spread, usual
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, grouped
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch

_COLUMNS = ("key", "is_push", "is_joint", "rank", "seq", "start", "end", "wait", "came", "size", "tensor")
_REQUEST = np.dtype([(name, "u8" if name == "key" else "i8") for name in _COLUMNS])  # ps-lite's keys have 64 bits
_ONE_AT_A_TIME = "pushpull"
"""The backend whose servers answer one request at a time; BytePS's have several threads."""


@dataclass(frozen=True, slots=True)
class ServerKey:
    """One partition's key as its server saw it, ns.

    *gather* is from the first worker's push to the last one's; a pull waits until all pushes are in, of each occurrence
    one for the longest *wait*, and has its *transfer* after that.
    """

    server: int
    key: int
    tensor: str
    partition: int
    gather: Spread
    push: Spread
    wait: Spread
    transfer: Spread
    last: Last | None


def _is_request(d: Descriptor) -> bool:
    return d.kind == s.PHASE and d.name in (s.PUSH, s.PULL) and d.key >= 0


def requests_of(batches: Sequence[SpanBatch]) -> tuple[Column, list[tuple[int, str]]]:
    """Return all requests as rows of `_REQUEST`, and the (server, tensor) that they count in.

    *came* is on a clock that stands still while the server is busy with other requests.
    """
    places: dict[tuple[int, str], int] = {}
    parts = [np.zeros(0, _REQUEST)]
    for batch in batches:
        if batch.process.bind is None or batch.process.bind.role != "server":
            continue
        of_server, is_serial = [np.zeros(0, _REQUEST)], False
        for d, rows in by_descriptor(batch, _is_request):
            part = np.zeros(len(rows), _REQUEST)
            part["key"] = rows["partition"].astype(np.uint64) | np.uint64(d.key << 16)
            part["is_push"], part["is_joint"], part["rank"] = d.name == s.PUSH, is_joint(d), rows["b"]
            part["tensor"] = places.setdefault((batch.rank, d.tensor), len(places))
            for name in ("seq", "start", "end", "size"):
                part[name] = rows[name]
            part["wait"] = rows["a"].astype(np.int64) * US
            of_server.append(part)
            is_serial = is_serial or d.backend == _ONE_AT_A_TIME
        part = np.concatenate(of_server)
        part["came"] = part["start"] - (_busy_before(part) if is_serial else 0)
        parts.append(part)
    return np.concatenate(parts), list(places)


def _busy_before(requests: Column) -> Column:
    """Return for how long a server had worked on *requests* before each began: one that comes meanwhile has to wait.

    Its own begin is recorded only then, so whether it came just then or before, nobody can say.
    """
    begins = requests["start"] + np.where(requests["is_push"] > 0, 0, requests["wait"])
    order = np.argsort(requests["end"], kind="stable")
    worked = np.append(0, np.cumsum((requests["end"] - begins)[order]))
    busy: Column = worked[np.searchsorted(requests["end"][order], requests["start"], side="right")]
    return busy


def gathered_pushes(requests: Column) -> tuple[Column, Column]:
    """Return the pushes that came once from each of several workers, and by how much each came last.

    What a server was busy with meanwhile is no lateness.
    """
    pushes = requests[(requests["is_push"] > 0) & (requests["is_joint"] > 0)]
    pushes = pushes[np.lexsort((pushes["start"], pushes["seq"], pushes["key"]))]
    if not len(pushes):
        return pushes, np.zeros(0, np.int64)
    is_first = np.append(True, (np.diff(pushes["key"]) != 0) | (np.diff(pushes["seq"]) != 0))
    group = np.cumsum(is_first) - 1
    sizes = np.bincount(group)
    pairs = np.unique(np.column_stack((group, pushes["rank"])), axis=0)
    whole = (np.bincount(pairs[:, 0]) == sizes) & (sizes > 1)
    ends = np.cumsum(sizes) - 1
    late = np.zeros(len(pushes), np.int64)
    last = ends[whole]
    late[last] = np.maximum(pushes["came"][last] - pushes["came"][last - 1], 0)
    return pushes[whole[group]], late[whole[group]]


def server_keys(
    requests: Column, places: Sequence[tuple[int, str]], gathered: Column, late: Column
) -> tuple[ServerKey, ...]:
    """Return the keys of *requests*, whose tensors are in *places*; a push *gathered* came *late* by so many ns."""
    out = []
    of_key, none = dict(grouped(gathered["key"], np.arange(len(gathered)))), np.zeros(0, np.intp)
    for key, mine in grouped(requests["key"], requests):
        ours = of_key.get(key, none)
        pushes, pulls = mine[mine["is_push"] > 0], mine[mine["is_push"] == 0]
        server, tensor = places[int(mine["tensor"][0])]
        out.append(
            ServerKey(
                server,
                key,
                tensor,
                key & 0xFFFF,
                spread(_spans_of(gathered[ours])),
                spread(pushes["end"] - pushes["start"]),
                spread(_longest_waits(pulls)),
                spread(pulls["end"] - pulls["start"] - pulls["wait"]),
                last_of(gathered["rank"][ours], late[ours]),
            )
        )
    return tuple(sorted(out, key=lambda one: (-usual(one.gather, one.wait, one.transfer), one.key)))


def _longest_waits(pulls: Column) -> Column:
    """Return the longest wait of each occurrence: who comes last waits for nobody, so half of all would say little."""
    pulls = pulls[np.lexsort((pulls["wait"], pulls["seq"]))]
    is_last = np.append(np.diff(pulls["seq"]) != 0, True)[: len(pulls)]
    waits: Column = pulls["wait"][is_last]
    return waits


def _spans_of(pushes: Column) -> Column:
    """Return from the first to the last start of each occurrence in *pushes*, which are in that order."""
    _, first = np.unique(pushes["seq"], return_index=True)
    ends = np.append(first[1:], len(pushes)) - 1
    spans: Column = pushes["start"][ends] - pushes["start"][first] if len(pushes) else pushes["start"]
    return spans

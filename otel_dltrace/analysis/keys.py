"""Which key, which partition, which worker makes a push_pull slow: seen from the workers, and from the servers.

Queue wait of a stage is the recorded one (start - end of the stage before it); a partition's time is from the begin of
its first wait to the end of its last stage. Late is who begins last: on the workers to a push_pull that all ranks have,
on a server, by one clock, to the pushes of one key and occurrence; by how much: after the one before it. What takes
longest does so by medians, which are what is shown: by totals one slow first step would decide. Keys go by their median
and how often they come, or the broadcasts before the first step would be the longest ones.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.collectives import Joined, join
from otel_dltrace.analysis.spread import Spread, median, spread
from otel_dltrace.analysis.table import worker_batches
from otel_dltrace.analysis.waits import arrivals, widen
from otel_dltrace.model import semconv as s
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.queue_types import QueueType
from otel_dltrace.model.spans import Column, SpanBatch

_US = 1000
_STAGE = np.dtype([(name, "i8") for name in ("tensor", "stage", "partition", "rank", "seq", "start", "end", "wait")])
_REQUEST = np.dtype([(name, "i8") for name in ("key", "is_push", "rank", "seq", "start", "end", "wait", "tensor")])


@dataclass(frozen=True, slots=True)
class Last:
    """The rank that came last most often: *times* of *arrivals*, *late* (ns, p50) after the one before it."""

    rank: int
    times: int
    arrivals: int
    late: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One queue type of a key, over all ranks and partitions, ns: the bar, and the wait in the queue before it."""

    name: str
    time: Spread
    wait: Spread


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition of a key, ns over all ranks: *time* with its waits, *others* the median of the other partitions."""

    partition: int
    time: Spread
    others: int


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """One tensor as the workers saw it; *key* is that of its first partition, -1 if unknown.

    *time* (ns) is from enqueue to callback, over all ranks. *stages* come in the order in which they happen. *longest*
    is the one whose medians, of the wait and of the bar, add up to most on the ranks that ask the servers, where there
    are any: their local ranks wait for them.
    *slowest* is the partition with the longest median, None if there is but one. *last* is None where nobody can tell.
    """

    key: int
    tensor: str
    partitions: int
    time: Spread
    stages: tuple[Stage, ...]
    longest: Stage | None
    slowest: Partition | None
    last: Last | None


@dataclass(frozen=True, slots=True)
class ServerKey:
    """One partition's key as its server saw it, ns.

    *gather* is from the first worker's push to the last one's; a pull is *wait*, until all pushes are in, and the
    *transfer* after it.
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


@dataclass(frozen=True, slots=True)
class RankArrivals:
    """How often a rank came last, by the workers' clocks and by the servers'; None where nobody can tell."""

    rank: int
    workers: Last | None
    servers: Last | None


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of workers and of servers, what usually takes longest first; *uncertainty* (ns) is of workers' clocks.

    Calls times median: of a worker's key its time, of a server's gather, wait and transfer together.
    """

    ranks: tuple[RankArrivals, ...]
    workers: tuple[WorkerKey, ...]
    servers: tuple[ServerKey, ...]
    uncertainty: int


def keys(batches: Sequence[SpanBatch]) -> Keys:
    """Return what *batches*, one per process, say about each key."""
    joined = _push_pulls(widen(join(batches)))
    late = arrivals(joined)
    requests, tensors = _requests(batches)
    gathered, came_late = _gathered(requests)
    ranks = {*joined["rank"].tolist(), *gathered["rank"].tolist()}
    return Keys(
        tuple(
            RankArrivals(rank, _of_rank(rank, joined["rank"], late), _of_rank(rank, gathered["rank"], came_late))
            for rank in sorted(ranks)
        ),
        _worker_keys(worker_batches(batches), joined, late),
        _server_keys(requests, tensors, gathered, came_late),
        int(joined.uncertainty.max(initial=0)),
    )


def _of_rank(rank: int, ranks: Column, late: Column) -> Last | None:
    mine = late[ranks == rank]
    return Last(rank, int((mine > 0).sum()), len(mine), median(mine[mine > 0])) if len(mine) else None


def _last(ranks: Column, late: Column) -> Last | None:
    """Return who of *ranks* came last most often, given by how much each came *late*, 0 for not last."""
    all_of_them = (_of_rank(rank, ranks, late) for rank in np.unique(ranks[late > 0]).tolist())
    return max((one for one in all_of_them if one), key=lambda one: (one.times, one.late), default=None)


def _usual(*spreads: Spread) -> int:
    """Return what *spreads* would add up to if all their values were as the median one."""
    return sum(one.count * one.p50 for one in spreads)


# -- workers ------------------------------------------------------------------------------------


def _push_pulls(joined: Joined) -> Joined:
    return joined.take(np.array([d.name == s.PUSH_PULL for d in joined.descriptors], bool))


def _worker_keys(batches: Sequence[SpanBatch], joined: Joined, late: Column) -> tuple[WorkerKey, ...]:
    times: dict[str, list[Column]] = {}
    declared: dict[str, int] = {}
    for batch in batches:
        for d, rows in _by_descriptor(batch, _is_operation):
            times.setdefault(d.tensor, []).append(rows["end"] - rows["start"])
            declared[d.tensor] = max(declared.get(d.tensor, -1), d.key)
    stages, names = _stages(batches, list(times))
    by_tensor = _grouped(stages, "tensor")
    whose = np.repeat([d.tensor for d in joined.descriptors], joined.sizes) if len(joined) else np.zeros(0, "U1")
    out = []
    for number, (tensor, parts) in enumerate(times.items()):
        mine = by_tensor.get(number, stages[:0])
        key = declared[tensor]
        out.append(
            WorkerKey(
                key << 16 if key >= 0 else -1,
                tensor,
                len(np.unique(mine["partition"])),
                spread(np.concatenate(parts)),
                _stage_times(mine, names),
                _longest(mine, names),
                _slowest(mine),
                _last(joined["rank"][whose == tensor], late[whose == tensor]),
            )
        )
    return tuple(sorted(out, key=lambda one: (-_usual(one.time), one.tensor)))


def _is_operation(d: Descriptor) -> bool:
    return d.kind == s.COLLECTIVE and d.name == s.PUSH_PULL


def _is_stage(d: Descriptor) -> bool:
    return d.kind == s.PHASE and bool(d.queue_type) and d.key >= 0


def _is_request(d: Descriptor) -> bool:
    return d.kind == s.PHASE and d.name in (s.PUSH, s.PULL) and d.key >= 0


def _by_descriptor(batch: SpanBatch, which: Callable[[Descriptor], bool]) -> Iterable[tuple[Descriptor, Column]]:
    """Yield the descriptors that *which* picks, with their closed rows."""
    closed = batch.take((batch["flags"] & s.Flag.TRUNCATED == 0) & batch.lookup(which, bool)).rows
    closed = closed[np.argsort(closed["descriptor"], kind="stable")]
    numbers, begins = np.unique(closed["descriptor"], return_index=True)
    for number, rows in zip(numbers.tolist(), np.split(closed, begins[1:]), strict=False):
        yield batch.descriptors[number], rows


def _stages(batches: Sequence[SpanBatch], tensors: Sequence[str]) -> tuple[Column, list[str]]:
    """Return all stages as rows of `_STAGE`, and the names of queue types that they count in."""
    number = {tensor: i for i, tensor in enumerate(tensors)}
    names: dict[str, int] = {}
    parts = [np.zeros(0, _STAGE)]
    for batch in batches:
        for d, rows in _by_descriptor(batch, _is_stage):
            part = np.zeros(len(rows), _STAGE)
            part["tensor"] = number.get(d.tensor, -1)
            part["stage"], part["rank"] = names.setdefault(d.queue_type, len(names)), batch.rank
            for name in ("partition", "start", "end"):
                part[name] = rows[name]
            # Of a stage without an operation nobody counts the occurrence: its step stands for it.
            part["seq"] = np.where(rows["seq"] > 0, rows["seq"], rows["step"])
            part["wait"] = rows["a"].astype(np.int64) * _US
            parts.append(part)
    return np.concatenate(parts), list(names)


def _grouped(rows: Column, name: str) -> dict[int, Column]:
    """Return *rows* by the value of their column *name*, in their order."""
    rows = rows[np.argsort(rows[name], kind="stable")]
    values, begins = np.unique(rows[name], return_index=True)
    return dict(zip(values.tolist(), np.split(rows, begins[1:]), strict=False))


def _chained(rows: Column) -> tuple[Column, Column, Column, Column]:
    """Return for each row its chain, and for each chain its partition, the begin of its first wait, and its end.

    A chain is the stages of one partition in one occurrence on a rank.
    """
    number = (rows["rank"] + 1) << 48 | rows["partition"] << 32 | rows["seq"]
    _, first, chain = np.unique(number, return_index=True, return_inverse=True)
    begin = np.full(len(first), np.iinfo(np.int64).max)
    end = np.full(len(first), np.iinfo(np.int64).min)
    np.minimum.at(begin, chain, rows["start"] - rows["wait"])
    np.maximum.at(end, chain, rows["end"])
    return chain, rows["partition"][first], begin, end


def _stage_times(rows: Column, names: Sequence[str]) -> tuple[Stage, ...]:
    """Return the stages of one tensor in the order in which they begin, by the median."""
    chain, _, begin, _ = _chained(rows)
    after = rows["start"] - begin[chain]
    found = []
    for number in np.unique(rows["stage"]).tolist():
        mine = rows["stage"] == number
        times = Stage(names[number], spread((rows["end"] - rows["start"])[mine]), spread(rows["wait"][mine]))
        found.append((float(np.median(after[mine])), times))
    return tuple(stage for _, stage in sorted(found, key=lambda one: (one[0], one[1].name)))


def _longest(rows: Column, names: Sequence[str]) -> Stage | None:
    pulls = [names.index(name) for name in names if name == QueueType.PULL.name]
    asks = np.isin(rows["rank"], rows["rank"][np.isin(rows["stage"], pulls)])
    stages = _stage_times(rows[asks] if asks.any() else rows, names)
    return max(stages, key=lambda stage: stage.time.p50 + stage.wait.p50, default=None)


def _slowest(rows: Column) -> Partition | None:
    _, partition, begin, end = _chained(rows)
    times = end - begin
    medians = {number: median(times[partition == number]) for number in np.unique(partition).tolist()}
    if len(medians) < 2:
        return None
    slowest = max(medians, key=medians.__getitem__)
    mine = partition == slowest
    return Partition(slowest, spread(times[mine]), median(times[~mine]))


# -- servers ------------------------------------------------------------------------------------


def _requests(batches: Sequence[SpanBatch]) -> tuple[Column, list[tuple[int, str]]]:
    """Return all requests as rows of `_REQUEST`, and the (server, tensor) that they count in."""
    places: dict[tuple[int, str], int] = {}
    parts = [np.zeros(0, _REQUEST)]
    for batch in batches:
        if batch.process.bind is None or batch.process.bind.role != "server":
            continue
        for d, rows in _by_descriptor(batch, _is_request):
            part = np.zeros(len(rows), _REQUEST)
            part["key"] = d.key << 16 | rows["partition"].astype(np.int64)
            part["is_push"], part["rank"] = d.name == s.PUSH, rows["b"]
            part["tensor"] = places.setdefault((batch.rank, d.tensor), len(places))
            for name in ("seq", "start", "end"):
                part[name] = rows[name]
            part["wait"] = rows["a"].astype(np.int64) * _US
            parts.append(part)
    return np.concatenate(parts), list(places)


def _gathered(requests: Column) -> tuple[Column, Column]:
    """Return the pushes that came once from each of several workers, and by how much each came last."""
    pushes = requests[requests["is_push"] > 0]
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
    late[ends[whole]] = pushes["start"][ends[whole]] - pushes["start"][ends[whole] - 1]
    return pushes[whole[group]], late[whole[group]]


def _server_keys(
    requests: Column, places: Sequence[tuple[int, str]], gathered: Column, late: Column
) -> tuple[ServerKey, ...]:
    out = []
    for key, mine in _grouped(requests, "key").items():
        pushes, pulls = mine[mine["is_push"] > 0], mine[mine["is_push"] == 0]
        ours = gathered["key"] == key
        server, tensor = places[int(mine["tensor"][0])]
        out.append(
            ServerKey(
                server,
                key,
                tensor,
                key & 0xFFFF,
                spread(_spans_of(gathered[ours])),
                spread(pushes["end"] - pushes["start"]),
                spread(pulls["wait"]),
                spread(pulls["end"] - pulls["start"] - pulls["wait"]),
                _last(gathered["rank"][ours], late[ours]),
            )
        )
    return tuple(sorted(out, key=lambda one: (-_usual(one.gather, one.wait, one.transfer), one.key)))


def _spans_of(pushes: Column) -> Column:
    """Return from the first to the last start of each occurrence in *pushes*, which are in that order."""
    _, first = np.unique(pushes["seq"], return_index=True)
    ends = np.append(first[1:], len(pushes)) - 1
    spans: Column = pushes["start"][ends] - pushes["start"][first] if len(pushes) else pushes["start"]
    return spans

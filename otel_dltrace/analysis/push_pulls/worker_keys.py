"""Where a tensor's push_pull spends its time, as the workers saw it: per queue type, partition and rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.collectives.joined import Joined
from otel_dltrace.analysis.push_pulls.last_comers import Last, last_of
from otel_dltrace.analysis.push_pulls.rows import US, by_descriptor
from otel_dltrace.analysis.spread import Spread, median, spread, usual
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, grouped
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.queue_types import QueueType
from otel_dltrace.model.spans import SpanBatch

_STAGE = np.dtype([(name, "i8") for name in ("tensor", "stage", "partition", "rank", "seq", "start", "end", "wait")])

_ARRIVAL = np.dtype([(name, "i8") for name in ("tensor", "rank", "late")])


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


def push_pulls(joined: Joined) -> Joined:
    """Return of the collectives *joined* those that are push_pulls."""
    return joined.take(np.array([d.name == s.PUSH_PULL for d in joined.descriptors], bool))


def worker_keys(batches: Sequence[SpanBatch], joined: Joined, late: Column) -> tuple[WorkerKey, ...]:
    """Return the tensors of workers' *batches*; of their push_pulls, *joined*, each came *late* by so many ns."""
    times: dict[str, list[Column]] = {}
    declared: dict[str, int] = {}
    for batch in batches:
        for d, rows in by_descriptor(batch, _is_operation):
            times.setdefault(d.tensor, []).append(rows["end"] - rows["start"])
            declared[d.tensor] = max(declared.get(d.tensor, -1), d.key)
    stages, names = _stages(batches, list(times))
    by_tensor = dict(grouped(stages["tensor"], stages))
    arrivals = _arrivals(joined, late, list(times))
    arrived = dict(grouped(arrivals["tensor"], arrivals))
    out = []
    for number, (tensor, parts) in enumerate(times.items()):
        mine = by_tensor.get(number, stages[:0])
        came = arrived.get(number, np.zeros(0, _ARRIVAL))
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
                last_of(came["rank"], came["late"]),
            )
        )
    return tuple(sorted(out, key=lambda one: (-usual(one.time), one.tensor)))


def _is_operation(d: Descriptor) -> bool:
    return d.kind == s.COLLECTIVE and d.name == s.PUSH_PULL


def _is_stage(d: Descriptor) -> bool:
    return d.kind == s.PHASE and bool(d.queue_type) and d.key >= 0


def _arrivals(joined: Joined, late: Column, tensors: Sequence[str]) -> Column:
    """Return who came how *late* to what, as rows of `_ARRIVAL`: names of tensors would be gigabytes."""
    number = {tensor: i for i, tensor in enumerate(tensors)}
    rows = np.zeros(len(late), _ARRIVAL)
    rows["tensor"] = joined.to_rows(np.array([number.get(d.tensor, -1) for d in joined.descriptors], np.int64))
    rows["rank"], rows["late"] = joined["rank"], late
    return rows


def _stages(batches: Sequence[SpanBatch], tensors: Sequence[str]) -> tuple[Column, list[str]]:
    """Return all stages as rows of `_STAGE`, and the names of queue types that they count in."""
    number = {tensor: i for i, tensor in enumerate(tensors)}
    names: dict[str, int] = {}
    parts = [np.zeros(0, _STAGE)]
    for batch in batches:
        for d, rows in by_descriptor(batch, _is_stage):
            part = np.zeros(len(rows), _STAGE)
            part["tensor"] = number.get(d.tensor, -1)
            part["stage"], part["rank"] = names.setdefault(d.queue_type, len(names)), batch.rank
            for name in ("partition", "start", "end"):
                part[name] = rows[name]
            # Of a stage without an operation nobody counts the occurrence: its step stands for it.
            part["seq"] = np.where(rows["seq"] > 0, rows["seq"], rows["step"])
            part["wait"] = rows["a"].astype(np.int64) * US
            parts.append(part)
    return np.concatenate(parts), list(names)


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
    pulls = [number for number, name in enumerate(names) if name == QueueType.PULL.name]
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

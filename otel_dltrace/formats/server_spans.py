"""What servers wrote as spans and back: a span for each push and pull, a tick for each message of ps-lite's van.

A server counts the pushes of a key by each worker from 1; the n-th goes into step n - 1, as the worker's n-th does.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from otel_dltrace.formats.comm_spans import BACKEND, Rows
from otel_dltrace.formats.server_profile import Profile, Request
from otel_dltrace.formats.van_profile import VanProfile
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import Column, SpanBatch, empty_rows

_US = 1000
_MOST_WAIT = (1 << 31) - 1
_FIRST_WORKER = 9
"""ps-lite numbers workers 9, 11, 13 ..."""


def worker_of(sender: int) -> int:
    """Return which worker has ps-lite's number *sender*, -1 for none."""
    worker, other = divmod(sender - _FIRST_WORKER, 2)
    return worker if worker >= 0 and not other else -1


def rows_of(profile: Profile, tensors: Mapping[int, str], local_size: int = 1) -> Rows:
    """Return *profile* as rows in the file's order; times are Unix ns, one without end lasts until the file's end.

    Args:
        profile: The requests.
        tensors: What is known of the tensors' names, by declared key.
        local_size: Processes of a worker; the last of them pushes and pulls.
    """
    requests = profile.requests
    known: dict[Descriptor, int] = {}
    rows = empty_rows(len(requests))
    if not requests:
        return Rows(rows, [])
    for name, values in (
        ("descriptor", [known.setdefault(_descriptor(r, tensors), len(known)) for r in requests]),
        ("start", [r.start * _US for r in requests]),
        ("partition", [r.key & 0xFFFF for r in requests]),
        ("seq", _occurrences(requests)),
        ("flags", [s.Flag.TRUNCATED if r.end is None else 0 for r in requests]),
        ("b", [_rank(worker_of(r.sender), local_size) for r in requests]),
    ):
        rows[name] = values
    latest = max(max(r.start, r.end or r.start) for r in requests)
    rows["end"] = [(latest if r.end is None else r.end) * _US for r in requests]
    rows["step"], rows["level"] = rows["seq"] - 1, s.Level.PARTITION
    rows["span_no"] = np.arange(1, len(rows) + 1)
    rows["a"] = _waits(requests, rows)
    return Rows(rows, list(known))


def _descriptor(request: Request, tensors: Mapping[int, str]) -> Descriptor:
    declared = request.key >> 16
    activity = f"{request.operation}-{request.sender}"
    return Descriptor(
        s.PHASE,
        request.operation,
        backend=BACKEND,
        tensor=tensors.get(declared, ""),
        key=declared,
        activity=activity,
    )


def _rank(worker: int, local_size: int) -> int:
    return worker * local_size + local_size - 1 if worker >= 0 else -1


def _occurrences(requests: Sequence[Request]) -> list[int]:
    counts: dict[tuple[str, int, int], int] = {}
    out = []
    for request in requests:
        counts[request[:3]] = counts.get(request[:3], 0) + 1
        out.append(counts[request[:3]])
    return out


def _waits(requests: Sequence[Request], rows: Column) -> list[int]:
    """Return for how long, in us, each pull waited for the last push of its key and occurrence."""
    seqs = rows["seq"].tolist()
    pushed: dict[tuple[int, int], int] = {}
    for request, seq in zip(requests, seqs, strict=True):
        if request.operation == s.PUSH and request.end is not None:
            pushed[request.key, seq] = max(request.end, pushed.get((request.key, seq), request.end))
    waits = []
    for request, seq, end in zip(requests, seqs, (rows["end"] // _US).tolist(), strict=True):
        complete = pushed.get((request.key, seq), request.start) if request.operation == s.PULL else request.start
        waits.append(min(max(0, min(complete, end) - request.start), _MOST_WAIT))
    return waits


def profile_of(batch: SpanBatch) -> Profile:
    """Return what of *batch*, a server's, a ``server_profile.json`` holds."""
    held = batch.take(batch.lookup(_is_held, bool))
    is_open = held["flags"] & s.Flag.TRUNCATED != 0
    start, end = (((held[name] + np.int64(held.wall)) // _US).tolist() for name in ("start", "end"))
    constant = [held.descriptors[number] for number in held["descriptor"].tolist()]
    columns = zip(constant, held["partition"].tolist(), held["b"].tolist(), start, end, is_open.tolist(), strict=True)
    requests = [
        Request(d.name, _sender(d, rank), d.key << 16 | partition, begun, None if cut else over)
        for d, partition, rank, begun, over, cut in columns
    ]
    bind = batch.process.bind
    return Profile(requests, bind.rank if bind else 0, max(bind.servers, bind.rank + 1) if bind else 1)


def _is_held(d: Descriptor) -> bool:
    return d.kind == s.PHASE and d.name in (s.PUSH, s.PULL) and d.key >= 0 and not d.queue_type


def _sender(d: Descriptor, rank: int) -> int:
    told = d.activity.rpartition("-")[2]
    return int(told) if told.isdecimal() else max(rank, 0) * 2 + _FIRST_WORKER


def van_rows_of(profile: VanProfile) -> Rows:
    """Return the messages as ticks in the file's order; times are Unix ns, and outside any step."""
    messages = profile.messages
    known: dict[Descriptor, int] = {}
    rows = empty_rows(len(messages))
    rows["span_no"] = np.arange(1, len(rows) + 1)
    rows["step"], rows["level"], rows["a"], rows["b"] = NO_STEP, s.Level.PARTITION, -1, -1
    numbers = [known.setdefault(_van_descriptor(m.role, m.operation), len(known)) for m in messages]
    if messages:
        rows["descriptor"], rows["partition"] = numbers, [m.partition for m in messages]
        rows["start"] = rows["end"] = np.array([m.at for m in messages], np.int64) * _US
    return Rows(rows, list(known))


def _van_descriptor(role: str, operation: str) -> Descriptor:
    return Descriptor(s.TICK, f"recv_{operation}", backend="ps-lite", activity=f"{role}_van_recv_{operation}")

"""What servers wrote as spans and back: a span for each push and pull.

A server counts the pushes of a key by each worker from 1; the n-th goes into step n - 1, as the worker's n-th does.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from otel_dltrace.formats.comm_spans import BACKEND, Rows
from otel_dltrace.formats.in_order import NEVER, InOrder
from otel_dltrace.formats.server_profile import BEGIN, END, Mark, Profile, Request
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.server_keys import first_key
from otel_dltrace.model.spans import SpanBatch, empty_rows

_US = 1000
_MOST = (1 << 31) - 1
"""What a wait's us and a rank have room for."""
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
    rank = worker * local_size + local_size - 1
    return rank if worker >= 0 and rank <= _MOST else -1


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
        waits.append(min(max(0, min(complete, end) - request.start), _MOST))
    return waits


def marks_of(pieces: Iterable[SpanBatch]) -> Iterator[Mark]:
    """Yield what a ``server_profile.json`` holds of *pieces*, a server's, which are gone through twice, by time."""
    for spans, _, are_ends, _ in InOrder(pieces, _held, _times):
        bind = spans.process.bind
        first = first_key(bind.rank, max(bind.servers, bind.rank + 1)) if bind else 0
        columns = [are_ends, *(spans[name] for name in ("descriptor", "partition", "b")), *_us(spans)]
        for is_end, number, partition, rank, *extent in zip(*(column.tolist() for column in columns), strict=True):
            d = spans.descriptors[number]
            name = f"{d.name}-{_sender(d, rank)}"
            yield Mark(name, END if is_end else BEGIN, first + (d.key << 16 | partition), extent[is_end])


def _held(batch: SpanBatch) -> SpanBatch:
    return batch.take(batch.is_request & (batch.keys >= 0))


def _times(held: SpanBatch) -> tuple[Column, Column]:
    """Return when requests begin, and when those end that are complete: not before, whatever the clock says."""
    begin, end = _us(held)
    return begin, np.where(held["flags"] & s.Flag.TRUNCATED == 0, np.maximum(begin, end), NEVER)


def _us(spans: SpanBatch) -> list[Column]:
    """Return when *spans* begin and end, in Unix us."""
    return [(spans[name] + np.int64(spans.wall)) // _US for name in ("start", "end")]


def _sender(d: Descriptor, rank: int) -> int:
    told = d.activity.rpartition("-")[2]
    return int(told) if told.isdecimal() else max(rank, 0) * 2 + _FIRST_WORKER

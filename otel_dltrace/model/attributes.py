"""Which attributes a span carries: constant ones by descriptor, and columns of numbers by row.

Every exporter asks here, so that OTLP, Chrome and the SDK bridge say the same of a span.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from otel_dltrace.model import identity
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, distinct
from otel_dltrace.model.identity import NO_STEP, NO_USER_STEP, Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.resource import job_attributes, merge
from otel_dltrace.model.spans import Process, SpanBatch
from otel_dltrace.model.text import clean

Value = str | int | bool
_TRACE_ID, _SPAN_ID = re.compile("[0-9a-f]{32}"), re.compile("[0-9a-f]{16}")


def constant_attributes(descriptor: Descriptor, source: int, flags: int, error_type: str) -> dict[str, Value]:
    """Return what every span of *descriptor* with this source, these flags and this error carries."""
    d = descriptor
    out: dict[str, Value] = {}
    if d.kind in (s.COLLECTIVE, s.P2P):
        out[s.DL_COMM_OPERATION] = d.name
        out[s.DL_COMM_ASYNC] = bool(flags & s.Flag.ASYNC)
    if d.kind == s.STAGE:
        out[s.DL_PHASE] = d.name
    named = (
        (s.DL_COMM_BACKEND, d.backend),
        (s.DL_COMM_GROUP_ID, d.group),
        (s.DL_COMM_GROUP_SIZE, d.group_size),
        (s.DL_COMM_DTYPE, d.dtype),
        (s.DL_TENSOR_NAME, d.tensor),
        (s.DL_QUEUE_TYPE, d.queue_type),
        (s.DL_ACTIVITY, d.activity),
        (s.ERROR_TYPE, error_type),
    )
    out.update({name: value for name, value in named if value})
    if d.kind not in (s.STEP, s.STAGE) or (d.kind == s.STAGE and source == s.Source.DEVICE):
        out[s.DL_TIME_SOURCE] = s.SOURCE_NAMES[min(source, s.Source.BOUND)]
    if flags & s.Flag.TRUNCATED:
        out[s.DL_SPAN_TRUNCATED] = True
    return out


def number_columns(batch: SpanBatch, left_out: Column | None = None) -> list[tuple[str, Column, Column]]:
    """Return (attribute, int64 values, mask of the rows that carry it), each of shape (n,), of those that some carry.

    Args:
        batch: The spans.
        left_out: For each row, how many spans of its rank's step were left out (0: says nothing).
    """
    columns = [*_numbers(batch)]
    if left_out is not None:
        columns.append((s.DL_SPANS_LEFT_OUT, left_out.astype(np.int64), left_out > 0))
    return [column for column in columns if column[2].any()]


def _numbers(batch: SpanBatch) -> Iterator[tuple[str, Column, Column]]:
    """Yield what may vary from row to row, as `number_columns` has it; of kinds of spans that are not there nothing."""
    rows = batch.rows
    number = rows["step"].astype(np.int64)
    yield s.DL_STEP, number, number != NO_STEP
    size = rows["size"].view(np.int64) if rows.flags.c_contiguous else rows["size"].astype(np.int64)
    a, b = rows["a"].astype(np.int64), rows["b"].astype(np.int64)
    if (step := batch.is_kind(s.STEP)).any():
        yield s.DL_STEP_USER, size, step & (rows["size"] != NO_USER_STEP)
        yield s.DL_BATCH_SIZE, a, step & (a > 0)
        yield s.DL_EPOCH, b, step & (b >= 0)
    if (stage := batch.is_kind(s.STAGE)).any():
        yield s.DL_STAGE_COUNT, a, stage
        yield s.DL_STAGE_TOTAL, size, stage
        yield s.DL_TIME_RESIDUAL, b, stage & (rows["source"] == s.Source.DEVICE)
    yield s.CPYTHON_GC_GENERATION, b, batch.is_pause
    yield from _numbers_of_operations(batch, size, a, b)


def _numbers_of_operations(
    batch: SpanBatch, size: Column, a: Column, b: Column
) -> Iterator[tuple[str, Column, Column]]:
    """Yield those of operations and of phases."""
    collective, p2p, phase = (batch.is_kind(kind) for kind in (s.COLLECTIVE, s.P2P, s.PHASE))
    comm, either, key = collective | p2p, collective | phase, batch.keys
    seq, partition = batch["seq"].astype(np.int64), batch["partition"].astype(np.int64)
    yield s.DL_COMM_SEQ, seq, comm & (seq > 0)
    yield s.DL_COMM_SIZE, size, (comm & (size >= 0)) | (phase & (size > 0))  # what is negative was none
    yield s.DL_COMM_ROOT, b, collective & (b >= 0)
    to_rank, request = p2p | batch.is_kind(s.TICK), batch.is_request  # a ready tick says whose it is
    if (to_rank | request).any():
        yield s.DL_COMM_PEER_RANK, np.where(request, b, a), (to_rank & (a >= 0)) | (request & (b >= 0))
        yield s.DL_COMM_TAG, b, p2p & (b >= 0)
    yield s.DL_QUEUE_WAIT, a, either & (a > 0)
    yield s.DL_KEY, key << 16 | partition, either & (key >= 0)
    yield s.DL_PARTITION, partition, batch["level"] == s.Level.PARTITION


def collective_ids(batch: SpanBatch, owners: Sequence[tuple[Bind | None, int]] = ()) -> Column:
    """Return the id that each row's operation has on every rank, shape (n,), uint64; 0 where none is certain.

    Args:
        batch: The spans.
        owners: Where they are of several processes: who wrote how many of them, one after the other.
    """
    owners = owners or [(batch.process.bind, len(batch))]
    whose = np.repeat(np.arange(len(owners)), [rows for _, rows in owners])
    known = np.flatnonzero(batch.is_kind(s.COLLECTIVE, s.P2P) & (batch["seq"] > 0))
    out = np.zeros(len(batch), np.uint64)
    worlds: dict[tuple[str, str, str], dict[int, Bind]] = {}
    for place, (bind, _) in enumerate(owners):
        if bind is not None:
            worlds.setdefault((bind.job, bind.generation, bind.world), {})[place] = bind
    for binds in worlds.values():
        mine = known if len(binds) == len(owners) else known[np.isin(whose[known], list(binds))]
        for d, some in _by_series(batch, mine):
            if d.kind == s.P2P:
                ends = (column[some].tolist() for column in (whose, batch["a"], batch["b"], batch["seq"]))
                out[some] = [_p2p_id(d, binds[place], *end) for place, *end in zip(*ends, strict=True)]
            else:
                out[some] = _ids_of_series(d, next(iter(binds.values())), batch["seq"][some])
    return out


def _ids_of_series(d: Descriptor, bind: Bind, seqs: Column) -> Column:
    numbers, which = distinct(seqs)  # ranks have the same
    ids = identity.collective_ids(bind, s.COLLECTIVE, d.group, series_name(d), numbers.tolist())
    return np.array(ids, np.uint64)[which]


def _by_series(batch: SpanBatch, rows: Column) -> Iterator[tuple[Descriptor, Column]]:
    """Yield the *rows*, operations, that are numbered together, with one of their descriptors."""
    numbers, which = distinct(batch["descriptor"][rows])
    series: dict[tuple[str, str, str], list[int]] = {}
    for i, number in enumerate(numbers.tolist()):
        d = batch.descriptors[number]
        series.setdefault((d.kind, d.group, series_name(d)), []).append(i)
    for members in series.values():
        some = rows if len(series) == 1 else rows[np.isin(which, members)]
        yield batch.descriptors[numbers[members[0]]], some


def series_name(d: Descriptor) -> str:
    """Return by what, beside its kind and group, *d* is numbered."""
    if d.kind == s.P2P:
        return d.name
    # torch counts per group, so the name says nothing; elsewhere the tensor's own count does.
    return "" if d.backend in s.TORCH_BACKENDS else d.tensor


def _p2p_id(d: Descriptor, bind: Bind, peer: int, tag: int, nth: int) -> int:
    sends = "send" in d.name
    source, destination = (bind.rank, peer) if sends else (peer, bind.rank)
    return identity.p2p_id(bind, d.group, source, destination, tag, nth)


@lru_cache(maxsize=256)
def resource_attributes(process: Process) -> Mapping[str, Value]:
    """Return the resource of *process*: which job, which rank, which host. Not to be changed: it is shared."""
    here: dict[str, Value] = {
        s.HOST_NAME: process.host,
        s.HOST_ID: process.boot_id or process.host,
        s.PROCESS_PID: process.pid,
        s.DL_CLOCK_UNCERTAINTY: process.anchor.uncertainty,
    }
    # Bytes that are no UTF-8 may make two names one.
    told = {clean(name): value for name, value in process.resource}
    return merge({} if process.bind is None else job_attributes(process.bind), here, told, process.nonce)


class Launcher(NamedTuple):
    """The span that launched the job: its trace's id and its own."""

    trace_id: int
    span_id: int


@lru_cache(maxsize=256)
def launcher_of(process: Process) -> Launcher | None:
    """Return what `TRACEPARENT` said where *process* began, None if nothing: the roots of its steps link to it."""
    known = dict(process.resource)
    trace_id, span_id = str(known.get(s.DL_LAUNCHER_TRACE_ID, "")), str(known.get(s.DL_LAUNCHER_SPAN_ID, ""))
    is_one = _TRACE_ID.fullmatch(trace_id) and _SPAN_ID.fullmatch(span_id)
    return Launcher(int(trace_id, 16), int(span_id, 16)) if is_one else None

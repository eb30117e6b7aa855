"""From column batches to OTLP requests: complete bodies, none longer than a collector takes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from otel_dltrace._version import __version__
from otel_dltrace.export.otlp_spans import encode_spans
from otel_dltrace.export.protobuf import BYTES, attributes, nested, tag, text, varint
from otel_dltrace.model import semconv as s
from otel_dltrace.model.attributes import Value
from otel_dltrace.model.identity import NO_STEP, Bind, trace_id
from otel_dltrace.model.spans import Column, SpanBatch

LIMIT = 3_500_000
"""Bytes of a request: a collector's gRPC receiver takes 4 MiB by default."""
OPERATIONS_PER_TRACE = 1000
"""Where there are no steps, so many operations of a group share a trace (contract 4)."""
_DOUBLINGS = 5  # each doubles the depth in which an operation is looked for: 32 phases below phases
_SCOPE = nested(1, nested(1, b"otel_dltrace") + nested(2, text(__version__)))


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """One complete ExportTraceServiceRequest and how many spans are in it."""

    body: bytes
    spans: int


def encode_requests(
    batch: SpanBatch,
    trace_ids: Column,
    resource: Mapping[str, Value],
    left_out: Column | None = None,
    limit: int = LIMIT,
) -> list[EncodedRequest]:
    """Return the spans of *batch* as requests of at most *limit* bytes; spans of one shape lie together.

    Args:
        batch: The spans; ``start`` and ``end`` plus ``batch.wall`` are Unix ns.
        trace_ids: For each row its trace's id, shape (n, 16), uint8.
        resource: The attributes of the resource.
        left_out: For each row, how many spans of its rank's step were left out (0: says nothing).
        limit: Bytes of a request; a span that alone is longer goes out alone.
    """
    # True and 1 are the same key of a cache, but not the same attribute.
    head = _head(tuple((name, type(value), value) for name, value in resource.items()))
    room = limit - len(_envelope(head, limit))
    return [_request(head, pieces) for pieces in _pack(encode_spans(batch, trace_ids, left_out), room)]


@lru_cache(maxsize=256)
def _head(resource: tuple[tuple[str, type, Value], ...]) -> bytes:
    return nested(1, attributes(1, {name: value for name, _, value in resource}))


def _pack(blocks: Iterable[Column], room: int) -> Iterator[list[Column]]:
    """Yield lists of pieces of *blocks* (a row is a span) that hold at most *room* bytes together."""
    pieces: list[Column] = []
    left = room
    for block in blocks:
        at = 0
        while at < len(block):
            fit = max(0, left // block.shape[1])
            if pieces and not fit:
                yield pieces
                pieces, left = [], room
                continue
            piece = block[at : at + max(1, fit)]
            pieces.append(piece)
            at += len(piece)
            left -= piece.size
    if pieces:
        yield pieces


def _request(head: bytes, pieces: list[Column]) -> EncodedRequest:
    envelope = _envelope(head, sum(piece.size for piece in pieces))
    return EncodedRequest(b"".join([envelope, *(piece.data for piece in pieces)]), sum(map(len, pieces)))


def _envelope(head: bytes, length: int) -> bytes:
    """Return what precedes *length* bytes of spans in a request whose resource is *head*."""
    scope_spans = tag(2, BYTES) + varint(len(_SCOPE) + length) + _SCOPE
    return tag(1, BYTES) + varint(len(head) + len(scope_spans) + length) + head + scope_spans


def trace_id_column(batch: SpanBatch, bind: Bind, shard: int = 0) -> Column:
    """Return the id of each row's trace, shape (n, 16), uint8: one trace per step.

    Outside any step a trace is cut per 1,000 operations of a group; what an operation has below
    it goes where its operation goes, if that is in *batch*, else into the first such trace.
    """
    cut = batch["step"].astype(np.int64)
    outside = np.flatnonzero(cut == NO_STEP)
    cut[outside] += _operation_numbers(batch.take(outside)) // OPERATIONS_PER_TRACE
    parts, which = np.unique(cut, return_inverse=True)
    names = [part if part < NO_STEP else f"ops.{part - NO_STEP}" for part in parts.tolist()]
    ids = np.array([list(trace_id(bind, name, shard).to_bytes(16, "big")) for name in names], np.uint8)
    column: Column = ids.reshape(-1, 16)[which]
    return column


def _operation_numbers(batch: SpanBatch) -> Column:
    """Return the number in its group of each row's operation, shape (n,), int64; 0 where there is none."""
    is_operation = batch.is_kind(s.COLLECTIVE, s.P2P)
    seq = np.where(is_operation, batch["seq"], 0).astype(np.int64)
    if is_operation.all() or not is_operation.any():
        return seq
    ids, parents = batch["span_id"], batch["parent_id"]
    by_id = np.argsort(ids)
    at = by_id[np.minimum(np.searchsorted(ids, parents, sorter=by_id), len(ids) - 1)]
    up = np.where(~is_operation & (ids[at] == parents), at, np.arange(len(ids)))
    for _ in range(_DOUBLINGS):
        up = up[up]
    return seq[up]

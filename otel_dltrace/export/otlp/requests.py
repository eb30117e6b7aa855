"""From column batches to OTLP requests: complete bodies, none longer than a collector takes."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from otel_dltrace._version import __version__
from otel_dltrace.export.otlp.merge import Merger
from otel_dltrace.export.otlp.protobuf import BYTES, attributes, nested, tag, text, varint
from otel_dltrace.export.otlp.spans import encode_spans
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.attributes import Launcher, Value, collective_ids, launcher_of
from otel_dltrace.model.spans import SpanBatch

LIMIT = 3_500_000
"""Bytes of a request: a collector's gRPC receiver takes 4 MiB by default."""
_SCOPE = nested(1, nested(1, b"otel_dltrace") + nested(2, text(__version__)))


@dataclass(frozen=True, slots=True)
class Part:
    """Spans of one process, to be encoded with those of others.

    Attributes:
        batch: The spans; ``start`` and ``end`` plus ``batch.wall`` are Unix ns.
        trace_ids: For each row its trace's id, shape (n, 16), uint8.
        resource: The attributes of the resource.
        left_out: For each row, how many spans of its rank's step were left out (0: says nothing).
    """

    batch: SpanBatch
    trace_ids: Column
    resource: Mapping[str, Value]
    left_out: Column | None = None


@dataclass(frozen=True, slots=True)
class EncodedRequest:
    """One complete ExportTraceServiceRequest, how many spans are in it, and the numbers of the parts they are of."""

    body: bytes
    spans: int
    parts: tuple[int, ...] = (0,)


def encode_together(parts: Sequence[Part], rows: Column, merger: Merger, limit: int = LIMIT) -> list[EncodedRequest]:
    """Return the spans of several processes as requests of at most *limit* bytes; spans of one shape lie together.

    All are encoded at once, since much of what numpy costs is per call. *rows* are those of all *parts*, and are
    changed. A span that alone is longer than *limit* goes out alone.
    """
    if not len(rows):
        return []
    batches = [part.batch for part in parts]
    launchers = _launchers(batches)
    merged = merger.merge(batches, rows)
    matrices = encode_spans(
        merged,
        np.concatenate([part.trace_ids for part in parts]),
        collective_ids(merged, [(batch.process.bind, len(batch)) for batch in batches]),
        _left_out(parts),
        *launchers,
    )
    ends = np.cumsum([len(batch) for batch in batches])
    blocks: list[list[Column]] = [[] for _ in parts]
    for which, matrix in matrices:
        cuts = np.searchsorted(which, ends).tolist()  # they come in order, so a part's lie together
        for i, (begin, end) in enumerate(zip([0, *cuts], cuts, strict=False)):
            if begin < end:
                blocks[i].append(matrix[begin:end])
    return [_request(content) for content in _pack([_head_of(part) for part in parts], blocks, limit)]


def _left_out(parts: Sequence[Part]) -> Column | None:
    if all(part.left_out is None for part in parts):
        return None
    return np.concatenate([np.zeros(len(p.batch), np.int64) if p.left_out is None else p.left_out for p in parts])


def _launchers(batches: Sequence[SpanBatch]) -> tuple[list[Launcher | None], Column | None]:
    """Return spans that rows link to, and for each row which; roots alone do, and to what launched their job."""
    linked = [(launcher_of(batch.process), batch) for batch in batches]
    launchers = [None, *dict.fromkeys(launcher for launcher, _ in linked if launcher)]
    if len(launchers) == 1:
        return launchers, None
    return launchers, np.concatenate([batch.is_root * launchers.index(launcher) for launcher, batch in linked])


# -- requests -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Content:
    """What one request has of one part: its resource, and blocks of spans (a row is a span)."""

    part: int
    head: bytes
    pieces: list[Column]


def _head_of(part: Part) -> bytes:
    # True and 1 are the same key of a cache, but not the same attribute.
    return _head(tuple((name, type(value), value) for name, value in part.resource.items()))


@lru_cache(maxsize=256)
def _head(resource: tuple[tuple[str, type, Value], ...]) -> bytes:
    return nested(1, attributes(1, {name: value for name, _, value in resource}))


def _pack(heads: list[bytes], blocks: list[list[Column]], limit: int) -> Iterator[list[_Content]]:
    """Yield contents of requests: as many spans of the parts, whose *blocks* are given, as *limit* bytes hold."""
    request: list[_Content] = []
    left = limit
    for part, head in enumerate(heads):
        envelope = len(_envelope(head, limit))
        content: _Content | None = None
        for block in blocks[part]:
            at, width = 0, block.shape[1]
            while at < len(block):
                room = left if content else left - envelope
                fit = max(0, room // width)
                if request and not fit:
                    yield request
                    request, content, left = [], None, limit
                    continue
                if content is None:
                    content = _Content(part, head, [])
                    request.append(content)
                    left -= envelope
                piece = block[at : at + max(1, fit)]
                content.pieces.append(piece)
                at += len(piece)
                left -= piece.size
    if request:
        yield request


def _request(contents: list[_Content]) -> EncodedRequest:
    buffers: list[bytes | memoryview] = []
    for content in contents:
        buffers.append(_envelope(content.head, sum(piece.size for piece in content.pieces)))
        buffers += [piece.data for piece in content.pieces]
    spans = sum(len(piece) for content in contents for piece in content.pieces)
    return EncodedRequest(b"".join(buffers), spans, tuple(content.part for content in contents))


def _envelope(head: bytes, length: int) -> bytes:
    """Return what precedes *length* bytes of spans whose resource is *head*."""
    scope_spans = tag(2, BYTES) + varint(len(_SCOPE) + length) + _SCOPE
    return tag(1, BYTES) + varint(len(head) + len(scope_spans) + length) + head + scope_spans

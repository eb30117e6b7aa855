"""Decided steps as they leave, whichever way: under their roots, each shard in traces of its own."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from otel_dltrace.export.outgoing.gate import Outgoing
from otel_dltrace.export.rundir.traces import trace_id_column
from otel_dltrace.model import semconv
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP, Bind, rank_step_id, root_ids
from otel_dltrace.model.spans import SpanBatch, stack_rows

Tag = tuple[int, int]
"""Nonce and first step of what leaves; `NO_STEP` if it holds spans outside any."""


@dataclass(frozen=True, slots=True)
class Departing:
    """Spans of one process that leave together.

    Attributes:
        batch: The spans.
        trace_ids: For each row its trace's id, shape (n, 16), uint8.
        left_out: For each row, how many spans of its rank's step were left out (0: says nothing); None for none.
    """

    batch: SpanBatch
    trace_ids: Column
    left_out: Column | None


def shards_of(outgoing: Iterable[Outgoing]) -> list[list[Outgoing]]:
    """Return *outgoing* by shard, without those that have no rows."""
    shards: dict[int, list[Outgoing]] = {}
    for out in outgoing:
        if len(out.rows):
            shards.setdefault(out.shard, []).append(out)
    return [outs for _, outs in sorted(shards.items())]


def parts_of(batch: SpanBatch, outgoing: Iterable[Outgoing]) -> Iterator[Departing]:
    """Yield *outgoing*, whose rows are of *batch*'s process, a part for each shard."""
    for outs in shards_of(outgoing):
        yield departing(batch, outs, stack_rows([out.rows for out in outs]))


def departing(batch: SpanBatch, outs: Sequence[Outgoing], rows: Column) -> Departing:
    """Return *outs*, of one shard and of *batch*'s process, as they leave; *rows* are theirs, and are changed."""
    bind, shard = batch.process.bind, outs[0].shard
    assert bind is not None
    part = replace(batch, rows=rows)
    _hang_stepless(rows, outs, bind)
    hang_under_roots(part, shard)
    return Departing(part, trace_id_column(part, bind, shard), _left_out(part, outs))


def tags_of(batch: SpanBatch, outgoing: Sequence[Outgoing]) -> frozenset[Tag]:
    """Return what is to be sent again if we are killed before *outgoing* is delivered."""
    steps = {out.step for out in outgoing}
    return frozenset((batch.process.nonce, step) for step in {min(steps)} | steps & {NO_STEP})


def _hang_stepless(rows: Column, outs: Sequence[Outgoing], bind: Bind) -> None:
    """Have what would hang under a step span that is not there hang under nothing, in place."""
    end = 0
    for out in outs:
        begin, end = end, end + len(out.rows)
        if out.stepless and out.step != NO_STEP:
            parents = rows["parent_id"][begin:end]
            parents[parents == np.uint64(rank_step_id(bind, out.step))] = 0


def hang_under_roots(batch: SpanBatch, shard: int) -> None:
    """Make the step's root the parent of each rank step, in place."""
    bind = batch.process.bind
    assert bind is not None
    rows = batch.rows
    at = np.flatnonzero(batch.is_rank_step & (rows["step"] != NO_STEP))
    rows["parent_id"][at] = np.array(root_ids(bind, rows["step"][at].tolist(), shard), np.uint64)


def _left_out(batch: SpanBatch, parts: Sequence[Outgoing]) -> Column | None:
    """Return for each row how many spans its step left out: said once, on the rank's step span."""
    if not any(out.left_out for out in parts):
        return None
    counts = np.repeat([out.left_out for out in parts], [len(out.rows) for out in parts])
    said: Column = np.where(batch.is_kind(semconv.STEP), counts, 0)
    return said

"""Decided steps as they leave, whichever way: under their roots, each shard in traces of its own."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from otel_dltrace.export.gate import Outgoing
from otel_dltrace.export.traces import trace_id_column
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
        tags: What is to be sent again if we are killed before they are delivered.
    """

    batch: SpanBatch
    trace_ids: Column
    left_out: Column | None
    tags: frozenset[Tag]


def parts_of(batch: SpanBatch, outgoing: Sequence[Outgoing]) -> Iterator[Departing]:
    """Yield *outgoing*, whose rows are of *batch*'s process, a part for each shard."""
    bind = batch.process.bind
    assert bind is not None
    for shard in sorted({out.shard for out in outgoing}):
        outs = [out for out in outgoing if out.shard == shard and len(out.rows)]
        if outs:
            part = replace(batch, rows=stack_rows([_hung(out, bind) for out in outs]))
            hang_under_roots(part, shard)
            yield Departing(part, trace_id_column(part, bind, shard), _left_out(part, outs), tags_of(batch, outs))


def tags_of(batch: SpanBatch, outgoing: Sequence[Outgoing]) -> frozenset[Tag]:
    """Return what is to be sent again if we are killed before *outgoing* is delivered."""
    steps = {out.step for out in outgoing}
    return frozenset((batch.process.nonce, step) for step in {min(steps)} | steps & {NO_STEP})


def _hung(out: Outgoing, bind: Bind) -> Column:
    """Return the rows of *out*; without a step span, what would hang under it hangs under nothing."""
    if not out.stepless or out.step == NO_STEP:
        return out.rows
    rows: Column = out.rows.copy()
    rows["parent_id"][rows["parent_id"] == np.uint64(rank_step_id(bind, out.step))] = 0
    return rows


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

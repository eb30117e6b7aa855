"""Which trace a span belongs to (contract 4)."""

from dataclasses import replace

import numpy as np

from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, distinct, places_in
from otel_dltrace.model.identity import NO_STEP, Bind, trace_ids
from otel_dltrace.model.spans import SpanBatch, empty_rows, stack_rows

_DOUBLINGS = 5  # each doubles the depth in which an operation is looked for: 32 phases below phases
PHASES = 1 << 60  # from here on numbers mean phases outside any step: the descriptor, and how often its name came


def trace_id_column(batch: SpanBatch, bind: Bind, shard: int = 0) -> Column:
    """Return the id of each row's trace, shape (n, 16), uint8: one trace per step.

    Outside any step a phase that the program marks is a trace, with all that is below it, named by how
    often that name came. What is below none is cut per 1,000 operations of a group; what an operation
    has below it goes where its operation goes. What hangs under something unknown (*batch* and what is
    above it say what is known) is in the first such trace.
    """
    cut = batch["step"].astype(np.int64)
    outside = np.flatnonzero(cut == NO_STEP)
    if len(outside):
        cut[outside] = parts_outside(batch.take(outside))
    if not len(cut):
        return np.zeros((0, 16), np.uint8)
    parts, which = distinct(cut)
    names = [_part_name(batch, part) for part in parts.tolist()]
    ids = np.frombuffer(b"".join([known.to_bytes(16, "big") for known in trace_ids(bind, names, shard)]), "V16")
    column: Column = ids.take(which).view(np.uint8).reshape(-1, 16)
    return column


def _part_name(batch: SpanBatch, part: int) -> int | str:
    """Return the step, or how all ranks name a part of a run outside any step (`parts_outside`)."""
    if part < NO_STEP:
        return part
    if part < PHASES:
        return f"ops.{part - NO_STEP}"
    descriptor, occurrence = divmod(part - PHASES, 1 << 32)
    return f"phase.{batch.descriptors[descriptor].name}.{occurrence}"


def parts_outside(batch: SpanBatch) -> Column:
    """Return for each row, all of them outside any step, a number for its part of the run, shape (n,), int64.

    What a server did for an operation of another process is numbered as that is.
    """
    known = replace(batch, rows=stack_rows([batch.rows, batch.above]), above=empty_rows())
    here = np.arange(len(known))
    is_remote = known["flags"] & np.uint16(s.Flag.REMOTE) != 0
    is_operation = known.is_kind(s.COLLECTIVE, s.P2P) | is_remote
    up = np.where(is_remote, here, _parents(known))
    top, operation = up, np.where(is_operation, here, up)
    for _ in range(_DOUBLINGS):
        top, operation = top[top], operation[operation]
    seq = known["seq"].astype(np.int64)
    phases = PHASES + (known["descriptor"].astype(np.int64) << 32) + seq
    operations = NO_STEP + np.where(is_operation, seq, 0) // s.OPERATIONS_PER_TRACE
    parts: Column = np.where((known.is_block & (seq > 0))[top], phases[top], operations[operation])
    return parts[: len(batch)]


def _parents(batch: SpanBatch) -> Column:
    """Return where each row's parent is, shape (n,); where it is not among them, the row itself."""
    at = places_in(batch["parent_id"], batch["span_id"])
    return np.where(at < 0, np.arange(len(at)), at)

"""Which trace a span belongs to, and how many spans a trace outside any step may hold (contract 4 and 5)."""

from dataclasses import replace

import numpy as np

from otel_dltrace.export.gate import Outgoing
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP, Bind, trace_ids
from otel_dltrace.model.spans import Column, SpanBatch, distinct, empty_rows, places_in, stack_rows

_DOUBLINGS = 5  # each doubles the depth in which an operation is looked for: 32 phases below phases
_REMEMBERED = 1024
_PHASES = 1 << 60  # from here on numbers mean phases outside any step: the descriptor, and how often its name came


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
        cut[outside] = _parts_outside(batch.take(outside))
    if not len(cut):
        return np.zeros((0, 16), np.uint8)
    parts, which = distinct(cut)
    names = [_part_name(batch, part) for part in parts.tolist()]
    ids = np.frombuffer(b"".join([known.to_bytes(16, "big") for known in trace_ids(bind, names, shard)]), "V16")
    column: Column = ids.take(which).view(np.uint8).reshape(-1, 16)
    return column


class OutsideBudget:
    """Keeps traces outside any step within the budget: of each the spans that began first.

    Every rank may send as many into one of them: operations are numbered alike on all, so the first ones of
    a trace are there of every rank. A phase that is itself a trace's top always goes out.

    Args:
        bind: Who the rank is.
        budget: Spans per trace, 0 for no limit.
    """

    def __init__(self, bind: Bind, budget: int) -> None:
        self._most = max(1, budget // max(1, bind.world_size + bind.servers)) if budget > 0 else 0
        self._sent: dict[int, int] = {}

    def within(self, outgoing: Outgoing, batch: SpanBatch) -> Outgoing:
        """Return of *outgoing*, whose rows are *batch*'s and outside any step, what its traces have room for."""
        if not self._most:
            return outgoing
        parts, which = distinct(_parts_outside(batch))
        rows = stack_rows(
            [self._chosen(part, batch.rows.compress(which == at)) for at, part in enumerate(parts.tolist())]
        )
        while len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]
        return outgoing._replace(rows=rows, left_out=len(batch) - len(rows))

    def _chosen(self, part: int, rows: Column) -> Column:
        room = self._most - self._sent.get(part, 0)
        if len(rows) > room:
            is_top = rows["parent_id"] == 0 if part >= _PHASES else np.zeros(len(rows), bool)
            left = max(0, room - int(is_top.sum()))
            below = rows.compress(~is_top)
            first = np.lexsort((below["level"], below["start"]))[:left]
            rows = stack_rows([rows.compress(is_top), below.take(np.sort(first))])
        self._sent[part] = self._most - room + len(rows)
        return rows


def _part_name(batch: SpanBatch, part: int) -> int | str:
    """Return the step, or how all ranks name a part of a run outside any step (`_parts_outside`)."""
    if part < NO_STEP:
        return part
    if part < _PHASES:
        return f"ops.{part - NO_STEP}"
    descriptor, occurrence = divmod(part - _PHASES, 1 << 32)
    return f"phase.{batch.descriptors[descriptor].name}.{occurrence}"


def _parts_outside(batch: SpanBatch) -> Column:
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
    phases = _PHASES + (known["descriptor"].astype(np.int64) << 32) + seq
    operations = NO_STEP + np.where(is_operation, seq, 0) // s.OPERATIONS_PER_TRACE
    parts: Column = np.where((known.is_block & (seq > 0))[top], phases[top], operations[operation])
    return parts[: len(batch)]


def _parents(batch: SpanBatch) -> Column:
    """Return where each row's parent is, shape (n,); where it is not among them, the row itself."""
    at = places_in(batch["parent_id"], batch["span_id"])
    return np.where(at < 0, np.arange(len(at)), at)

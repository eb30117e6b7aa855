"""From decided steps to requests on their way: the drain's side of OTLP."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from otel_dltrace.export.gate import Outgoing
from otel_dltrace.export.otlp import encode_requests, trace_id_column
from otel_dltrace.export.otlp_sender import Sender
from otel_dltrace.export.otlp_settings import OtlpSettings
from otel_dltrace.export.otlp_transport import connect
from otel_dltrace.model import semconv
from otel_dltrace.model.attributes import resource_attributes
from otel_dltrace.model.identity import NO_STEP, Bind, rank_step_id, root_id
from otel_dltrace.model.spans import Column, SpanBatch, stack_rows

Tag = tuple[int, int]
"""Nonce and first step of a request."""


class Outlet:
    """Encodes what goes out and hands it to the sender.

    Args:
        settings: Where to.
    """

    def __init__(self, settings: OtlpSettings) -> None:
        self._folder: Path | None = None
        self._sender = Sender(connect(settings), lambda: self._folder)
        self.sent = 0

    def spill_to(self, folder: Path) -> None:
        """Keep requests in *folder* while the collector is away; the first one named stays."""
        self._folder = self._folder or folder

    def send(self, batch: SpanBatch, outgoing: Sequence[Outgoing]) -> None:
        """Encode and queue *outgoing*, whose rows together are *batch*'s; never blocks."""
        bind = batch.process.bind
        assert bind is not None
        resource = resource_attributes(batch.process)
        for shard in sorted({out.shard for out in outgoing}):
            parts = [out for out in outgoing if out.shard == shard and len(out.rows)]
            if not parts:
                continue
            part = SpanBatch(stack_rows([hung(o, bind) for o in parts]), batch.descriptors, batch.process, batch.errors)
            hang_under_roots(part, shard)
            trace_ids = trace_id_column(part, bind, shard)
            tag = (batch.process.nonce, min(out.step for out in parts))
            for request in encode_requests(part, trace_ids, resource, left_out_column(part, parts)):
                self._sender.submit(request.body, request.spans, tag)
            self.sent += len(part)

    def unsettled(self) -> set[Any]:
        """Return the tags that are neither acknowledged nor spilled."""
        return set(self._sender.pending())

    def figures(self) -> dict[str, Any]:
        """Return what became of the spans so far."""
        return {"sent": self.sent, **asdict(self._sender.delivery())}

    def close(self, timeout: float) -> dict[str, Any]:
        """Deliver or spill what is left within *timeout* seconds; return the figures."""
        return {"sent": self.sent, **asdict(self._sender.close(timeout))}


def hung(out: Outgoing, bind: Bind) -> Column:
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
    is_rank_step = batch.lookup(lambda d: d.kind == semconv.STEP and d.name == semconv.RANK_STEP, bool)
    for i in np.flatnonzero(is_rank_step & (rows["step"] != NO_STEP)):
        rows["parent_id"][i] = np.uint64(root_id(bind, int(rows["step"][i]), shard))


def left_out_column(batch: SpanBatch, parts: Sequence[Outgoing]) -> Column:
    """Return for each row how many spans its step left out: said once, on the rank's step span."""
    counts = np.concatenate([np.full(len(out.rows), out.left_out) for out in parts])
    said: Column = np.where(batch.is_kind(semconv.STEP), counts, 0)
    return said

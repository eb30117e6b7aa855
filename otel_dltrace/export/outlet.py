"""From decided steps to requests on their way: the drain's side of OTLP."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from otel_dltrace.export.gate import Outgoing
from otel_dltrace.export.otlp.diagnosis import diagnose
from otel_dltrace.export.otlp.merge import Merger
from otel_dltrace.export.otlp.requests import Part, encode_together
from otel_dltrace.export.otlp.sender import Delivery, Sender
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.otlp.transport import connect
from otel_dltrace.export.traces import trace_id_column
from otel_dltrace.model import semconv
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.attributes import resource_attributes
from otel_dltrace.model.identity import NO_STEP, Bind, rank_step_id, root_ids
from otel_dltrace.model.spans import SpanBatch, stack_rows

Tag = tuple[int, int]
"""Nonce and first step of a request; `NO_STEP` if it holds spans outside any."""
AT_ONCE = 16_384
"""So many spans are encoded without waiting for more: while a processor's cache has them it is twice as fast."""


class Outlet:
    """Encodes what goes out and hands it to the sender.

    Args:
        settings: Where to.
    """

    def __init__(self, settings: OtlpSettings) -> None:
        self._folder: Path | None = None
        self._settings = settings
        self._sender = Sender(connect(settings), lambda: self._folder)
        self._merger = Merger()
        self._waiting: dict[Path | None, list[tuple[frozenset[Tag], Part]]] = {}
        self.sent = 0

    def spill_to(self, folder: Path) -> None:
        """Keep requests of what is sent from now on in a folder of *folder* while the collector is away."""
        self._folder = folder / "spill"

    def send(self, batch: SpanBatch, outgoing: Sequence[Outgoing]) -> None:
        """Take *outgoing*, whose rows together are *batch*'s, to be sent with the next `flush` or before."""
        bind = batch.process.bind
        assert bind is not None
        resource = resource_attributes(batch.process)
        for shard in sorted({out.shard for out in outgoing}):
            outs = [out for out in outgoing if out.shard == shard and len(out.rows)]
            if not outs:
                continue
            part = replace(batch, rows=stack_rows([hung(o, bind) for o in outs]))
            hang_under_roots(part, shard)
            left_out = left_out_column(part, outs) if any(out.left_out for out in outs) else None
            told = Part(part, trace_id_column(part, bind, shard), resource, left_out)
            self._waiting.setdefault(self._folder, []).append((tags_of(batch, outs), told))
        if sum(len(part.batch) for waiting in self._waiting.values() for _, part in waiting) >= AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Encode and queue what was taken since the last time, all of a run together; never blocks."""
        by_folder, self._waiting = self._waiting, {}
        for folder, waiting in by_folder.items():
            for request in encode_together([part for _, part in waiting], self._merger):
                tags = frozenset[Tag]().union(*(waiting[i][0] for i in request.parts))
                self._sender.submit(request.body, request.spans, tags, folder)
                self.sent += request.spans

    def unsettled(self) -> set[Tag]:
        """Return the tags of what is neither acknowledged nor spilled."""
        pending: Any = self._sender.pending()
        return set[Tag]().union(*pending, *(tags for waiting in self._waiting.values() for tags, _ in waiting))

    def figures(self) -> dict[str, Any]:
        """Return what became of the spans so far."""
        return {"sent": self.sent, **as_told(self._settings, self._sender.delivery())}

    def close(self, timeout: float) -> dict[str, Any]:
        """Deliver or spill what is left within *timeout* seconds; return the figures."""
        self.flush()
        return {"sent": self.sent, **as_told(self._settings, self._sender.close(timeout))}


def as_told(settings: OtlpSettings, delivery: Delivery) -> dict[str, Any]:
    """Return the figures of *delivery*, and what its trouble means."""
    return {**asdict(delivery), "diagnosis": str(diagnose(settings, delivery.trouble)) if delivery.trouble else ""}


def tags_of(batch: SpanBatch, outgoing: Sequence[Outgoing]) -> frozenset[Tag]:
    """Return what is to be sent again if we are killed before *outgoing* is delivered."""
    steps = {out.step for out in outgoing}
    return frozenset((batch.process.nonce, step) for step in {min(steps)} | steps & {NO_STEP})


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
    at = np.flatnonzero(batch.is_rank_step & (rows["step"] != NO_STEP))
    rows["parent_id"][at] = np.array(root_ids(bind, rows["step"][at].tolist(), shard), np.uint64)


def left_out_column(batch: SpanBatch, parts: Sequence[Outgoing]) -> Column:
    """Return for each row how many spans its step left out: said once, on the rank's step span."""
    counts = np.repeat([out.left_out for out in parts], [len(out.rows) for out in parts])
    said: Column = np.where(batch.is_kind(semconv.STEP), counts, 0)
    return said

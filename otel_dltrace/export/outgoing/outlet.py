"""From decided steps to requests on their way: the drain's side of OTLP."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from otel_dltrace.export.otlp.delivery import Delivery
from otel_dltrace.export.otlp.diagnosis import diagnose, doubt
from otel_dltrace.export.otlp.merge import Merger
from otel_dltrace.export.otlp.renewed import Renewed
from otel_dltrace.export.otlp.requests import Part, encode_together
from otel_dltrace.export.otlp.sender import Sender
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.otlp.transport import connect
from otel_dltrace.export.outgoing.departing import Tag, departing, shards_of, tags_of
from otel_dltrace.export.outgoing.gate import Outgoing
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.attributes import resource_attributes
from otel_dltrace.model.spans import SpanBatch, stack_rows
from otel_dltrace.record.guard import guarded

AT_ONCE = 65_536
"""So many spans are encoded without waiting for more: much of what that costs it costs however few there are."""
BROKEN = "not encoded, by an error of our own"


class _Waiting(NamedTuple):
    """Spans of one process and one shard that leave together, and what is to be sent again if they do not."""

    batch: SpanBatch
    outs: list[Outgoing]
    tags: frozenset[Tag]

    @property
    def spans(self) -> int:
        """How many they are."""
        return sum(len(out.rows) for out in self.outs)


class Outlet:
    """Encodes what goes out and hands it to the sender.

    Args:
        settings: Where to.
    """

    def __init__(self, settings: OtlpSettings) -> None:
        self._folder: Path | None = None
        self._settings = settings
        way = Renewed(partial(connect, settings), settings.has_files)
        self._sender = Sender(way, lambda: self._folder)
        self._merger = Merger()
        self._waiting: dict[Path | None, list[_Waiting]] = {}
        self._count = self._dropped = 0
        self._submitted = guarded(self._submit)
        self.sent = 0

    def spill_to(self, folder: Path) -> None:
        """Keep requests of what is sent from now on in a folder of *folder* while the collector is away."""
        self._folder = folder / "spill"

    def send(self, batch: SpanBatch, outgoing: Sequence[Outgoing]) -> None:
        """Take *outgoing*, whose rows together are *batch*'s, to be sent with the next `flush` or before."""
        waiting = self._waiting.setdefault(self._folder, [])
        for outs in shards_of(outgoing):
            waiting.append(_Waiting(batch, outs, tags_of(batch, outs)))
            self._count += waiting[-1].spans
        if self._count >= AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Encode and queue what was taken since the last time, all of a run together; never blocks."""
        by_folder, self._waiting, self._count = self._waiting, {}, 0
        for folder, waiting in by_folder.items():
            if not self._submitted(waiting, folder):  # one of them is at fault
                self._dropped += sum(one.spans for one in waiting if not self._submitted([one], folder))

    def _submit(self, waiting: Sequence[_Waiting], folder: Path | None) -> bool:
        for request in encode_together(*_stacked(waiting), self._merger):
            tags = frozenset[Tag]().union(*(waiting[i].tags for i in request.parts))
            self._sender.submit(request.body, request.spans, tags, folder)
            self.sent += request.spans
        return True

    def unsettled(self) -> set[Tag]:
        """Return the tags of what is neither acknowledged nor spilled."""
        pending: Any = self._sender.pending()
        return set[Tag]().union(*pending, *(one.tags for waiting in self._waiting.values() for one in waiting))

    def figures(self, run: Path | None = None) -> dict[str, Any]:
        """Return what became of the spans so far; what waits is that of *run* alone, if one is named."""
        delivery = self._sender.delivery(run)
        if self._dropped:
            delivery = replace(delivery, dropped={**delivery.dropped, BROKEN: self._dropped})
        return {"sent": self.sent, **as_told(self._settings, delivery)}

    def close(self, timeout: float) -> None:
        """Deliver or spill what is left within *timeout* seconds."""
        self.flush()
        self._sender.close(timeout)


def _stacked(waiting: Sequence[_Waiting]) -> tuple[list[Part], Column]:
    """Return what waits as parts, and the rows of all of them, one after the other: they are copied once."""
    rows = stack_rows([out.rows for one in waiting for out in one.outs])
    parts, end = [], 0
    for one in waiting:
        begin, end = end, end + one.spans
        part = departing(one.batch, one.outs, rows[begin:end])
        parts.append(Part(part.batch, part.trace_ids, resource_attributes(one.batch.process), part.left_out))
    return parts, rows


def as_told(settings: OtlpSettings, delivery: Delivery) -> dict[str, Any]:
    """Return the figures of *delivery*, what its trouble means, and what is to be known of those that were accepted."""
    doubted = str(doubt(settings, delivery.answered_in)) if delivery.answered_in else ""
    remark = f"{settings.where} says: {delivery.remark}" if delivery.remark else ""
    diagnosis = str(diagnose(settings, delivery.trouble)) if delivery.trouble else ""
    return {**asdict(delivery), "diagnosis": diagnosis, "warning": doubted or remark}

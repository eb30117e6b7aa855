"""From decided steps to requests on their way: the drain's side of OTLP."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from otel_dltrace.export.departing import Tag, parts_of
from otel_dltrace.export.gate import Outgoing
from otel_dltrace.export.otlp.delivery import Delivery
from otel_dltrace.export.otlp.diagnosis import diagnose, doubt
from otel_dltrace.export.otlp.merge import Merger
from otel_dltrace.export.otlp.requests import Part, encode_together
from otel_dltrace.export.otlp.sender import Sender
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.otlp.transport import connect
from otel_dltrace.model.attributes import resource_attributes
from otel_dltrace.model.spans import SpanBatch

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
        resource = resource_attributes(batch.process)
        for part in parts_of(batch, outgoing):
            told = Part(part.batch, part.trace_ids, resource, part.left_out)
            self._waiting.setdefault(self._folder, []).append((part.tags, told))
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

    def figures(self, run: Path | None = None) -> dict[str, Any]:
        """Return what became of the spans so far; what waits is that of *run* alone, if one is named."""
        return {"sent": self.sent, **as_told(self._settings, self._sender.delivery(run))}

    def close(self, timeout: float) -> None:
        """Deliver or spill what is left within *timeout* seconds."""
        self.flush()
        self._sender.close(timeout)


def as_told(settings: OtlpSettings, delivery: Delivery) -> dict[str, Any]:
    """Return the figures of *delivery*, what its trouble means, and what is to be known of those that were accepted."""
    doubted = str(doubt(settings, delivery.answered_in)) if delivery.answered_in else ""
    remark = f"{settings.where} says: {delivery.remark}" if delivery.remark else ""
    diagnosis = str(diagnose(settings, delivery.trouble)) if delivery.trouble else ""
    return {**asdict(delivery), "diagnosis": diagnosis, "warning": doubted or remark}

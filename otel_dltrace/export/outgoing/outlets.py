"""All ways out of the drain behind one: OTLP by our own encoder, and exporters of the OpenTelemetry SDK."""

from collections.abc import Sequence
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.outgoing.exporter_outlet import ExporterOutlet
from otel_dltrace.export.outgoing.gate import Outgoing
from otel_dltrace.export.outgoing.outlet import Outlet
from otel_dltrace.model.spans import SpanBatch

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


PATIENCE_S = 5.0
"""What exporters get at the end of a drain that nobody waits for: their imports alone may take a second or two."""


class Outlets:
    """Gives every batch to each outlet; none waits for another.

    Args:
        otlp: The way to the collector; None for no OTLP.
        exporters: The other ways.

    Attributes:
        patience: How many seconds exporters get at the end, at least; what they leave behind is lost.
    """

    def __init__(self, otlp: Outlet | None, exporters: Sequence[ExporterOutlet]) -> None:
        self._otlp, self._exporters = otlp, exporters
        self.patience = PATIENCE_S

    @property
    def _all(self) -> list[Outlet | ExporterOutlet]:
        return [*filter(None, [self._otlp]), *self._exporters]

    def spill_to(self, folder: Path) -> None:
        """Keep OTLP requests of what is sent from now on in a folder of *folder* while the collector is away."""
        if self._otlp is not None:
            self._otlp.spill_to(folder)

    def send(self, batch: SpanBatch, outgoing: Sequence[Outgoing]) -> None:
        """Queue *outgoing*, whose rows together are *batch*'s, everywhere; never blocks."""
        for outlet in self._all:
            outlet.send(batch, outgoing)

    def flush(self) -> None:
        """Have OTLP encode what it was given, all together."""
        if self._otlp is not None:
            self._otlp.flush()

    def unsettled(self) -> set[Any]:
        """Return the tags of what some outlet still has to take."""
        return set().union(*(outlet.unsettled() for outlet in self._all))

    def figures(self, run: Path) -> dict[str, Any]:
        """Return what became of the spans so far: ``otlp``, with what waits of *run*, and ``exporters`` by name."""
        otlp = {} if self._otlp is None else {"otlp": self._otlp.figures(run)}
        others = {exporter.name: exporter.figures() for exporter in self._exporters}
        return otlp | ({"exporters": others} if others else {})

    def close(self, timeout: float) -> None:
        """Give all outlets the same *timeout* seconds, and exporters our patience."""
        ends = monotonic() + max(timeout, self.patience)
        for exporter in self._exporters:
            exporter.finish()
        if self._otlp is not None:
            self._otlp.close(timeout)
        for exporter in self._exporters:
            exporter.close(max(ends - monotonic(), 0.0))

    @property
    def is_stuck(self) -> bool:
        """Whether an exporter would keep the process from ending."""
        return any(exporter.is_stuck for exporter in self._exporters)


def outlets_of(exporters: Sequence[EntryPoint], settings: OtlpSettings | None) -> Outlets:
    """Return an outlet for each of *exporters*, and one for OTLP where there are *settings* for it."""
    otlp = None if settings is None else Outlet(settings)
    return Outlets(otlp, [ExporterOutlet(point.name, partial(_make, point)) for point in exporters])


def _make(point: EntryPoint) -> "SpanExporter":
    from opentelemetry.sdk.trace.export import SpanExporter

    exporter = point.load()()
    if not isinstance(exporter, SpanExporter):
        raise TypeError(f"{point.value} is not a SpanExporter")
    return exporter

"""From the latest values to OpenTelemetry's own metrics pipeline: one meter provider for each run on this host."""

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExporter, MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_dltrace._version import __version__
from otel_dltrace.export.metrics.histograms import WithHistograms, histograms_for
from otel_dltrace.export.metrics.sampler import OUTSIDE_S
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.export.metrics.summary import Observed
from otel_dltrace.export.otlp.grpc_transport import grpc_credentials, grpc_metadata
from otel_dltrace.export.otlp.http_transport import OtlpSession
from otel_dltrace.export.otlp.outcome import brief
from otel_dltrace.export.otlp.settings import GRPC, OtlpSettings
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv
from otel_dltrace.model.metric_batch import HOST, Point
from otel_dltrace.record.guard import say, tried

SCOPE = "otel_dltrace.metrics"
_OBSERVABLE = {
    m.GAUGE: "create_observable_gauge",
    m.COUNTER: "create_observable_counter",
    m.UPDOWNCOUNTER: "create_observable_up_down_counter",
}
Key = tuple[str, int]
"""Attributes of a point, as text, and its rank."""
_IDLE = 3
"""A series of which nothing new comes for so many times the time between its last two values is nobody's any more."""


class _Latest(NamedTuple):
    """A value, and until when it is shown, in monotonic seconds."""

    value: float
    seen: float
    until: float


class Pipeline:
    """Holds the latest value of each series for the SDK to collect, and records what is a histogram.

    Present values of which nothing new comes, of a rank that is gone or hangs, of a source that fails, are shown for
    two more exports, so that each of several readers sees the last one; what adds up stays.

    Args:
        settings: Where to.
        resource: Who the points are about: the job and the host.
    """

    def __init__(self, settings: MetricSettings, resource: Mapping[str, str | int]) -> None:
        _tell_of_trouble(settings)
        of, scope = Resource(dict(resource)), InstrumentationScope(SCOPE, __version__)
        made = [*_made(settings)]
        self._exporters = [WithHistograms(each, of, scope) for each in made if isinstance(each, MetricExporter)]
        readers = [each for each in made if isinstance(each, MetricReader)]
        self._histograms = [each.histograms for each in self._exporters]
        self._histograms += [histograms_for(each, of, scope) for each in readers]
        readers += [
            PeriodicExportingMetricReader(each, settings.interval_ms, settings.timeout_ms) for each in self._exporters
        ]
        self._provider = MeterProvider(readers, of, shutdown_on_exit=False)
        self._meter = self._provider.get_meter(SCOPE, __version__)
        self._latest: dict[str, dict[Key, _Latest]] = {}
        self._attributes: dict[Key, dict[str, Any]] = {}
        self._patience_s = max(_IDLE * OUTSIDE_S, 2 * settings.interval_ms / 1e3)
        self._closing: Thread | None = None
        self._timeout_ms = settings.timeout_ms

    def observe(self, points: Iterable[Point]) -> None:
        """Take *points*; what is no histogram replaces the value that its series had."""
        now = monotonic()
        for metric, value, attributes, rank in points:
            if m.METRICS[metric].instrument == m.HISTOGRAM:
                self.count(Observed(metric, np.array([value]), attributes, rank))
            else:
                series, key = self._series(metric), (attributes, rank)
                before = series.get(key)
                gap = _IDLE * (now - before.seen) if before else 0.0
                series[key] = _Latest(value, now, now + max(self._patience_s, gap))

    def count(self, observed: Observed) -> None:
        """Take many observations of a histogram."""
        key = (observed.attributes, observed.rank)
        for histograms in self._histograms:
            histograms.add(observed.metric, key, self._attributes_of(key), observed.values)

    def _attributes_of(self, key: Key) -> dict[str, Any]:
        known = self._attributes.get(key)
        if known is None:
            rank = {} if key[1] == HOST else {semconv.DL_RANK: key[1]}
            known = self._attributes[key] = {**m.attributes_of(key[0]), **rank}
        return known

    def _series(self, name: str) -> dict[Key, _Latest]:
        """Return the series of the metric *name*; its instrument is made with the first, so there is none without."""
        series = self._latest.get(name)
        if series is None:
            series = self._latest[name] = {}
            metric = m.METRICS[name]
            create = getattr(self._meter, _OBSERVABLE[metric.instrument])
            # A peak is recorded when it rises.
            stays = metric.instrument == m.COUNTER or name == m.DL_PROCESS_MEMORY_PEAK
            create(name, [partial(self._observed, series, stays)], metric.unit, metric.description)
        return series

    def _observed(self, series: dict[Key, _Latest], stays: bool, _options: CallbackOptions) -> list[Observation]:
        """Return the values of *series* that are still of this moment; all, if it *stays*."""
        now, out = monotonic(), []
        for key, latest in [*series.items()]:
            if stays or now < latest.until:
                out.append(Observation(latest.value, self._attributes_of(key)))
            else:
                series.pop(key, None)
        return out

    @property
    def failed(self) -> bool:
        """Whether the last export of some exporter got nowhere, as earlier ones did."""
        return any(exporter.failed for exporter in self._exporters)

    def finish(self) -> None:
        """Begin to export what there is and to end; `wait` waits for it."""
        shut_down = self._provider.shutdown
        self._closing = Thread(
            target=lambda: tried(shut_down, self._timeout_ms), name="otel_dltrace metrics end", daemon=True
        )
        self._closing.start()

    def wait(self, timeout: float) -> bool:
        """Return whether all has ended within *timeout* seconds."""
        if self._closing is None:
            return True
        self._closing.join(max(timeout, 0.0))
        return not self._closing.is_alive()


def _made(settings: MetricSettings) -> Iterable[MetricReader | MetricExporter]:
    """Yield what each way out is made of; what cannot be made is told, and the others go on."""
    makers: dict[str, Callable[[], Any]] = {point.name: partial(_from, point) for point in settings.exporters}
    if settings.otlp:
        makers["otlp"] = partial(_otlp, settings.otlp)
    for name, make in makers.items():
        made = tried(make)
        if isinstance(made, MetricReader | MetricExporter):
            yield made
        else:
            say(f"the metrics exporter {name} cannot be made ({type(made).__name__}: {made}); it gets no metrics")


def _from(point: EntryPoint) -> Any:
    return point.load()()


def _otlp(settings: OtlpSettings) -> MetricExporter:
    """Return the official exporter for *settings*.

    It is told all of them: of the variables it reads some otherwise than spans do, or fails at them.
    """
    return (_grpc if settings.protocol == GRPC else _http)(settings)


def _grpc(settings: OtlpSettings) -> MetricExporter:
    from grpc import Compression
    from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter(
        settings.endpoint,
        insecure=not settings.tls,
        credentials=grpc_credentials(settings) if settings.tls else None,
        headers=grpc_metadata(settings),
        timeout=settings.timeout_s,
        compression=Compression.Gzip if settings.gzip else Compression.NoCompression,
    )


def _http(settings: OtlpSettings) -> MetricExporter:
    from opentelemetry.exporter.otlp.proto.http import Compression
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    return OTLPMetricExporter(
        settings.endpoint,
        certificate_file=_named(settings.certificate),
        client_key_file=_named(settings.client_key),
        client_certificate_file=_named(settings.client_certificate),
        headers=dict(settings.headers),
        timeout=settings.timeout_s,
        compression=Compression.Gzip if settings.gzip else Compression.NoCompression,
        session=OtlpSession(settings),
    )


def _named(file: Path | None) -> str | None:
    return str(file) if file else None


_OURS = (
    "opentelemetry.sdk.metrics",
    "opentelemetry.exporter.otlp.proto.http.metric_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.metric_exporter",
)
_SHARED = "opentelemetry.exporter.otlp.proto.grpc.exporter"
"""The loggers that speak of metrics alone, and one that names what its message is about."""


class _Told(logging.Handler):
    """Says the first complaint about metrics of the SDK and its exporters, which else would come at every interval."""

    def __init__(self, where: str, secrets: tuple[str, ...]) -> None:
        super().__init__(logging.WARNING)
        self._where, self._secrets = where, secrets

    def leaves(self, record: logging.LogRecord) -> bool:
        """Say what *record* complains about if that is metrics; return whether it is left to others."""
        is_ours = record.levelno >= self.level and " metrics" in record.getMessage()
        if is_ours:
            self.emit(record)
        return not is_ours

    def emit(self, record: logging.LogRecord) -> None:
        """Say what *record* complains about."""
        cure = "OTEL_METRICS_EXPORTER=none if it takes no metrics"
        said = brief(record.getMessage(), self._secrets)
        say(f"metrics do not get to {self._where or 'their exporter'} ({said}); {cure}", "metrics export")


def _tell_of_trouble(settings: MetricSettings) -> None:
    loggers = [logging.getLogger(name) for name in _OURS]
    if any(isinstance(handler, _Told) for handler in loggers[0].handlers):
        return
    told = _Told(settings.where, settings.otlp.secrets if settings.otlp else ())
    logging.getLogger(_SHARED).addFilter(told.leaves)
    for logger in loggers:
        logger.addHandler(told)
        logger.propagate = False

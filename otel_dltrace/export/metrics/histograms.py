"""Histograms of many observations at once, put beside what the SDK collects.

An observation in an SDK histogram takes 3 to 8 us, and a step has about seven: on fast steps that would be most of what
the drain does. Here all steps that are read at a time are counted together, and only the finished data points are the
SDK's.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from threading import Lock
from time import time_ns
from typing import Any

import numpy as np
from opentelemetry.sdk.metrics import Histogram as HistogramInstrument
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricReader,
    MetricsData,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from otel_dltrace.model import metrics as m
from otel_dltrace.model.arrays import Column

BOUNDS = tuple(1e-5 * 2**i for i in range(25))
"""Seconds, from 10 us to some minutes: a stage's and a pause's; the SDK's own are for milliseconds."""
_BOUNDS = np.array(BOUNDS)


@dataclass
class _Series:
    attributes: dict[str, Any]
    start: int
    counts: Column = field(default_factory=lambda: np.zeros(len(BOUNDS) + 1, np.int64))
    sum: float = 0.0
    low: float = float("inf")
    high: float = float("-inf")

    def add(self, values: Column) -> None:
        self.counts += np.bincount(np.searchsorted(_BOUNDS, values, "left"), minlength=len(BOUNDS) + 1)
        self.sum += float(values.sum())
        self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))

    def point(self, now: int) -> HistogramDataPoint:
        counts, end = self.counts.tolist(), max(now, self.start)  # the clock may have been set back
        return HistogramDataPoint(
            self.attributes, self.start, end, sum(counts), self.sum, counts, BOUNDS, self.low, self.high
        )


class Histograms:
    """All histograms for one way out.

    Args:
        resource: Who the points are about.
        scope: What the points are of.
        temporality: Whether a point tells of all observations, or of those since the last one.
    """

    def __init__(self, resource: Resource, scope: InstrumentationScope, temporality: AggregationTemporality) -> None:
        self._resource, self._scope, self._temporality = resource, scope, temporality
        self._lock, self._since = Lock(), 0
        self._series: dict[tuple[str, tuple[str, int]], _Series] = {}

    def add(self, metric: str, key: tuple[str, int], attributes: dict[str, Any], values: Column) -> None:
        """Count *values* of the series of *metric* that *key* names, which has *attributes*."""
        with self._lock:
            series = self._series.get((metric, key))
            if series is None:
                series = self._series[metric, key] = _Series(attributes, self._since or time_ns())
            series.add(values)

    def beside(self, metrics_data: MetricsData) -> MetricsData:
        """Return what the SDK collected and ours, in one scope: of two equal ones encoders take the last."""
        ours = [*self._metrics()]
        if not ours:
            return metrics_data
        scopes = [scope for of in metrics_data.resource_metrics for scope in of.scope_metrics]
        same = [scope for scope in scopes if scope.scope.name == self._scope.name]
        metrics = [metric for scope in same for metric in scope.metrics]
        others = [scope for scope in scopes if scope.scope.name != self._scope.name]
        all_of_us = ScopeMetrics(self._scope, [*metrics, *ours], "")
        return MetricsData([ResourceMetrics(self._resource, [all_of_us, *others], "")])

    def _metrics(self) -> Iterable[Metric]:
        now, points = time_ns(), dict[str, list[HistogramDataPoint]]()
        with self._lock:
            for (name, _), series in self._series.items():
                points.setdefault(name, []).append(series.point(now))
            if self._temporality == AggregationTemporality.DELTA:
                self._series, self._since = {}, now
        for name, some in points.items():
            metric = m.METRICS[name]
            yield Metric(name, metric.description, metric.unit, Histogram(some, self._temporality))


class WithHistograms(MetricExporter):
    """Gives *exporter* what the SDK collects, and our histograms with it.

    Args:
        exporter: Any exporter; its temporality is kept to.
        resource: Who the points are about.
        scope: What the points are of.

    Attributes:
        histograms: Ours.
        failed: Whether the last export got nowhere though an earlier one did: who takes no metrics loses none.
    """

    def __init__(self, exporter: MetricExporter, resource: Resource, scope: InstrumentationScope) -> None:
        super().__init__(exporter._preferred_temporality, exporter._preferred_aggregation)
        self._exporter = exporter
        wanted = (exporter._preferred_temporality or {}).get(HistogramInstrument)
        self.histograms = Histograms(resource, scope, wanted or AggregationTemporality.CUMULATIVE)
        self.failed = self._has_delivered = False

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        """Export *metrics_data* and the histograms."""
        both = self.histograms.beside(metrics_data)
        self.failed = self._has_delivered  # also where it raises
        result = self._exporter.export(both, timeout_millis, **kwargs)
        if result is MetricExportResult.SUCCESS:
            self._has_delivered, self.failed = True, False
        return result

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        """Have the exporter deliver what it holds."""
        return bool(self._exporter.force_flush(timeout_millis))

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        """End the exporter."""
        self._exporter.shutdown(timeout_millis, **kwargs)


def histograms_for(reader: MetricReader, resource: Resource, scope: InstrumentationScope) -> Histograms:
    """Return the histograms that *reader*, one with its own way out as Prometheus' is, gets from now on."""
    histograms = Histograms(resource, scope, AggregationTemporality.CUMULATIVE)
    receive = reader._receive_metrics

    def receive_both(metrics_data: MetricsData, *args: Any, **kwargs: Any) -> None:
        receive(histograms.beside(metrics_data), *args, **kwargs)

    reader._receive_metrics = receive_both  # type: ignore[method-assign]
    return histograms

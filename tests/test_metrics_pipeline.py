"""The pipeline of the SDK: the latest value of each series, histograms counted in bulk, ranks that are gone."""

from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.metrics import Histogram as HistogramInstrument
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    InMemoryMetricReader,
    MetricExporter,
    MetricExportResult,
    MetricsData,
)

from otel_dltrace.export.metrics import pipeline
from otel_dltrace.export.metrics.histograms import BOUNDS
from otel_dltrace.export.metrics.pipeline import Pipeline
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.export.metrics.summary import Observed
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv as s
from otel_dltrace.model.metric_batch import Point
from otel_dltrace.model.metrics import attributes_text
from otel_dltrace.record import guard

NEVER = MetricSettings("http/protobuf", "nowhere", (), 1e12, 1000)
USER = attributes_text({m.CPU_MODE: "user"})
FORWARD = attributes_text({s.DL_PHASE: "forward"})


class Kept(MetricExporter):
    """Keeps what it is given."""

    def __init__(self, temporality: AggregationTemporality) -> None:
        super().__init__({HistogramInstrument: temporality})
        self.exported: list[MetricsData] = []

    def export(self, metrics_data: MetricsData, *_given: Any, **_more: Any) -> MetricExportResult:
        """Keep *metrics_data*."""
        self.exported.append(metrics_data)
        return MetricExportResult.SUCCESS

    def force_flush(self, *_given: Any) -> bool:
        """Have delivered all."""
        return True

    def shutdown(self, *_given: Any, **_more: Any) -> None:
        """End."""

    def last(self) -> dict[str, dict[tuple[tuple[str, Any], ...], Any]]:
        """Return the points of the last export, by metric and attributes."""
        (resource,) = self.exported[-1].resource_metrics
        assert dict(resource.resource.attributes) == {"service.name": "bert"}
        (scope,) = resource.scope_metrics  # encoders take but one of a name
        return {
            metric.name: {tuple(sorted(point.attributes.items())): point for point in metric.data.data_points}
            for metric in scope.metrics
        }


@pytest.fixture(params=[AggregationTemporality.CUMULATIVE, AggregationTemporality.DELTA], ids=["cumulative", "delta"])
def kept(request, monkeypatch) -> Kept:
    """Give the exporter that the pipeline will use."""
    exporter = Kept(request.param)
    monkeypatch.setattr(pipeline, "_otlp", lambda _: exporter)
    return exporter


def collected(made: Pipeline) -> None:
    """Have the pipeline export what it has."""
    provider: MeterProvider = made._provider
    assert provider.force_flush()


def test_histograms_are_counted_in_bulk_with_the_temporality_of_the_exporter(kept):
    """Buckets hold their upper bound; a delta begins where the last one ended."""
    made = Pipeline(NEVER, {"service.name": "bert"}, set())
    made.observe([Point(m.DL_TRAIN_BATCHES, 3.0, rank=1)])
    made.count(Observed(m.DL_STEP_STAGE_DURATION, np.array([BOUNDS[3], BOUNDS[3] * 1.01, 1e9]), FORWARD, 1))
    collected(made)
    (first,) = kept.last()[m.DL_STEP_STAGE_DURATION].items()
    made.observe([Point(m.DL_STEP_STAGE_DURATION, 1e-9, FORWARD, 1)])
    collected(made)
    (second,) = kept.last()[m.DL_STEP_STAGE_DURATION].values()

    attributes, point = first
    counts = dict(enumerate(point.bucket_counts))
    is_delta = kept._preferred_temporality[HistogramInstrument] == AggregationTemporality.DELTA
    assert attributes == (("dl.phase", "forward"), ("dl.rank", 1))
    assert {bucket: count for bucket, count in counts.items() if count} == {3: 1, 4: 1, len(BOUNDS): 1}
    assert (point.count, point.min, point.max, point.explicit_bounds) == (3, BOUNDS[3], 1e9, BOUNDS)
    assert (second.count, second.bucket_counts[0], second.min) == (1 if is_delta else 4, 1, 1e-9)
    assert second.start_time_unix_nano == (point.time_unix_nano if is_delta else point.start_time_unix_nano)
    made.finish()
    assert made.wait(30)


def test_a_rank_that_is_gone_is_shown_once_more_and_its_totals_stay(kept):
    """Its memory of yesterday is nobody's; the host's values stay."""
    gone: set[int] = set()
    made = Pipeline(NEVER, {"service.name": "bert"}, gone)
    made.observe([Point(m.PROCESS_MEMORY_USAGE, 7.0, rank=0), Point(m.PROCESS_MEMORY_USAGE, 8.0, rank=1)])
    made.observe([Point(m.DL_TRAIN_SAMPLES, 96.0, rank=1), Point(m.SYSTEM_MEMORY_LIMIT, 64.0)])
    gone.add(1)
    seen = []
    for _ in range(2):
        collected(made)
        seen.append({name: [point.value for point in points.values()] for name, points in kept.last().items()})

    stays = {m.DL_TRAIN_SAMPLES: [96.0], m.SYSTEM_MEMORY_LIMIT: [64.0]}
    assert seen == [{m.PROCESS_MEMORY_USAGE: [7.0, 8.0], **stays}, {m.PROCESS_MEMORY_USAGE: [7.0], **stays}]


def test_what_is_observed_again_replaces_what_was(kept):
    """The latest value counts; each metric has the unit of its table."""
    made = Pipeline(NEVER, {"service.name": "bert"}, set())
    for value in (1.0, 2.0):
        made.observe([Point(m.SYSTEM_CPU_TIME, value, USER)])
    collected(made)
    (metric,) = [metric for scope in kept.exported[-1].resource_metrics[0].scope_metrics for metric in scope.metrics]

    assert (metric.name, metric.unit, [point.value for point in metric.data.data_points]) == (
        m.SYSTEM_CPU_TIME,
        "s",
        [2.0],
    )


def test_an_exporter_that_cannot_be_made_leaves_the_others(kept, capsys, monkeypatch):
    """One sentence says which."""

    class Broken:
        """Looks like an entry point."""

        name = "broken"

        @staticmethod
        def load() -> Any:
            """Fail as a package does whose dependencies are missing."""
            raise ImportError("no module called lost")

    monkeypatch.setattr(guard, "_said", set())
    made = Pipeline(MetricSettings("grpc", "nowhere", (Broken,), 1e12, 1000), {"service.name": "bert"}, set())
    made.observe([Point(m.SYSTEM_CPU_TIME, 1.0, USER)])
    collected(made)

    assert list(kept.last()) == [m.SYSTEM_CPU_TIME]
    assert "the metrics exporter broken cannot be made (ImportError: no module called lost)" in capsys.readouterr().err


def test_a_reader_gets_all_but_histograms(monkeypatch):
    """Prometheus' exporter, for one, is a reader of its own."""
    reader = InMemoryMetricReader()
    monkeypatch.setattr(pipeline, "_otlp", lambda _: reader)
    made = Pipeline(NEVER, {"service.name": "bert"}, set())
    made.observe([Point(m.SYSTEM_CPU_TIME, 1.0, USER), Point(m.DL_GC_PAUSE, 0.1)])
    data = reader.get_metrics_data()

    assert [metric.name for metric in data.resource_metrics[0].scope_metrics[0].metrics] == [m.SYSTEM_CPU_TIME]

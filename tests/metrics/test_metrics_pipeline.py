"""The pipeline of the SDK: the latest value of each series, histograms counted in bulk, ranks that are gone."""

import logging
from dataclasses import replace
from types import SimpleNamespace
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

from otel_dltrace.export.metrics import histograms, pipeline
from otel_dltrace.export.metrics.histograms import BOUNDS
from otel_dltrace.export.metrics.pipeline import Pipeline
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.export.metrics.summary import Observed
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv as s
from otel_dltrace.model.metric_batch import Point
from otel_dltrace.model.metrics import attributes_text
from otel_dltrace.record import guard

NEVER = MetricSettings(OtlpSettings("http://nowhere"), (), 1e12, 1000)
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
    made = Pipeline(NEVER, {"service.name": "bert"})
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


@pytest.fixture
def now(monkeypatch) -> SimpleNamespace:
    """Give the pipeline's clock, in seconds."""
    clock = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(pipeline, "monotonic", lambda: clock.seconds)
    return clock


def test_a_value_of_which_nothing_new_comes_is_shown_for_two_more_exports_and_totals_stay(kept, now):
    """The memory of a rank that is gone is nobody's, nor is the speed of one that hangs; a peak was reached."""
    made = Pipeline(replace(NEVER, interval_ms=10_000), {"service.name": "bert"})
    made.observe([Point(m.PROCESS_MEMORY_USAGE, 7.0, rank=0), Point(m.PROCESS_MEMORY_USAGE, 8.0, rank=1)])
    made.observe([Point(m.DL_TRAIN_SAMPLES, 96.0, rank=1), Point(m.DL_PROCESS_MEMORY_PEAK, 9.0, rank=1)])
    seen = []
    for at in (10.0, 19.0, 20.0):
        now.seconds = at
        made.observe([Point(m.PROCESS_MEMORY_USAGE, 7.0, rank=0)])
        collected(made)
        seen.append({name: [point.value for point in points.values()] for name, points in kept.last().items()})

    stays = {m.DL_TRAIN_SAMPLES: [96.0], m.DL_PROCESS_MEMORY_PEAK: [9.0]}
    both = {m.PROCESS_MEMORY_USAGE: [7.0, 8.0], **stays}
    assert seen == [both, both, {m.PROCESS_MEMORY_USAGE: [7.0], **stays}]


def test_the_speed_of_long_steps_is_shown_from_one_to_the_next(kept, now):
    """What comes once in ten minutes is missed after thirty."""
    made = Pipeline(replace(NEVER, interval_ms=10_000), {"service.name": "bert"})
    shown = []
    for at, observes in ((0, True), (600, True), (1800, False), (2399, False), (2400, False)):
        now.seconds = at
        made.observe([Point(m.DL_TRAIN_BATCHES, at)])
        made.observe([Point(m.DL_THROUGHPUT_BATCHES, 1 / 600)] if observes else [])
        collected(made)
        shown.append(m.DL_THROUGHPUT_BATCHES in kept.last())

    assert shown == [True, True, True, True, False]


def test_each_of_two_readers_sees_the_last_value(monkeypatch, now):
    """The one that collects first leaves it to the other."""
    readers = [InMemoryMetricReader(), InMemoryMetricReader()]
    monkeypatch.setattr(pipeline, "_made", lambda _: readers)
    made = Pipeline(replace(NEVER, interval_ms=10_000), {"service.name": "bert"})
    made.observe([Point(m.PROCESS_MEMORY_USAGE, 8.0, rank=1)])
    now.seconds = 12.0

    for reader in readers:
        (metric,) = reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics
        assert [point.value for point in metric.data.data_points] == [8.0]


def test_only_complaints_about_metrics_are_ours(capsys, monkeypatch):
    """The user's span exporters speak for themselves, also through the logger that gRPC exporters share."""
    monkeypatch.setattr(guard, "_said", set())
    Pipeline(NEVER, {"service.name": "bert"})
    others: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: others.append(record.getMessage()))
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    shared = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
    shared.error("Failed to export traces to there")  # two texts: the exporter's own filter drops one that comes again
    shared.error("Failed to export metrics to there")
    logging.getLogger("opentelemetry.sdk.trace.export").warning("Queue is full")
    logging.getLogger("opentelemetry.sdk.metrics._internal.export").warning("Metric collection timed out.")

    said = capsys.readouterr().err
    assert said.count("(Failed to export metrics to there); OTEL_METRICS_EXPORTER=none") == said.count("\n") == 1
    assert others == ["Failed to export traces to there", "Queue is full"]


def test_what_a_server_repeats_of_a_token_is_not_told(capsys, monkeypatch):
    """Nor what a terminal would obey."""
    monkeypatch.setattr(guard, "_said", set())
    settings = OtlpSettings("http://nowhere", headers=(("authorization", "Bearer s3cr3t"),))
    told = pipeline._Told("http://nowhere", settings.secrets)
    told.emit(logging.LogRecord("metrics", logging.ERROR, "", 0, "denied: Bearer s3cr3t \x1b[2J", (), None))
    said = "metrics do not get to http://nowhere (denied: ... ?[2J); OTEL_METRICS_EXPORTER=none if it takes no metrics"
    assert capsys.readouterr().err == f"otel_dltrace: {said}\n"


def test_what_is_observed_again_replaces_what_was(kept):
    """The latest value counts; each metric has the unit of its table."""
    made = Pipeline(NEVER, {"service.name": "bert"})
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
    made = Pipeline(MetricSettings(OtlpSettings("http://nowhere"), (Broken,), 1e12, 1000), {"service.name": "bert"})
    made.observe([Point(m.SYSTEM_CPU_TIME, 1.0, USER)])
    collected(made)

    assert list(kept.last()) == [m.SYSTEM_CPU_TIME]
    assert "the metrics exporter broken cannot be made (ImportError: no module called lost)" in capsys.readouterr().err


def test_no_point_ends_before_it_begins(kept, monkeypatch):
    """The wall clock was set back an hour between two exports."""
    now = [7_200 * 10**9]
    monkeypatch.setattr(histograms, "time_ns", lambda: now[0])
    made = Pipeline(NEVER, {"service.name": "bert"})
    made.observe([Point(m.DL_TRAIN_BATCHES, 3.0), Point(m.DL_GC_PAUSE, 0.1)])
    now[0] -= 3_600 * 10**9
    collected(made)
    (point,) = kept.last()[m.DL_GC_PAUSE].values()

    assert (point.count, point.time_unix_nano - point.start_time_unix_nano) == (1, 0)


def test_a_reader_gets_histograms_too(monkeypatch):
    """Prometheus' exporter, for one, is a reader of its own, which is asked again and again."""
    reader = InMemoryMetricReader()
    monkeypatch.setattr(pipeline, "_otlp", lambda _: reader)
    made = Pipeline(NEVER, {"service.name": "bert"})
    seen = []
    for _ in range(2):
        made.observe([Point(m.SYSTEM_CPU_TIME, 1.0, USER), Point(m.DL_GC_PAUSE, 0.1)])
        (resource,) = reader.get_metrics_data().resource_metrics
        (scope,) = resource.scope_metrics
        points = {metric.name: metric.data.data_points for metric in scope.metrics}
        seen.append([points[m.SYSTEM_CPU_TIME][0].value, points[m.DL_GC_PAUSE][0].count])

    assert seen == [[1.0, 1], [1.0, 2]]

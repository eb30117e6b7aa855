"""A real collector that writes the metrics it gets to a file, and the points in it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.servers import Server, free_port, running


class Seen(NamedTuple):
    """One point as the collector got it: a number, or of a histogram the count and the sum."""

    metric: str
    unit: str
    kind: str
    attributes: dict[str, Any]
    value: float
    count: int
    resource: dict[str, Any]


@dataclass
class MetricsCollector(Server):
    """A collector with pipelines for traces and metrics."""

    http: str = ""
    grpc: str = ""
    file: Path = field(default_factory=Path)

    def points(self, metric: str = "") -> list[Seen]:
        """Return the points that have arrived, in order; only those of *metric*, if it is named."""
        lines = self.file.read_text(encoding="utf-8").splitlines(keepends=True) if self.file.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return [point for data in whole for point in _points(data) if metric in ("", point.metric)]

    def latest(self, metric: str) -> dict[str, Seen]:
        """Return the last point of each series of *metric*, by its attributes as JSON."""
        return {json.dumps(point.attributes, sort_keys=True): point for point in self.points(metric)}


@contextmanager
def metrics_collector(
    folder: Path, with_metrics: bool = True, tls: Mapping[str, str] | None = None
) -> Iterator[MetricsCollector]:
    """Run such a collector, with *tls* in its receivers; without metrics it takes traces alone, as Jaeger does."""
    http, grpc = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    protocols = {
        name: {"endpoint": at} | ({"tls": tls} if tls else {}) for name, at in (("http", http), ("grpc", grpc))
    }
    scheme = "https" if tls else "http"
    file = folder / "metrics.jsonl"
    pipelines = {"traces": {"receivers": ["otlp"], "exporters": ["nop"]}}
    if with_metrics:
        pipelines["metrics"] = {"receivers": ["otlp"], "exporters": ["file"]}
    config = {
        "receivers": {"otlp": {"protocols": protocols}},
        "exporters": {"nop": {}, "file": {"path": str(file), "rotation": {"max_megabytes": 1000}}},
        "service": {"telemetry": {"metrics": {"level": "none"}}, "pipelines": pipelines},
    }
    path = folder / "metrics-collector.yaml"
    path.write_text(json.dumps(config))
    log = folder / "metrics-collector.log"
    at = {"http": f"{scheme}://{http}", "grpc": f"{scheme}://{grpc}"}
    server = MetricsCollector("otelcol", path, log, {}, None, **at, file=file)
    with running(server):
        yield server


def _points(data: dict[str, Any]) -> Iterator[Seen]:
    for resource in data["resourceMetrics"]:
        of = _attributes(resource["resource"].get("attributes", []))
        for metric in (metric for scope in resource["scopeMetrics"] for metric in scope["metrics"]):
            (kind,) = {"gauge", "sum", "histogram"} & metric.keys()
            name = kind
            if kind == "sum":
                name = "counter" if metric["sum"].get("isMonotonic") else "updowncounter"
            for point in metric[kind]["dataPoints"]:
                value = float(point.get("asInt", point.get("asDouble", point.get("sum", 0.0))))
                attributes = _attributes(point.get("attributes", []))
                yield Seen(metric["name"], metric["unit"], name, attributes, value, int(point.get("count", 1)), of)


def _attributes(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    read = {"intValue": int, "stringValue": str, "boolValue": bool, "doubleValue": float}
    return {pair["key"]: read[kind](value) for pair in pairs for kind, value in pair["value"].items()}

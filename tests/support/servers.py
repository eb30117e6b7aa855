"""Real servers for tests, on free ports of the loopback: the OpenTelemetry Collector and Jaeger.

A program is looked for on PATH, then in the project's store of packed programs beside the
checkout; where neither has it, the test is skipped and says so.
"""

import base64
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

from tests.support.paths import ROOT
from tests.support.processes import LONG_S

_STORE = ROOT.parent / "shared" / "bin"
_READY = "Everything is ready"
_BYTES_IN_JSON = ("traceId", "spanId", "parentSpanId")


def program(name: str) -> Path:
    """Return the program *name*; skip the test where there is none."""
    if found := shutil.which(name):
        return Path(found)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "otel_dltrace-tests"
    if not (cache / name).exists():
        if not (_STORE / f"{name}.xz").exists():
            pytest.skip(f"{name} is neither on PATH nor in {_STORE}")
        unpacked = subprocess.run(
            [sys.executable, _STORE / "unpack", cache, name], capture_output=True, text=True, check=False
        )
        if unpacked.returncode:
            pytest.skip(f"{name} cannot be unpacked into {cache}: {unpacked.stderr.strip()[-200:]}")
    return cache / name


def _own_ports() -> Iterator[int]:
    """Yield this worker's part of the ports below those that the kernel gives to outgoing connections, in any order.

    Of another worker's some are to be used in a moment.
    """
    worker, workers = os.environ.get("PYTEST_XDIST_WORKER", "gw0"), os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")
    own = range(20_000 + int(worker.removeprefix("gw")), 32_000, int(workers))
    return cycle(random.SystemRandom().sample(own, len(own)))


_PORTS = _own_ports()


def free_port() -> int:
    """Return a port nobody listens on, each time another."""
    for port in _PORTS:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("there is no end of them")


def wait_until(condition: Callable[[], Any], timeout_s: float = LONG_S, what: str = "the condition") -> Any:
    """Return the first true value of *condition*, asked every 20 ms, and what takes long to answer less often."""
    end = time.monotonic() + timeout_s
    while True:
        asked = time.monotonic()
        if value := condition():
            return value
        now = time.monotonic()
        assert now < end, f"{what} did not come true in {timeout_s} s"
        # What we wait for needs the processor, too.
        time.sleep(min(max(0.02, 4 * (now - asked)), 0.5))


@dataclass
class Server:
    """A collector or a Jaeger: started, killed and started again on the same ports."""

    name: str
    config: Path
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    process: "subprocess.Popen[bytes] | None" = None
    overlays: Sequence[Path] = field(default=(), kw_only=True)
    """More configurations, each laid over those before it."""

    def start(self) -> None:
        """Start it and wait until it is ready."""
        command = [program(self.name), "--config", self.config]
        command += [word for overlay in self.overlays for word in ("--config", overlay)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **self.env})
        wait_until(self._ready, what=f"{self.name} being ready")

    def _ready(self) -> bool:
        text = self.log.read_text(errors="replace")
        assert self.process is not None
        assert self.process.poll() is None, f"{self.name} ended: {text[-2000:]}"
        return _READY in text

    def kill(self) -> None:
        """Kill it as the kernel would when memory is short."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def stop(self) -> None:
        """End it in order: it delivers first what it holds."""
        if self.process is not None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
            self.process = None


@dataclass
class Collector(Server):
    """A collector whose file exporter writes JSON lines to *spans_file*."""

    grpc: str = ""
    http: str = ""
    spans_file: Path = Path()

    def traces(self) -> TracesData:
        """Return everything that has arrived, in the order of arrival."""
        everything = TracesData()
        if self.spans_file.exists():
            for line in self.spans_file.read_text(encoding="utf-8").splitlines(keepends=True):
                if line.endswith("\n"):  # the last line may still be being written
                    everything.MergeFrom(traces_from_json(json.loads(line)))
        return everything

    def spans(self) -> list[Span]:
        """Return every span that has arrived."""
        return spans_of(self.traces())

    def wait_for(self, count: int, timeout_s: float = LONG_S) -> list[Span]:
        """Return the spans once *count* different ones have arrived."""
        wait_until(lambda: len(self._ids()) >= count, timeout_s, f"{count} spans in {self.spans_file.name}")
        return self.spans()

    def _ids(self) -> set[bytes]:
        return {span.span_id for span in self.spans()}


@dataclass
class Jaeger(Server):
    """A Jaeger with its storage in memory."""

    grpc: str = ""
    http: str = ""
    query: str = ""

    def _ready(self) -> bool:
        """The query API comes up on its own, maybe after the rest."""
        host, port = self.query.removeprefix("http://").split(":")
        if not super()._ready():
            return False
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    def get(self, path: str) -> Any:
        """Return the JSON at *path* of the query API, None where it knows nothing."""
        try:
            with urllib.request.urlopen(f"{self.query}{path}", timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            raise

    def trace(self, trace_id: str, spans: int = 1, timeout_s: float = LONG_S) -> TracesData:
        """Return the trace once it has *spans* spans, without the attributes that Jaeger adds."""

        def complete() -> TracesData | None:
            answer = self.get(f"/api/v3/traces/{trace_id}")
            found = traces_from_json(answer["result"]) if answer else TracesData()
            return found if len(spans_of(found)) >= spans else None

        found: TracesData = wait_until(complete, timeout_s, f"trace {trace_id} in Jaeger")
        for span in spans_of(found):
            own = [attribute for attribute in span.attributes if not attribute.key.startswith("@jaeger@")]
            del span.attributes[:]
            span.attributes.extend(own)
        return found


def traces_from_json(data: dict[str, Any]) -> TracesData:
    """Return OTLP JSON as a message: its ids are hexadecimal, where protobuf's own JSON has base64."""

    def fix(value: Any) -> Any:
        if isinstance(value, list):
            return [fix(item) for item in value]
        if not isinstance(value, dict):
            return value
        return {k: _base64(v) if k in _BYTES_IN_JSON else fix(v) for k, v in value.items()}

    message: TracesData = json_format.ParseDict(fix(data), TracesData())
    return message


def _base64(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text)).decode()


def spans_of(data: TracesData) -> list[Span]:
    """Return the spans of *data* in their order."""
    return [span for r in data.resource_spans for scope in r.scope_spans for span in scope.spans]


def attributes(holder: Any) -> dict[str, Any]:
    """Return the attributes of a span or a resource as plain values."""
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in holder.attributes}


def receiver(tls: Mapping[str, str] | None = None, token: str = "") -> dict[str, Any]:
    """Return the settings of one protocol of the OTLP receiver, but for its endpoint."""
    settings: dict[str, Any] = {"tls": dict(tls)} if tls else {}
    if token:
        settings["auth"] = {"authenticator": "bearertokenauth"}
    return settings


@contextmanager
def collector(folder: Path, tls: Mapping[str, str] | None = None, token: str = "") -> Iterator[Collector]:
    """Run a collector that writes what it receives to a file in *folder*.

    Args:
        folder: Where its configuration, log and file go.
        tls: Keys of the receiver's ``tls`` block: ``cert_file``, ``key_file``, ``client_ca_file``.
        token: The bearer token it asks for.
    """
    grpc, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    spans_file = folder / "spans.jsonl"
    config = {
        "extensions": {"bearertokenauth": {"token": token}} if token else {},
        "receivers": {
            "otlp": {
                "protocols": {
                    "grpc": {"endpoint": grpc, **receiver(tls, token)},
                    "http": {"endpoint": http, **receiver(tls, token)},
                }
            }
        },
        # With rotation the exporter writes without a buffer, so that what was acknowledged survives a kill.
        "exporters": {"file": {"path": str(spans_file), "rotation": {"max_megabytes": 1000}}},
        "service": {
            "extensions": ["bearertokenauth"] if token else [],
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["file"]}},
        },
    }
    path = folder / "collector.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    scheme = "https" if tls else "http"
    server = Collector(
        "otelcol", path, folder / "collector.log", {}, None, f"{scheme}://{grpc}", f"{scheme}://{http}", spans_file
    )
    with running(server):
        yield server


def configured(name: str, folder: Path, *overlays: str, **env: str) -> Collector:
    """Return the collector of ``collector-config/<name>.yaml``, to be started, with addresses and files of its own.

    Args:
        name: Of the configuration.
        folder: Where its log, its files and its queue go; one for each.
        overlays: Names of configurations in ``optional/`` that are laid over it.
        env: More variables, or other values.
    """
    folder.mkdir(parents=True, exist_ok=True)
    grpc, http, health, prometheus = (f"127.0.0.1:{free_port()}" for _ in range(4))
    variables = {
        "OTLP_GRPC_ENDPOINT": grpc,
        "OTLP_HTTP_ENDPOINT": http,
        "HEALTH_ENDPOINT": health,
        "PROMETHEUS_ENDPOINT": prometheus,
        "SPANS_FILE": str(folder / "spans.jsonl"),
        "METRICS_FILE": str(folder / "metrics.jsonl"),
        "QUEUE_DIR": str(folder / "queue"),
        **env,
    }
    configs = ROOT / "collector-config"
    more = [configs / "optional" / f"{overlay}.yaml" for overlay in overlays]
    log = folder / f"{name}.log"
    files = Path(variables["SPANS_FILE"])
    found = f"http://{grpc}", f"http://{http}"
    return Collector("otelcol", configs / f"{name}.yaml", log, variables, None, *found, files, overlays=more)


@contextmanager
def standalone(folder: Path, jaeger_endpoint: str) -> Iterator[Collector]:
    """Run the collector of ``collector-config/standalone.yaml``, its addresses named by the environment."""
    server = configured("standalone", folder / "standalone", JAEGER_ENDPOINT=jaeger_endpoint.removeprefix("http://"))
    with running(server):
        yield server


@contextmanager
def jaeger(folder: Path) -> Iterator[Jaeger]:
    """Run a Jaeger that keeps traces in memory."""
    grpc, http, query, query_grpc = (f"127.0.0.1:{free_port()}" for _ in range(4))
    config = {
        "extensions": {
            "jaeger_storage": {"backends": {"memory": {"memory": {"max_traces": 100_000}}}},
            "jaeger_query": {
                "storage": {"traces": "memory"},
                "http": {"endpoint": query},
                "grpc": {"endpoint": query_grpc},
            },
        },
        "receivers": {"otlp": {"protocols": {"grpc": {"endpoint": grpc}, "http": {"endpoint": http}}}},
        "exporters": {"jaeger_storage_exporter": {"trace_storage": "memory"}},
        "service": {
            "extensions": ["jaeger_storage", "jaeger_query"],
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {"traces": {"receivers": ["otlp"], "exporters": ["jaeger_storage_exporter"]}},
        },
    }
    path = folder / "jaeger.yaml"
    path.write_text(json.dumps(config))
    # Jaeger traces its own queries, sends them to port 4317 and at its end waits 10 s for them to get through.
    env = {"OTEL_TRACES_SAMPLER": "always_off"}
    server = Jaeger(
        "jaeger", path, folder / "jaeger.log", env, None, f"http://{grpc}", f"http://{http}", f"http://{query}"
    )
    with running(server):
        yield server


@contextmanager
def running(server: Server) -> Iterator[None]:
    """Start *server*, and stop it at the end."""
    server.start()
    try:
        yield
    finally:
        server.stop()

"""What the tests of the collectors' configurations send: a real run of two ranks and a server, and spans in bulk."""

import re
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status, TracesData

from otel_dltrace.export.otlp.delivery import Delivery
from otel_dltrace.export.otlp.sender import Sender
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.otlp.transport import connect
from otel_dltrace.export.outgoing.as_sent import as_sent
from otel_dltrace.export.rundir.traces import trace_id_column
from otel_dltrace.model import semconv as s
from otel_dltrace.model.attributes import resource_attributes
from otel_dltrace.model.identity import h128_each
from tests.support import servers
from tests.support.processes import a_place, requests_of

MS = 1_000_000
STEPS = 6
PUSH_PULL = f"""
    import os
    import numpy as np
    import otel_dltrace
    from otel_dltrace.pushpull.engine import Engine
    from otel_dltrace.pushpull.options import read_env

    engine = Engine(*read_env(os.environ))
    engine.start()
    tensor = engine.declare("weight")
    for step in range({STEPS}):
        with otel_dltrace.step(), otel_dltrace.phase("exchange"):
            engine.wait(engine.push_pull(tensor, np.ones(3000, np.float32), average=False))
    engine.stop()
"""
"""Two workers and a server; each tensor is two partitions, each with its stages."""


def push_pull_job(place: Any, **env: str) -> None:
    """Run `PUSH_PULL` on two ranks and a server, recorded to the finest level and sent in full."""
    job = [sys.executable, "-m", "otel_dltrace", "pushpull", "launch", "--workers", "2", "--servers", "1", "--"]
    job += [sys.executable, str(place.write(PUSH_PULL, "job.py"))]
    variables = {"BYTEPS_PARTITION_BYTES": "8192", "OTEL_DLTRACE_SPAN_BUDGET": "0", **env}
    done = place.command("run", "--no-report", "--level", "partition", "--steps", "all", "--", *job, **variables)
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()


@cache
def real_run() -> tuple[bytes, ...]:
    """Return the requests of a `PUSH_PULL` job, as our drain sends them: made once, for all tests."""
    with tempfile.TemporaryDirectory() as folder, a_place(Path(folder)) as place:
        push_pull_job(place)
        bodies = []
        for batch in as_sent(place.runs()):
            traces = trace_id_column(batch, batch.process.bind)
            bodies += [r.body for r in requests_of(batch, traces, resource_attributes(batch.process))]
        return tuple(bodies)


def data_of(bodies: Iterable[bytes]) -> TracesData:
    """Return what is in the requests *bodies*."""
    everything = TracesData()
    for body in bodies:
        everything.resource_spans.extend(ExportTraceServiceRequest.FromString(body).resource_spans)
    return everything


def ids(data: TracesData) -> Counter[bytes]:
    """Return how often each span id is in *data*."""
    return Counter(span.span_id for span in servers.spans_of(data))


_numbers = count(1)


def span(name: str, trace: int, start: int = 0, end: int = MS, error: bool = False, **attributes: Any) -> Span:
    """Return a span of a new id; times are ns after a fixed moment, a dot in an attribute's name is ``__`` here."""
    moment = 1_790_000_000_000_000_000
    return Span(
        name=name,
        # A share of traces is chosen by the last bytes.
        trace_id=h128_each("trace", last=[trace])[0].to_bytes(16, "big"),
        span_id=next(_numbers).to_bytes(8, "big"),
        kind=Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=moment + start,
        end_time_unix_nano=moment + end,
        status=Status(code=Status.STATUS_CODE_ERROR) if error else None,
        attributes=_attributes({name.replace("__", "."): value for name, value in attributes.items()}),
    )


def request(spans: Iterable[Span], rank: int = 0, host: str = "node-0") -> bytes:
    """Return the request that a rank sends."""
    who = {s.SERVICE_NAME: "job", s.DL_RANK: rank, s.DL_ROLE: "worker", s.SERVICE_INSTANCE_ID: f"rank {rank}"}
    who |= {s.HOST_NAME: host, s.HOST_ID: host}
    scope = ScopeSpans(spans=spans)
    resource = ResourceSpans(resource=Resource(attributes=_attributes(who)), scope_spans=[scope])
    return ExportTraceServiceRequest(resource_spans=[resource]).SerializeToString()


def _attributes(values: dict[str, Any]) -> list[KeyValue]:
    kinds = {bool: "bool_value", int: "int_value", str: "string_value"}
    return [KeyValue(key=name, value=AnyValue(**{kinds[type(value)]: value})) for name, value in values.items()]


def bulk(requests: int, spans: int, traces: int = 40, first: int = 1000, text: str = "weight") -> Iterator[bytes]:
    """Yield *requests* of *spans* spans each, four traces in each, of four ranks in turn.

    Args:
        requests: How many.
        spans: In each.
        traces: How many traces they are of, altogether.
        first: The first trace's number.
        text: What each span carries as the tensor's name.
    """
    for number in range(requests):
        of = [first + (number * 4 + i) % traces for i in range(4)]
        yield request(
            [span("PUSH", of[i % 4], dl__queue__type="PUSH", dl__tensor__name=text) for i in range(spans)], number % 4
        )


def sender(endpoint: str, folder: Path, protocol: str = "grpc") -> Sender:
    """Return our drain's own sender to *endpoint*, with its spill in *folder*."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_EXPORTER_OTLP_PROTOCOL": protocol}
    settings = OtlpSettings.from_env(env)
    assert settings is not None
    return Sender(connect(settings), lambda: folder / "spill")


def send(endpoint: str, bodies: Sequence[bytes], folder: Path, protocol: str = "grpc") -> None:
    """Send *bodies* to *endpoint*; all of them are acknowledged."""
    way = sender(endpoint, folder, protocol)
    for number, body in enumerate(bodies):
        way.submit(body, len(ids(data_of([body]))), number)
    assert way.close(30.0) == Delivery(accepted=sum(ids(data_of(bodies)).values()))


def scrape(address: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Return what Prometheus would read at *address*: the value of each series, by metric and labels."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for name, labels, value in re.findall(r"^(\w+)(?:\{(.*?)\})? (\S+)$", text, re.MULTILINE):
        found.setdefault(name, {})[frozenset(re.findall(r'(\w+)="(.*?)"', labels))] = float(value)
    return found


def by_label(series: dict[frozenset[tuple[str, str]], float], *labels: str) -> dict[tuple[str, ...], float]:
    """Return the sums of *series* by the values of *labels*."""
    sums: Counter[tuple[str, ...]] = Counter()
    for key, value in series.items():
        sums[tuple(dict(key).get(label, "") for label in labels)] += value
    return dict(sums)


def contents(data):
    """Return each span with its resource, in the order of ids; what stood before what in a request is lost."""
    found = []
    for resource in data.resource_spans:
        who = servers.attributes(resource.resource)
        found += [(it.span_id, it, who) for scope in resource.scope_spans for it in scope.spans]
    return sorted(found, key=lambda each: each[0])

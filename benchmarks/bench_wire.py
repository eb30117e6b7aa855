"""CPU per span from the ring to the wire, beside the SDK's from its queue: ``python -m benchmarks wire``.

Ours: `Drain.tick` as the drain process calls it: find the rings, scan them, decode, compute the ids, append
to the run directory (left out in every second turn, cursors too), decide the steps, encode the requests,
hand them to the sender, whose transport accepts and drops them. Eight ranks record steps of 120 spans in
another process, ten steps per rank between two ticks, which is a second at 100 ms a step: as long as a drain
pauses at that rate. The drain's clock is told so; records wait for `OTEL_BSP_SCHEDULE_DELAY`, by default five
seconds as in the SDK, so of five ticks one takes them. Every step is in the window and there is no budget, so every
span goes out.

The SDK's: a `BatchSpanProcessor` whose queue holds 511 ended spans (one fewer than wake its thread) is
flushed; its exporter does what the OTLP exporters do before they touch the network:
``encode_spans(batch).SerializeToString()``. Neither HTTP nor retries are in it. The spans are ours, decoded
from our own requests: the same names, attributes, times.

*SDK and exporter* is all that the SDK does for a span until its bytes are there; ours begins in the ring. The span
is made as instrumentations write it, `with start_as_current_span` and a `set_attribute` for each attribute.
*With creation* adds the writer's CPU on our side, and `start_span` with the attributes and `end` on the SDK's.
*gzip* adds the compression of the same bodies, each as its exporter does it.
*Over HTTP* both really send, to a receiver in another process that drops what it gets (it is not counted): ours
still begins in the ring, the SDK's with `start_span`, so each side is all that a program has beside its own work
until a span is on the wire, but for our recording.

CPU is `process_time` of the whole process, all its threads. Turns alternate; the figures are medians over
rounds, the intervals those of the resampled rounds.
"""

import gzip
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

from benchmarks._processes import scratch
from benchmarks._ranks import HOME, RANKS, SPANS
from benchmarks._receiver import receiver
from benchmarks._stats import median_of, ranged, ratio_of_medians, table
from otel_dltrace.export import drain as drain_module
from otel_dltrace.export.choice import DELAY_S
from otel_dltrace.export.drain import Drain
from otel_dltrace.export.follower import Follower
from otel_dltrace.export.otlp.outcome import Outcome, Verdict
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.otlp.transport import Transport, connect
from otel_dltrace.export.outgoing import outlet as outlet_module
from otel_dltrace.export.outgoing.outlet import Outlet
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.export.serving import Serving

BATCH = 511  # fewer than BatchSpanProcessor's 512
STEPS = 10
TICK_S = 1.0
TICKS = round(DELAY_S / TICK_S)
"""Of one turn."""
TURN_SPANS = RANKS * STEPS * TICKS * SPANS


class Wire:
    """A transport that accepts and drops, unless somebody wants the *bodies*, or has it send them *to* a receiver.

    A page of memory that is new to a process costs it some microseconds, so what is kept is dear.
    """

    def __init__(self) -> None:
        self.bodies: list[bytes] | None = None
        self.to: Transport | None = None

    def send(self, body: bytes, deadline_s: float) -> Outcome:
        """Accept *body*."""
        if self.bodies is not None:
            self.bodies.append(body)
        return self.to.send(body, deadline_s) if self.to is not None else Outcome(Verdict.ACCEPTED)

    def close(self) -> None:
        """Do nothing."""


class Ours:
    """The drain, and the ranks that it serves."""

    def __init__(self, folder: Path, url: str) -> None:
        rings, runs = folder / "rings", folder / "runs"
        command = [sys.executable, "-m", "benchmarks._ranks", str(rings), str(runs)]
        self.ranks = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.ranks.stdin is not None
        assert self.ranks.stdout is not None
        self.commands, self.answers, self.steps = self.ranks.stdin, self.ranks.stdout, 0
        self.wire, self.http = Wire(), connect(OtlpSettings(url))
        with patch.object(outlet_module, "connect", lambda _: self.wire):
            self.outlet = Outlet(OtlpSettings("http://localhost:4318/v1/traces"))
        self.now = 0.0
        self.drain = Drain(Serving(rings, runs, HOME), self.outlet)

    def turn(self) -> tuple[float, float]:
        """Return the CPU ns of the writers and of the drain for one turn."""
        writing = draining = 0
        for _ in range(TICKS):
            writing += self.write(STEPS)
            begun = time.process_time_ns()
            self.tick()
            draining += time.process_time_ns() - begun
        begun = time.process_time_ns()
        self.settle()
        return writing, draining + time.process_time_ns() - begun

    def sent(self) -> float:
        """Return the CPU ns of the drain for one turn that is really sent."""
        self.wire.to = self.http
        _, draining = self.turn()
        self.wire.to = None
        return draining

    def bodies(self) -> list[bytes]:
        """Return the requests of one more turn."""
        self.wire.bodies = bodies = []
        self.turn()
        self.wire.bodies = None
        return bodies

    def write(self, steps: int) -> int:
        """Have every rank record *steps* steps; return their CPU time in ns."""
        self.commands.write(f"{steps}\n")
        self.commands.flush()
        self.steps += steps
        return int(self.answers.readline())

    def tick(self) -> None:
        """Let the drain turn once, a second after the last time."""
        self.now += TICK_S
        clock = SimpleNamespace(monotonic=lambda: self.now, monotonic_ns=time.monotonic_ns, time_ns=time.time_ns)
        with patch.object(drain_module, "time", clock):
            self.drain.tick()

    def settle(self) -> None:
        """Wait until the sender's thread has dropped all requests."""
        while self.outlet.unsettled():
            time.sleep(0.0005)

    def close(self) -> None:
        """End the ranks, drain the rest."""
        self.commands.close()
        self.ranks.wait()
        self.answers.close()
        while self.drain.followers:
            self.tick()
            self.settle()
        self.drain.finish()
        recorded = self.steps * (RANKS * SPANS + 1)  # each step has a root
        if self.outlet.sent != recorded:
            raise RuntimeError(f"{self.outlet.sent} spans were sent of {recorded}: this measured something else")


@contextmanager
def no_run_directory() -> Iterator[None]:
    """Leave out what the drain does for the run directory."""
    with (
        patch.object(RunWriter, "append", lambda *_, **__: None),
        patch.object(Follower, "save", return_value=False),
    ):
        yield


# -- the SDK -----------------------------------------------------------------------------------


class Encoder(SpanExporter):
    """What an OTLP exporter does before it touches the network, or all of it, *to* a receiver."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.spans: list[ReadableSpan] = []
        self.to: SpanExporter | None = None

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Encode *spans*, or send them."""
        if self.to is not None:
            return self.to.export(spans)
        self.bodies = [encode_spans(spans).SerializeToString()]
        self.spans = list(spans)
        return SpanExportResult.SUCCESS


class Sdk:
    """A provider whose spans are like those of one rank in our requests *bodies*: as many of each kind in a hundred."""

    def __init__(self, bodies: Sequence[bytes], url: str) -> None:
        parts = [part for body in bodies for part in ExportTraceServiceRequest.FromString(body).resource_spans]
        resource = parts[0].resource
        self.exporter, self.http = Encoder(), OTLPSpanExporter(url)
        self.processor = BatchSpanProcessor(self.exporter)
        self.provider = TracerProvider(resource=Resource(dict(_plain(resource.attributes))))
        self.provider.add_span_processor(self.processor)
        self.tracer = self.provider.get_tracer("otel_dltrace")
        spans = [span for part in parts if part.resource == resource for span in part.scope_spans[0].spans]
        self.like = [_recipe(spans[i * len(spans) // BATCH]) for i in range(BATCH)]
        self.create()
        self.processor.force_flush()
        self.ended = self.exporter.spans

    def create(self) -> None:
        """Start and end the spans."""
        start_span = self.tracer.start_span
        for name, context, attributes in self.like:
            start_span(name, context, attributes=attributes).end()

    def create_as_usual(self) -> None:
        """Start and end the spans as instrumentations write them."""
        start_span = self.tracer.start_as_current_span
        for name, context, attributes in self.like:
            with start_span(name, context) as span:
                for key, value in attributes.items():
                    span.set_attribute(key, value)

    def export(self) -> float:
        """Return the CPU ns of exporting alone."""
        for span in self.ended:
            self.processor.on_end(span)
        return _cpu(self.processor.force_flush)

    def whole(self, create: Callable[[], None]) -> float:
        """Return the CPU ns of creating, by *create*, and exporting."""
        return _cpu(create) + _cpu(self.processor.force_flush)

    def sent(self) -> float:
        """Return the CPU ns of creating and really sending."""
        self.exporter.to = self.http
        spent = self.whole(self.create)
        self.exporter.to = None
        return spent


def _plain(attributes: Any) -> Iterator[tuple[str, Any]]:
    for pair in attributes:
        yield pair.key, getattr(pair.value, pair.value.WhichOneof("value"))


def _recipe(span: Any) -> tuple[str, Any, dict[str, Any]]:
    parent = SpanContext(
        int.from_bytes(span.trace_id, "big"),
        int.from_bytes(span.parent_span_id, "big") or 1,
        is_remote=False,
        trace_flags=TraceFlags(1),
    )
    return span.name, set_span_in_context(NonRecordingSpan(parent)), dict(_plain(span.attributes))


def _cpu(work: Callable[[], object]) -> int:
    begun = time.process_time_ns()
    work()
    return time.process_time_ns() - begun


# -- the table ---------------------------------------------------------------------------------


@dataclass
class Seen:
    """CPU ns per span, a number per round."""

    ours: list[float] = field(default_factory=list)
    ours_without: list[float] = field(default_factory=list)
    ours_created: list[float] = field(default_factory=list)
    ours_gzip: list[float] = field(default_factory=list)
    ours_sent: list[float] = field(default_factory=list)
    sdk: list[float] = field(default_factory=list)
    sdk_usual: list[float] = field(default_factory=list)
    sdk_created: list[float] = field(default_factory=list)
    sdk_gzip: list[float] = field(default_factory=list)
    sdk_sent: list[float] = field(default_factory=list)

    def round(self, ours: Ours, sdk: Sdk) -> None:
        """Measure one round."""
        with no_run_directory():
            ours.turn()  # one that is not counted: what waited from the turn before is written elsewhere
            _, draining = ours.turn()
            self.ours_without.append(draining / TURN_SPANS)
            self.ours_sent.append(ours.sent() / TURN_SPANS)
        ours.turn()
        writing, draining = ours.turn()
        self.ours.append(draining / TURN_SPANS)
        self.ours_created.append((draining + writing) / TURN_SPANS)
        bodies = ours.bodies()
        packing = _cpu(lambda: [gzip.compress(body, 1, mtime=0) for body in bodies])
        self.ours_gzip.append((draining + packing) / TURN_SPANS)
        export = sdk.export()
        self.sdk.append(export / BATCH)
        self.sdk_created.append(sdk.whole(sdk.create) / BATCH)
        self.sdk_usual.append(sdk.whole(sdk.create_as_usual) / BATCH)
        packing = _cpu(lambda: [gzip.compress(body) for body in sdk.exporter.bodies])
        self.sdk_gzip.append((export + packing) / BATCH)
        self.sdk_sent.append(sdk.sent() / BATCH)

    def rows(self) -> list[list[str]]:
        """Return the table's rows."""
        return [
            self._row("to bytes, uncompressed, SDK and exporter", self.ours_without, self.sdk_usual, ">= 100x"),
            self._row("the same, the exporter alone", self.ours_without, self.sdk),
            self._row("the exporter alone, run directory and cursors written too", self.ours, self.sdk),
            self._row("the same, and gzip", self.ours_gzip, self.sdk_gzip),
            self._row("with creation, uncompressed, run directory too", self.ours_created, self.sdk_created),
            self._row("over HTTP, ours from the ring, the SDK's from `start_span`", self.ours_sent, self.sdk_sent),
        ]

    @staticmethod
    def _row(name: str, ours: list[float], sdk: list[float], goal: str = "") -> list[str]:
        rounds = len(ours)
        return [
            name,
            ranged(median_of(ours), rounds, ",.0f"),
            ranged(median_of(sdk), rounds, ",.0f"),
            ranged(ratio_of_medians(sdk, ours), rounds, ".1f", "x"),
            goal,
        ]


def measure(rounds: int) -> Seen:
    """Run *rounds* rounds."""
    with scratch() as folder, receiver() as url:
        ours = Ours(folder, url)
        try:
            for _ in range(3):
                ours.turn()  # imports, caches, the first members
            sdk, seen = Sdk(ours.bodies(), url), Seen()
            Seen().round(ours, sdk)
            for _ in range(rounds):
                seen.round(ours, sdk)
        finally:
            ours.close()
    return seen


def run(rounds: int) -> str:
    """Measure and return the table in markdown."""
    head = ["from ring or queue", "ours, CPU ns a span (95 %)", "SDK (95 %)", "ratio (95 %)", "goal"]
    return table(head, measure(rounds).rows())

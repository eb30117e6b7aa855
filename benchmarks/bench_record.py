"""What one record costs the trainer, beside one OpenTelemetry SDK span: ``python -m benchmarks record``.

All cases run in one process, in small blocks in turn (A B C A B C ...), so that whatever else the
machine does hits all alike. The figures are medians over blocks; the intervals hold 95 % of the
medians (and ratios of medians) of resampled rounds.

The SDK stands beside it twice. *Usual* is the span as instrumentations write it: `with
start_as_current_span`, six `set_attribute`, and the work of the BatchSpanProcessor's thread in the same
process, whose exporter returns at once and keeps nothing. *Leanest* is the cheapest there is:
`start_span` with the attributes given, `end`, no current span, and the queue emptied off the clock.
Encoding and sending are in neither (``python -m benchmarks wire`` has them).
Ours pay for everything that they do: both clock reads, their share of leases, laps of the ring.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns, perf_counter_ns

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import set_span_in_context

from benchmarks._processes import scratch
from benchmarks._stats import median_of, ranged, ratio_of_medians, table
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.record.blocks import phase
from otel_dltrace.record.operation import Operation
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live

BLOCK = 400  # fewer than BatchSpanProcessor's 512
ATTRIBUTES: dict[str, str | int] = {
    "dl.step": 17,
    "dl.rank": 3,
    "dl.comm.operation": "all_reduce",
    "dl.comm.backend": "nccl",
    "dl.comm.group.size": 8,
    "dl.comm.size": 26_214_400,
}


@dataclass(frozen=True)
class Case:
    """One thing to measure: *block* does it `BLOCK` times; *goal* is the ratio asked for, "" for none."""

    name: str
    block: Callable[[], None]
    goal: str = ""


class _Nowhere(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002
        return SpanExportResult.SUCCESS


def our_cases(recorder: Recorder) -> list[Case]:
    """Return our own cases, writing to *recorder*."""
    number = recorder.intern(Descriptor("phase", "rollout"))
    span, begin = recorder.span, recorder.begin

    def phase_record() -> None:
        for _ in range(BLOCK):
            start = monotonic_ns()
            span(number, 3, start, monotonic_ns(), 100)

    def operation_record() -> None:
        for seq in range(BLOCK):
            start = monotonic_ns()
            span_number = begin(number, 2, start, 100)
            span(number, 2, start, monotonic_ns(), 100, 0, seq, 0, 0, 0, 0, 0, span_number)

    def operation_object() -> None:
        for seq in range(BLOCK):
            Operation(recorder, number, 100).close(seq)

    def with_phase() -> None:
        for _ in range(BLOCK):
            with phase("rollout"):
                pass

    return [
        Case("phase record", phase_record, "35x"),
        Case("crash-safe operation (BEGIN + SPAN)", operation_record, "20x"),
        Case("the same, as `Operation`", operation_object),
        Case("`with phase()`", with_phase, "18x"),
    ]


USUAL = "SDK span, usual: `with start_as_current_span`, 6 `set_attribute`, processor included"
LEANEST = "SDK span, leanest: `start_span` with 6 attributes, `end`"


def sdk_cases(provider: TracerProvider) -> list[Case]:
    """Return the SDK's cases: children of one span, as spans of a step are."""
    tracer = provider.get_tracer("bench")
    context = set_span_in_context(tracer.start_span("step"))

    def leanest() -> None:
        for _ in range(BLOCK):
            tracer.start_span("all_reduce", context, attributes=ATTRIBUTES).end()

    def usual() -> None:
        for _ in range(BLOCK):
            with tracer.start_as_current_span("all_reduce", context) as span:
                for name, value in ATTRIBUTES.items():
                    span.set_attribute(name, value)
        provider.force_flush()

    return [Case(USUAL, usual), Case(LEANEST, leanest)]


def measure(cases: list[Case], rounds: int, between: Callable[[], object]) -> dict[str, list[float]]:
    """Return ns per call of each case in each round; *between* blocks something is done off the clock."""
    seen: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            case.block()  # the case before it has left the processor's caches full of its own
            between()
            begun = perf_counter_ns()
            case.block()
            seen[case.name].append((perf_counter_ns() - begun) / BLOCK)
            between()
    return seen


def row(case: Case, seen: dict[str, list[float]]) -> list[str]:
    """Return the case's row of the table."""
    own = seen[case.name]
    cells = [case.name, ranged(median_of(own), len(own), ",.0f")]
    if case.name in (USUAL, LEANEST):
        return [*cells, "", "", ""]
    ratios = [ranged(ratio_of_medians(seen[peer], own), len(own), ".1f", "x") for peer in (USUAL, LEANEST)]
    return [*cells, *ratios, case.goal and f">= {case.goal}"]


def run(rounds: int) -> str:
    """Measure and return the table in markdown."""
    with scratch() as folder:
        seen, cases = _measured(folder, rounds)
    return table(
        ["case", "ns (95 %)", "against usual (95 %)", "against leanest (95 %)", "goal"],
        [row(case, seen) for case in cases],
    )


def _measured(folder: Path, rounds: int) -> tuple[dict[str, list[float]], list[Case]]:
    recorder = Recorder(folder, 4 << 20)
    recorder.step = 17
    live.tracer = Tracer(recorder)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_Nowhere()))
    try:
        cases = [*sdk_cases(provider), *our_cases(recorder)]
        measure(cases, 3, provider.force_flush)  # imports, caches, the ring's first lap
        return measure(cases, rounds, provider.force_flush), cases
    finally:
        live.tracer = None
        recorder.close()
        provider.shutdown()

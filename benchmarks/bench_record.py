"""What one record costs the trainer, beside one OpenTelemetry SDK span: ``python -m benchmarks record``.

All cases run in one process, in small blocks in turn (A B C A B C ...), so that whatever else the
machine does hits all alike. The figures are medians over blocks; the intervals hold 95 % of the
medians (and ratios of medians) of resampled rounds.

The SDK's side is kept as cheap as it can be: its exporter returns at once and keeps nothing, a block
is shorter than the 512 spans at which the processor wakes its thread, and between blocks, off the
clock, `force_flush` empties the queue. So no SDK span waits for a queue, or pays for its export.
Ours pay for everything that they do: both clock reads, their share of leases, laps of the ring.
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic_ns, perf_counter_ns

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import set_span_in_context

from benchmarks._stats import median_of, ratio_of_medians, table, with_interval
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.steps import Operation, Tracer, live, phase

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
    """One thing to measure: *block* does it `BLOCK` times; *against* is the SDK's case."""

    name: str
    block: Callable[[], None]
    against: str = ""
    goal: str = ""


class _Nowhere(SpanExporter):
    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:  # noqa: ARG002
        return SpanExportResult.SUCCESS


def our_cases(recorder: Recorder) -> list[Case]:
    """Return our own cases, writing to *recorder*."""
    number = recorder.intern(Descriptor("phase", "rollout"))
    span, begin, record = recorder.span, recorder.begin, recorder.phase

    def phase_record() -> None:
        for _ in range(BLOCK):
            start = monotonic_ns()
            record(number, start, monotonic_ns(), 100)

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
        Case("phase record", phase_record, START_END, "35x"),
        Case("crash-safe operation (BEGIN + SPAN)", operation_record, START_END, "20x"),
        Case("the same, as `Operation`", operation_object, START_END),
        Case("`with phase()`", with_phase, START_END, "18x"),
        Case("`with phase()`, again", with_phase, AS_CURRENT),
    ]


START_END = "SDK `start_span`, 6 attributes, `end`"
AS_CURRENT = "SDK `with start_as_current_span`, 6 attributes"


def sdk_cases(provider: TracerProvider) -> list[Case]:
    """Return the SDK's cases: children of one span, as spans of a step are."""
    tracer = provider.get_tracer("bench")
    context = set_span_in_context(tracer.start_span("step"))

    def start_end() -> None:
        for _ in range(BLOCK):
            tracer.start_span("all_reduce", context, attributes=ATTRIBUTES).end()

    def as_current() -> None:
        for _ in range(BLOCK):
            with tracer.start_as_current_span("all_reduce", context, attributes=ATTRIBUTES):
                pass

    return [Case(START_END, start_end), Case(AS_CURRENT, as_current)]


def measure(cases: list[Case], rounds: int, between: Callable[[], object]) -> dict[str, list[float]]:
    """Return ns per call of each case in each round; *between* blocks something is done off the clock."""
    seen: dict[str, list[float]] = {case.name: [] for case in cases}
    for _ in range(rounds):
        for case in cases:
            begun = perf_counter_ns()
            case.block()
            seen[case.name].append((perf_counter_ns() - begun) / BLOCK)
            between()
    return seen


def row(case: Case, seen: dict[str, list[float]]) -> list[str]:
    """Return the case's row of the table."""
    own = seen[case.name]
    median, low, high = with_interval(median_of(own), len(own))
    cells = [case.name, f"{median:,.0f} ({low:,.0f} - {high:,.0f})"]
    if not case.against:
        return [*cells, "", ""]
    ratio, low, high = with_interval(ratio_of_medians(seen[case.against], own), len(own))
    against = "SDK `with`" if case.against == AS_CURRENT else "SDK `start_span`"
    return [*cells, f"{ratio:.1f}x {against} ({low:.1f} - {high:.1f})", case.goal and f">= {case.goal}"]


def run(rounds: int = 200) -> str:
    """Measure and return the table in markdown."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
    recorder = Recorder(folder, 4 << 20)
    recorder.step = 17
    live.tracer = Tracer(recorder)
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_Nowhere()))
    try:
        cases = [*sdk_cases(provider), *our_cases(recorder)]
        measure(cases, 3, provider.force_flush)  # imports, caches, the ring's first lap
        seen = measure(cases, rounds, provider.force_flush)
    finally:
        live.tracer = None
        recorder.close()
        provider.shutdown()
        shutil.rmtree(folder)
    return table(["case", "ns (95 %)", "ratio (95 %)", "goal"], [row(case, seen) for case in cases])

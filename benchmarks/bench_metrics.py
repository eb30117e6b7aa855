"""What metrics cost the drain, the sampler and the summary of each step: ``python -m benchmarks metrics``.

CPU time (``process_time``, all threads) in one process, for a host with eight ranks, from the first read of ``/proc``
to a value in the run directory (on tmpfs) and in the SDK's pipeline:

- *sampler*: ten seconds inside the window: the host and eight processes twice a second, written once a second;
- *summary*: the rows of eight ranks (a step, five stages, 16 all-reduces with a wait in each), as they come, a
  second's steps of a rank at a time, for steps of 20 ms and of 100 ms;
- *export*: what the SDK collects of all this, encoded to OTLP and dropped: once a minute, unless told otherwise.

No rank waits for any of this, since the drain is another process; so shares are of one core. *Of a step* is what one
rank's step costs the drain, its part of the samples included, divided by the step's length.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
from opentelemetry.exporter.otlp.proto.common.metrics_encoder import encode_metrics
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData

from benchmarks._processes import scratch
from benchmarks._stats import median_of, ranged, table
from otel_dltrace.export.metrics.gpu import NoGpuError, open_gpus
from otel_dltrace.export.metrics.host import CpuAndMemory, Disks, Network
from otel_dltrace.export.metrics.process import ProcessSource
from otel_dltrace.export.metrics.run import RankMetrics, RunMetrics
from otel_dltrace.export.metrics.sampler import IN_WINDOW_S
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.descriptors import Descriptors
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.semconv import Level
from otel_dltrace.model.spans import Process, empty_rows

RANKS, SECONDS = 8, 10
STEPS_MS = (20, 100)
EXPORTS_S = 60.0
GOAL = 0.2
"""Percent of a step, sampler and summary together."""
STAGES = ("dataloader_next", "prepare_batch", "forward", "backward", "optimizer")
BUCKETS = 16
_STEP, *_STAGES, _ALL_REDUCE, _WAIT = range(3 + len(STAGES))
DESCRIPTORS = Descriptors.of(
    [
        RANK_STEP,
        *(Descriptor(s.STAGE, name) for name in STAGES),
        Descriptor(s.COLLECTIVE, "all_reduce", "0", RANKS, "nccl"),
        Descriptor(s.PHASE, s.WAIT),
    ]
)
WAITING = [sys.executable, "-c", "import sys; sys.stdin.read()"]


class Dropping(MetricExporter):
    """Encodes what it gets, and drops it."""

    def export(self, metrics_data: MetricsData, *_given: Any, **_more: Any) -> MetricExportResult:
        """Encode *metrics_data*."""
        encode_metrics(metrics_data).SerializeToString()
        return MetricExportResult.SUCCESS

    def force_flush(self, *_given: Any) -> bool:
        """Have nothing left."""
        return True

    def shutdown(self, *_given: Any, **_more: Any) -> None:
        """End."""


def run(rounds: int) -> str:
    """Measure and return the table in markdown."""
    with scratch() as folder, _host(folder) as host:
        cases: dict[str, Callable[[], None]] = {"sampler": host.sample, "export": host.export}
        for ms in STEPS_MS:
            cases[f"summary, {ms} ms"] = host.summary_of(ms)
        for work in cases.values():
            work()  # imports, and first sights
        seen = [{name: _cpu(work) for name, work in cases.items()} for _ in range(rounds)]
    return _report({name: [round_[name] for round_ in seen] for name in cases})


def _cpu(work: Callable[[], None]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


class _Host:
    """A host with its ranks, of whose metrics all that the drain does is done when it is told.

    Args:
        folder: Where files go.
        pids: The processes that stand for ranks.
    """

    def __init__(self, folder: Path, pids: list[int]) -> None:
        dropping = EntryPoint("dropping", f"{__name__}:Dropping", "opentelemetry_metrics_exporter")
        settings = MetricSettings(None, (dropping,), EXPORTS_S * 1e6, 1e4)
        processes = [
            Process(1 + rank, Bind("job", "1.00", "bench", rank=rank, world_size=RANKS)) for rank in range(RANKS)
        ]
        self._run = RunMetrics(folder, processes[0], settings, 1 << 30)
        while not self._run.is_loaded:
            time.sleep(0.01)
        self._ranks = [RankMetrics(self._run, process) for process in processes]
        self._sources: list[Any] = [CpuAndMemory(), Disks(), Network(), *_gpus()]
        self._processes = [ProcessSource(pid, rank, 1) for rank, pid in enumerate(pids)]
        self._steps = 0

    def sample(self) -> None:
        """Sample and write for `SECONDS`."""
        for _ in range(SECONDS):
            rows = []
            for _ in range(round(1 / IN_WINDOW_S)):
                found = [point for source in self._sources for point in source.sample()]
                own = [point for source in self._processes for point in source.sample()]
                rows += self._run.rows_of(time.monotonic_ns(), found, own)
            self._run.write(rows)

    def summary_of(self, ms: int) -> Callable[[], None]:
        """Return what sums up `SECONDS` of steps that take *ms*."""
        steps = 1000 // ms

        def work() -> None:
            for _ in range(SECONDS):
                self._steps += steps
                rows = _rows(self._steps, steps, ms)
                for rank in self._ranks:
                    rank.take(rows, DESCRIPTORS)

        return work

    def export(self) -> None:
        """Collect and encode once."""
        assert self._run._pipeline is not None
        self._run._pipeline._provider.force_flush()


def _gpus() -> list[Any]:
    try:
        return [open_gpus()]
    except NoGpuError:
        return []


@contextmanager
def _host(folder: Path) -> Iterator[_Host]:
    waiting = [subprocess.Popen(WAITING, stdin=subprocess.PIPE) for _ in range(RANKS)]
    try:
        yield _Host(folder, [process.pid for process in waiting])
    finally:
        for process in waiting:
            process.communicate()


def _rows(first: int, steps: int, ms: int) -> Column:
    """Return what a rank's *steps* from *first* on leave, operations first."""
    calls, kinds = steps * BUCKETS, 1 + len(STAGES)
    rows = empty_rows(2 * calls + steps * kinds)
    length = ms * 1_000_000
    operations, rest = rows[: 2 * calls], rows[2 * calls :]
    operations["step"] = np.repeat(np.arange(first, first + steps), 2 * BUCKETS)
    operations["descriptor"] = np.tile((_ALL_REDUCE, _WAIT), calls)
    operations["level"] = np.tile((Level.COLLECTIVE, Level.PHASE), calls)
    operations["start"] = np.sort(np.tile(np.arange(calls) * (length // BUCKETS), 2)) + first * length
    operations["end"] = operations["start"] + length // BUCKETS // 4
    rest["step"] = np.repeat(np.arange(first, first + steps), kinds)
    rest["descriptor"] = np.tile((*_STAGES, _STEP), steps)
    rest["level"], rest["a"] = Level.STEP, np.tile((*[1] * len(STAGES), 32), steps)
    at = np.arange(len(rest)) % kinds % len(STAGES)
    rest["start"] = rest["step"].astype(np.int64) * length + at * (length // len(STAGES))
    rest["end"] = rest["start"] + length // len(STAGES)
    is_step = rest["descriptor"] == _STEP
    rest["end"][is_step] = rest["start"][is_step] + length
    rest["size"] = np.where(is_step, 0, length // len(STAGES))
    return rows


def _report(seen: dict[str, list[float]]) -> str:
    head = [f"{RANKS} ranks, {len(seen['sampler'])} rounds", "CPU, us (95 %)", "of one core", "of a step", "goal"]
    samples = SECONDS / IN_WINDOW_S
    rows = [
        ["sampler, a sample", _range(seen["sampler"], 1e6 / samples), _share(seen["sampler"], SECONDS), "", ""],
        ["an export", _range(seen["export"], 1e6), _share(seen["export"], EXPORTS_S), "", ""],
    ]
    for ms in STEPS_MS:
        cpu = seen[f"summary, {ms} ms"]
        steps = RANKS * SECONDS * 1000 // ms
        both = [sampled + summed for sampled, summed in zip(seen["sampler"], cpu, strict=True)]
        name, of_step = f"summary, a step of {ms} ms", _share(both, RANKS * SECONDS)
        rows.append([name, _range(cpu, 1e6 / steps), _share(cpu, SECONDS), of_step, f"<= {GOAL} %"])
    return table(head, rows)


def _range(values: list[float], scale: float) -> str:
    return ranged(median_of([scale * one for one in values]), len(values), ".1f")


def _share(values: list[float], seconds: float) -> str:
    return ranged(median_of([100 * one / seconds for one in values]), len(values), ".3f", " %")

"""All answers about a run in one value, and the guards without which no figure should be read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np

from otel_dltrace.analysis.blame.marked import PhaseRow, marked_phases
from otel_dltrace.analysis.blame.slow import SlowStages, slow_stages
from otel_dltrace.analysis.blame.stragglers import Stragglers, stragglers
from otel_dltrace.analysis.collectives.clocks import Clocks, clocks
from otel_dltrace.analysis.collectives.joined import join
from otel_dltrace.analysis.collectives.meeting import apart, put_right
from otel_dltrace.analysis.collectives.operations import OperationRow, operations
from otel_dltrace.analysis.collectives.waits import Waits, waits, widen
from otel_dltrace.analysis.saturation import Saturation, saturation
from otel_dltrace.analysis.select import gaps
from otel_dltrace.analysis.steps.breakdown import Breakdown, breakdown, num_warm_up_steps
from otel_dltrace.analysis.steps.drift import Drift, drift
from otel_dltrace.analysis.steps.parts import is_done
from otel_dltrace.analysis.steps.pauses import pauses
from otel_dltrace.analysis.steps.table import StepTable, common_steps, step_tables, worker_batches
from otel_dltrace.analysis.steps.throughput import Throughput, throughput
from otel_dltrace.analysis.steps.timings import Timings, timings
from otel_dltrace.analysis.stops.failures import Failures, failures
from otel_dltrace.analysis.stops.left_open import LeftOpen, left_open
from otel_dltrace.analysis.utilisation import UtilisationRow, utilisation
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.metric_batch import MetricBatch
from otel_dltrace.model.semconv import STAGE, Flag, Source
from otel_dltrace.model.spans import SpanBatch

MOST_LISTED = 1 << 16
"""At most so many missing ranks are listed: the world's size is what processes claim, and may be nonsense."""
_LOST = ("lapped", "dropped", "unrecorded", "removed")


@dataclass(frozen=True, slots=True)
class Guards:
    """What the figures rest on.

    *missing* are the first `MOST_LISTED` ranks that are not there. *lost* is what drains say is missing, by reason;
    *truncated* counts spans that a kill or hang left open; *uncertainty* (ns) is that of times of different hosts
    as their clocks were read, by *apart* (ns; 0: not seen) the collectives show these to be off.
    *steps* is (first, last) of any rank.
    *unused* processes have steps too, but another one speaks for their rank: restarts, forked children.
    *device* spans have times of their device, tied to the host's clock to within *device_residual* ns.
    *damage* tells of files that could not be read, a sentence each. *is_over*: all drains have ended, no more comes.
    """

    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    expected: int
    hosts: int
    steps: tuple[int, int] | None
    common_steps: int
    spans: int
    truncated: int
    lost: tuple[tuple[str, int], ...]
    clock: str
    uncertainty: int
    unused: int
    device: int = 0
    device_residual: int = 0
    damage: tuple[str, ...] = ()
    is_over: bool = True
    apart: int = 0


@dataclass(frozen=True, slots=True)
class RunReport:
    """Everything the report says; all times in ns."""

    job: str
    guards: Guards
    stragglers: Stragglers
    breakdown: Breakdown
    phases: tuple[PhaseRow, ...]
    operations: tuple[OperationRow, ...]
    waits: Waits
    drift: Drift
    failures: Failures
    left_open: LeftOpen
    throughput: Throughput
    timings: Timings
    saturation: Saturation
    utilisation: tuple[UtilisationRow, ...]


def analyse(
    batches: Sequence[SpanBatch],
    drains: Sequence[Mapping[str, Any]] = (),
    metrics: Sequence[MetricBatch] = (),
    damage: Sequence[str] = (),
) -> RunReport:
    """Return the whole report on *batches*, one per process.

    Args:
        batches: The spans.
        drains: The drains' summaries.
        metrics: One batch per host; none where no metrics were recorded.
        damage: What could not be read, a sentence each.
    """
    tables = step_tables(batches)
    joined = widen(join(batches))
    expected = max((b.process.bind.world_size for b in batches if b.process.bind), default=min(1, len(batches)))
    parts = breakdown(tables)
    drifted = drift(tables)
    ranks = [rank.rank for rank in drifted.ranks]
    verdict = stragglers(tables, joined, parts.warm_up, expected, ranks)
    job = next((b.process.bind.job_name for b in batches if b.process.bind), "")
    line = clocks(batches)
    right = put_right(line, joined)
    guards = _guards(batches, drains, tables, expected, line)
    guards = replace(guards, damage=tuple(damage), apart=apart(line, right))
    return RunReport(
        job,
        guards,
        verdict,
        parts,
        marked_phases(batches, tables),
        operations(batches, joined),
        waits(joined),
        drifted,
        failures(batches, right),
        left_open(batches),
        throughput(tables, parts.warm_up),
        timings(tables, parts.warm_up),
        _saturation(batches, tables, slow_stages(tables, parts.warm_up), metrics),
        utilisation(metrics),
    )


def slow_stages_of(
    batches: Sequence[SpanBatch], metrics: Sequence[MetricBatch]
) -> tuple[Saturation, tuple[Column, ...]]:
    """Return the slow stages alone, and when each was slow: (k, 2) in ns of its host's monotonic clock."""
    tables = step_tables(batches)
    found = slow_stages(tables, num_warm_up_steps(tables))
    return _saturation(batches, tables, found, metrics), tuple(slow.windows for slow in found.stages)


def _saturation(
    batches: Sequence[SpanBatch], tables: Sequence[StepTable], found: SlowStages, metrics: Sequence[MetricBatch]
) -> Saturation:
    return saturation(found, {t.rank: t.batch.process for t in tables}, metrics, pauses(batches))


def _guards(
    batches: Sequence[SpanBatch],
    drains: Sequence[Mapping[str, Any]],
    tables: Sequence[StepTable],
    expected: int,
    line: Clocks,
) -> Guards:
    ranks = sorted({batch.rank for batch in worker_batches(batches) if batch.rank >= 0})
    steps = np.concatenate([t.steps for t in tables]) if tables else np.zeros(0, np.int64)
    missing = chain.from_iterable(range(first, last + 1) for first, last in gaps(ranks, expected))
    return Guards(
        tuple(ranks),
        tuple(islice(missing, MOST_LISTED)) if ranks else (),
        expected,
        len(set(line.hosts)),
        (int(steps.min()), int(steps.max())) if len(steps) else None,
        len(common_steps(tables)),
        sum(len(batch) for batch in batches),
        sum(int((batch["flags"] & Flag.TRUNCATED != 0).sum()) for batch in batches),
        _lost(drains),
        line.method,
        line.uncertainty,
        sum(bool(is_done(batch).any()) for batch in worker_batches(batches)) - sum(t.processes for t in tables),
        *_device(batches),
        is_over=all(drain.get("ended", True) for drain in drains),
    )


def _device(batches: Sequence[SpanBatch]) -> tuple[int, int]:
    spans, residual = 0, 0
    for batch in batches:
        of_device = batch["source"] == Source.DEVICE
        spans += int(np.isin(batch["source"], (Source.DEVICE, Source.RECORDER)).sum())
        residual = max(residual, int(batch["b"][of_device & batch.is_kind(STAGE)].max(initial=0)))
    return spans, residual


def _lost(drains: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, int], ...]:
    """Return what the drains counted as lost, summed over them, by reason."""
    lost: dict[str, int] = {}
    for drain in drains:
        counts = drain.get("summary", drain)
        for name, value in counts.items():
            if name.startswith(_LOST) and isinstance(value, int) and value:
                lost[name] = lost.get(name, 0) + value
    return tuple(sorted(lost.items()))

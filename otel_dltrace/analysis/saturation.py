"""What the machine did while a stage was slow: only what is above a stated threshold, and only as correlation.

A counter is sampled less often than stages come, so the value *while* a stage ran is found as follows: what
the samples that touch it show above the quantity's median of the whole run is put down to the stage, as long
as the stage takes at least a quarter of these samples' time; what is seen more coarsely than that says nothing.
Of a stage that was slow several times it is the median sample, so that one event is not put down to all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.blame.slow import Slow, SlowStage, SlowStages
from otel_dltrace.analysis.intervals import covered, merged
from otel_dltrace.model import usage as u
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.metric_batch import HOST, MetricBatch
from otel_dltrace.model.spans import Process

LEAST_SHARE = 0.25
"""A stage must take at least this share of the time of the samples that touch it."""
LEAST_COVERED = 0.5
"""... and samples must cover at least this share of the stage."""
SEVERAL = 3
"""Of so many slow steps the median counts."""
GC = "gc"
NETWORK = "network"


@dataclass(frozen=True, slots=True)
class Threshold:
    """From which *least* value on a *quantity* is told; *kind* is its name in results."""

    kind: str
    quantity: u.Quantity
    least: float


THRESHOLDS = (
    Threshold("cpu", u.CPU, 0.9),
    Threshold("disk", u.DISK_BUSY, 0.5),
    Threshold("disk read", u.PROCESS_READ, 50 << 20),
    Threshold("disk write", u.PROCESS_WRITE, 50 << 20),
    Threshold("gpu throttled", u.THROTTLED, 0.1),
    Threshold("major page faults", u.MAJOR_FAULTS, 100),
    Threshold("minor page faults", u.MINOR_FAULTS, 100_000),
    Threshold("involuntary switches", u.SWITCHES, 100),
)
LINE_RATE_SHARE = 0.8
"""From this share of its line rate on an interface is told of."""
GC_SHARE = 0.1
"""From this share of a slow stage on garbage collection is told of."""


@dataclass(frozen=True, slots=True)
class Sign:
    """Something that was at or above its *threshold* while a stage was slow.

    *kind* is that of `THRESHOLDS`, ``network`` or ``gc``; *of* names the disk, interface, or GPU and reason.
    *value* is a share of 1, or events or bytes per second.
    """

    kind: str
    of: str
    value: float
    threshold: float


@dataclass(frozen=True, slots=True)
class SlowStageSigns:
    """A slow stage, the *host* it ran on, and the *signs*; *sampled* says whether that host was, at that time."""

    slow: SlowStage
    host: str
    sampled: bool
    signs: tuple[Sign, ...]


@dataclass(frozen=True, slots=True)
class Saturation:
    """All slow stages with their signs; *excess* and *outlier* are the ns above which a stage counts as slow."""

    excess: int
    outlier: int
    sampled: bool
    stages: tuple[SlowStageSigns, ...]


@dataclass(frozen=True)
class _Level:
    """A usage as it is compared: from *threshold* on it is a sign of *kind*; it is never above *most*."""

    kind: str
    usage: u.Usage
    threshold: float
    most: float


def saturation(
    found: SlowStages,
    processes: Mapping[int, Process],
    metrics: Sequence[MetricBatch],
    pauses: Mapping[int, Column],
) -> Saturation:
    """Return for each slow stage, in the same order, what its host and its process did at that time.

    Args:
        found: The slow stages.
        processes: Whose the ranks are.
        metrics: One batch per host.
        pauses: By rank the garbage collections, shape (n, 2), in ns of the host's clock.
    """
    levels = {(batch.boot_id, batch.host): list(_levels(batch)) for batch in metrics}
    stages = []
    for slow in found.stages:
        process = processes[slow.stage.rank]
        of_host = levels.get((process.boot_id, process.host), [])
        here = [level for level in of_host if level.usage.rank in (HOST, slow.stage.rank)]
        values = [(level, value_while(level.usage, slow.windows)) for level in here]
        signs = [
            Sign(level.kind, level.usage.of, min(value, level.most), level.threshold)
            for level, value in values
            if value is not None and value >= level.threshold
        ]
        signs += _collections(slow, pauses[slow.stage.rank])
        sampled = any(value is not None for _, value in values)
        stages.append(SlowStageSigns(slow.stage, process.host, sampled, tuple(signs)))
    return Saturation(found.excess, found.outlier, bool(metrics), tuple(stages))


def value_while(usage: u.Usage, windows: Column) -> float | None:
    """Return *usage* while *windows* (k, 2) lasted; None where it was sampled too coarsely."""
    length = (usage.end - usage.begin).astype(np.float64)
    inside = covered(merged(*windows.T), usage.begin, usage.end)
    touched = inside > 0
    seen, sampled = float(inside.sum()), float(length[touched].sum())
    if not seen or seen < LEAST_COVERED * float((windows[:, 1] - windows[:, 0]).sum()) or seen < LEAST_SHARE * sampled:
        return None
    usual = float(np.median(usage.value))
    if len(windows) < SEVERAL:
        shown = float(np.average(usage.value[touched], weights=length[touched]))
    else:
        shown = _weighted_median(usage.value[touched], inside[touched])
    return max(0.0, usual + (shown - usual) * sampled / seen)


def _weighted_median(values: Column, weights: Column) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])


def _levels(batch: MetricBatch) -> Iterator[_Level]:
    for threshold in THRESHOLDS:
        of_process = threshold.quantity in u.OF_PROCESSES
        for usage in u.usages(batch, threshold.quantity):
            if of_process and usage.rank == HOST:
                continue  # a server's
            yield _Level(threshold.kind, usage, threshold.least, 1 if threshold.quantity.unit == "1" else np.inf)
    line_rates = {usage.of: float(usage.value[-1]) for usage in u.usages(batch, u.LINE_RATE)}
    for direction in (u.SENT, u.RECEIVED):
        for usage in u.usages(batch, direction):
            if line_rates.get(usage.of, 0) > 0:
                share = usage.value / line_rates[usage.of]
                of = f"{usage.of} {direction.name}"
                yield _Level(NETWORK, u.Usage(HOST, of, usage.begin, usage.end, share), LINE_RATE_SHARE, 1)


def _collections(slow: Slow, pauses: Column) -> list[Sign]:
    whole = int((slow.windows[:, 1] - slow.windows[:, 0]).sum())
    share = int(covered(merged(*pauses.T), *slow.windows.T).sum()) / whole if whole else 0.0
    return [Sign(GC, "", share, GC_SHARE)] if share >= GC_SHARE else []

"""How much of each host, disk, interface, GPU and process a run used, over the time in which its ranks had steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.model import usage as u
from otel_dltrace.model.metric_batch import MetricBatch


@dataclass(frozen=True, slots=True)
class UtilisationRow:
    """One quantity in *unit*; *rank* is that of a process, -1 for the host's; *mean* is over time.

    *of* names the disk, interface or GPU, with the reason where one is throttled.
    """

    host: str
    rank: int
    what: str
    of: str
    unit: str
    samples: int
    mean: float
    p95: float
    max: float


def utilisation(metrics: Sequence[MetricBatch]) -> tuple[UtilisationRow, ...]:
    """Return a row for everything that the hosts' *metrics* tell of: hosts first, then their processes."""
    rows = []
    for batch in sorted(metrics, key=lambda batch: (batch.host, batch.boot_id)):
        of_host = [
            (usage.rank, at, usage.of, _row(batch.host, quantity, usage))
            for at, quantity in enumerate(u.SHOWN)
            for usage in u.usages(batch, quantity)
        ]
        rows += [row for *_, row in sorted(of_host, key=lambda one: one[:3])]
    return tuple(rows)


def _row(host: str, quantity: u.Quantity, usage: u.Usage) -> UtilisationRow:
    length = usage.end - usage.begin
    # What was sampled once has no extent in time.
    mean = float(np.average(usage.value, weights=length) if length.any() else usage.value.mean())
    p95, most = float(np.percentile(usage.value, 95)), float(usage.value.max())
    return UtilisationRow(host, usage.rank, quantity.name, usage.of, quantity.unit, len(usage.value), mean, p95, most)

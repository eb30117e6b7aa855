"""The figures by which a set of durations is told: exact sums, and quantiles that one outlier cannot move."""

from dataclasses import dataclass

import numpy as np

from otel_dltrace.model.arrays import Column


@dataclass(frozen=True, slots=True)
class Spread:
    """Figures of *count* values, all in the unit of the values (ns)."""

    count: int = 0
    total: int = 0
    mean: int = 0
    p50: int = 0
    p95: int = 0
    max: int = 0


def spread(values: Column) -> Spread:
    """Return the figures of *values*; quantiles are interpolated linearly, all but counts rounded to whole units."""
    if not len(values):
        return Spread()
    total = int(values.sum())
    p50, p95 = np.percentile(values, (50, 95))
    mean, most = round(total / len(values)), int(values.max())
    return Spread(len(values), total, mean, round(float(p50)), round(float(p95)), most)


def median(values: Column) -> int:
    """Return the median of *values*, rounded; 0 of none."""
    return round(float(np.median(values))) if len(values) else 0


def usual(*spreads: Spread) -> int:
    """Return what *spreads* would add up to if all their values were as the median one."""
    return sum(one.count * one.p50 for one in spreads)

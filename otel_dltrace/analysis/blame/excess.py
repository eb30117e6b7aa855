"""By how much each rank exceeds the others, and whether that is more than chance makes."""

import math

import numpy as np

from otel_dltrace.analysis.steps.untold import SHARE_OF_STEPS
from otel_dltrace.model.arrays import Column

_ERROR_OF_MEDIAN = 1.4826 * 1.2533
"""Standard error of the median of normal values, in median absolute deviations by the root of their number."""


def beyond_chance(steps: int, share: float = SHARE_OF_STEPS) -> float:
    """Return a number of *steps*: what is so in more of them is so in more than *share* of all, and not by chance.

    It is one standard deviation above: of six steps it takes five and not four, of a hundred 56.
    """
    return share * steps + math.sqrt(share * (1 - share) * steps)


def steps_over(excess: Column, threshold: int) -> Column:
    """Return in how many steps each rank's columns exceed by more than *threshold*, (R, C); *excess* is (R, n, C)."""
    steps: Column = (excess > threshold).sum(axis=1)
    return steps


def stands_out(excess: Column, threshold: int) -> Column:
    """Return a mask (R, C) of the ranks' columns whose *excess* (R, n, C) is over *threshold*, and not by chance.

    It is so in most steps, and in the median by more than the largest of R medians is by chance: where all ranks'
    times differ from step to step, the more of them there are, the more one of them seems slow in a few steps.
    """
    ranks, steps, _ = excess.shape
    often = steps_over(excess, threshold) > beyond_chance(steps)
    usual = np.median(excess, axis=1)
    deviation = np.median(np.abs(excess - usual[:, None]), axis=(0, 1)) if steps else 0
    by_chance = _ERROR_OF_MEDIAN * deviation * math.sqrt(2 * math.log(2 * ranks) / max(steps, 1))
    beyond: Column = often & (usual > by_chance)
    return beyond


def others_median(values: Column) -> Column:
    """Return, for each entry along the first axis, the median of all the others; same shape as *values*."""
    order = np.argsort(values, axis=0, kind="stable")
    place = np.argsort(order, axis=0, kind="stable")
    ordered = np.take_along_axis(values, order, 0)
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    below = np.take_along_axis(ordered, low + (place <= low), 0)
    above = np.take_along_axis(ordered, high + (place <= high), 0)
    middle: Column = (below + above) / 2
    return middle


def beside_the_rest(values: Column, out: Column) -> Column:
    """Return `others_median` of *values* (R, n, C), for those that stand *out* (R, C) without the others that do.

    They wait for nobody; beside them one of two out of three would exceed the others by half of what it does.
    """
    others = others_median(values)
    for column in np.flatnonzero((out.sum(axis=0) > 1) & ~out.all(axis=0)):
        mine = out[:, column]
        others[mine, :, column] = np.median(values[~mine, :, column], axis=0)
    return others

"""Collectives that devices were at, on one time line: by their ends, whatever is known of when they began."""

from dataclasses import replace

import numpy as np

from otel_dltrace.analysis.collectives.joined import Joined
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column

APART = 10
"""All ranks of a collective are done within one part in so many of the time that the last one to come was at it."""
_BY_DEVICE = (s.Source.DEVICE, s.Source.RECORDER)


def by_devices(joined: Joined) -> Column:
    """Return a mask (g,) of the collectives of which every rank has its device's times."""
    told: Column = joined.reduce(np.logical_and, np.isin(joined["source"], _BY_DEVICE))
    return told


def is_aligned(joined: Joined) -> Column:
    """Return a mask (g,) of the collectives whose ranks are compared by how long their devices were at them.

    None is done before all have come, so who was at it for longer came earlier, and waited. That is known better than
    how clocks of several hosts compare, and than when a device was at what its recorder tells (``recorder``).
    """
    is_vague = joined.apart | joined.reduce(np.logical_or, joined["source"] == s.Source.RECORDER)
    mask: Column = is_vague & joined.synchronises & by_devices(joined)
    return mask


def aligned(joined: Joined) -> Joined:
    """Return *joined* with those that `is_aligned` picks moved so that all their ranks are done at the same time.

    What is uncertain of them is by how much the ends differ.
    """
    moves = is_aligned(joined)
    if not moves.any():
        return joined
    later = joined.to_rows(joined.reduce(np.maximum, joined["end"])) - joined["end"]
    rows = joined.rows.copy()
    for name in ("start", "end", "blocked"):
        rows[name] += np.where(joined.to_rows(moves), later, 0)
    least = joined.reduce(np.minimum, joined["end"] - joined["start"])
    return replace(joined, rows=rows, uncertainty=np.where(moves, np.maximum(least // APART, 1), joined.uncertainty))


def telling(joined: Joined) -> Joined:
    """Return those that may tell who came late: where hosts' clocks would matter, what `is_aligned` picks, if anything.

    What a host has issued its device comes to when it does.
    """
    joined = joined.take(~joined.reduce(np.logical_or, joined["source"] == s.Source.HOST_ISSUE))
    told = is_aligned(joined)
    return joined.take(told) if told.any() and joined.apart.any() else joined

"""By how much each rank comes later than the others to a collective, or to several that follow one another."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from otel_dltrace.analysis.collectives.joined import Joined
from otel_dltrace.analysis.collectives.waits import with_known_ends
from otel_dltrace.model.arrays import Column

_FAR_MORE = 10
"""Who goes on for less than one part in so many of the time by which the last one is late is held up by all of it."""


def lateness(joined: Joined, slow: Sequence[int] = ()) -> Column:
    """Return begin - median of the other ranks' begins of each row, shape (n,); 0 within the clocks' uncertainty.

    Those of *slow* ranks are not among the others, if there are any more.
    """
    starts, first, is_slow = joined["start"], joined.to_rows(joined.begins[:-1]), np.isin(joined["rank"], slow)
    is_slow &= ~joined.to_rows(joined.reduce(np.logical_and, is_slow))
    others = joined.to_rows(joined.sizes - joined.reduce(np.add, is_slow.astype(np.int64))) - ~is_slow
    order = np.lexsort((starts, is_slow, first) if len(slow) else (starts, first))
    place = np.empty(len(starts), np.int64)
    place[order] = np.arange(len(starts))
    place -= first
    low, high = np.maximum(others - 1, 0) // 2, others // 2
    ordered = starts[order]
    before, after = ordered[first + low + (place <= low)], ordered[first + high + (place <= high)]
    # The halves of the difference: a sum of two wall times would not fit.
    late = starts - before - (after - before) / 2
    certain: Column = np.where((np.abs(late) > joined.to_rows(joined.uncertainty)) & (others > 0), late, 0)
    return certain


def released(joined: Joined, ranks: Sequence[int], steps: Column) -> Column:
    """Return by how much later than the others a rank was done with the collective before its latest, (R, n).

    That is the one to which it came latest in each of *steps*; 0 where ends are not known. A large sum over ranks that
    are no power of two is with some of them a transfer later than with the others, and they begin the next one as late.
    """
    known, late = with_known_ends(joined), lateness(joined)
    ends = known.rows.copy()
    ends["start"] = ends["end"]
    behind = lateness(replace(known, rows=ends))
    out = np.zeros((len(ranks), len(steps)))
    for place, rank in enumerate(ranks):
        mine = np.flatnonzero((joined["rank"] == rank) & np.isin(joined["step"], steps))
        mine = mine[np.argsort(late[mine], kind="stable")]  # of a step's the latest is written last
        order = np.flatnonzero(known["rank"] == rank)
        order = order[np.argsort(known["end"][order], kind="stable")]
        before = np.searchsorted(known["end"][order], joined["start"][mine], "right")
        out[place, np.searchsorted(steps, joined["step"][mine])] = np.append(0, behind[order])[before]
    return out


def in_a_row(joined: Joined, which: Column) -> Joined:
    """Return one for each step and group, in place of all of *which* that hold whoever is early until all have come.

    Each of those finds the ranks together, so what a rank begins later than the first adds up, to its begin here: as in
    the layers of a model that is sharded. On one host alone, since the errors of several clocks would add up, too.

    Args:
        joined: All of them.
        which: A mask (g,).
    """
    held = which & _holds(joined)
    begins, sizes = joined.begins[:-1][held], joined.sizes[held]
    groups = {group: number for number, group in enumerate(dict.fromkeys(d.group for d in joined.descriptors))}
    group = np.array([groups[d.group] for d in joined.descriptors], np.int64)[held]
    # Those of a group are of the same ranks, in the same order.
    keys = np.stack((joined["step"][begins], group, sizes, joined["rank"][begins]))
    _, first, place = np.unique(keys, axis=1, return_index=True, return_inverse=True)
    ends = np.cumsum(sizes[first])
    rows = joined.rows[_ranges(begins[first], sizes[first])]
    later = joined["start"] - joined.to_rows(joined.reduce(np.minimum, joined["start"]))
    where = _ranges((ends - sizes[first])[place.ravel()], sizes)
    rows["start"] = np.bincount(where, later[joined.to_rows(held)], len(rows))
    descriptors = tuple(joined.descriptors[i] for i in np.flatnonzero(held)[first].tolist())
    return Joined(rows, np.append(0, ends), descriptors, np.zeros(len(first), np.int64))


def _ranges(begins: Column, sizes: Column) -> Column:
    """Return ``begin, begin + 1, ...`` for each of *begins*, as many as *sizes* say."""
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ranges: Column = np.repeat(begins, sizes) + within
    return ranges


def _holds(joined: Joined) -> Column:
    """Return a mask (g,) of those on one host in which whoever is early does next to nothing until all have come."""
    last = joined.reduce(np.maximum, joined["start"])
    goes_on = np.where(joined["start"] < joined.to_rows(last), joined["blocked"] - joined["start"], 0)
    late = last - joined.reduce(np.minimum, joined["start"])
    waits = joined.synchronises & ~joined.apart
    mask: Column = waits & (_FAR_MORE * joined.reduce(np.maximum, goes_on) <= late)
    return mask

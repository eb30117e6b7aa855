"""One time line for hosts whose wall clocks are off: all ranks are done with a collective at about the same time."""

from dataclasses import replace

import numpy as np

from otel_dltrace.analysis.collectives.clocks import Clocks
from otel_dltrace.analysis.collectives.joined import Joined
from otel_dltrace.analysis.collectives.waits import disagreeing, widen
from otel_dltrace.analysis.spread import median

_LATEST = 50
"""Clocks drift: so many of the latest collectives tell."""
_NEVER = np.iinfo(np.int64).max


def put_right(line: Clocks, joined: Joined) -> Clocks:
    """Return *line* with the clocks of hosts that are seen to be off moved to where the ends of collectives meet.

    Hosts without a rank in any, as servers' are, keep theirs. Where none has ranks on all others the clocks stay, and
    what they may be off by is uncertain.
    """
    wrong = disagreeing(joined)
    if not len(wrong):
        return line
    hosts = np.unique(joined["host"]).tolist()
    ends = np.stack([wrong.reduce(np.minimum, np.where(wrong["host"] == h, wrong["end"], _NEVER)) for h in hosts])
    ends = ends[:, (ends < _NEVER).all(axis=0)]
    if not ends.size:
        return replace(line, uncertainty=max(line.uncertainty, int(widen(joined).uncertainty.max())))
    latest = ends[:, np.argsort(ends[0])[-_LATEST:]]
    ahead = latest - latest[0]
    usual = np.median(ahead, axis=1).astype(np.int64)
    took = median(wrong.reduce(np.minimum, wrong["end"] - wrong["start"]))  # by the last rank, which waited for nobody
    unsure = line.uncertainty + took + int(np.abs(ahead - usual[:, None]).max())
    moved = dict(zip(hosts, usual.tolist(), strict=True))
    offsets = tuple(offset - moved.get(host, 0) for offset, host in zip(line.offsets, line.hosts, strict=True))
    return replace(line, offsets=offsets, uncertainty=unsure)


def apart(line: Clocks, right: Clocks) -> int:
    """Return by how many ns hosts' clocks by *line* are, or may be, apart, as `put_right` has found; 0: not seen."""
    moved = [before - after for before, after in zip(line.offsets, right.offsets, strict=True)]
    return max(moved) - min(moved) if any(moved) else (right.uncertainty if right != line else 0)

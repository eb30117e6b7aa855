"""One time line for hosts whose wall clocks are off: all ranks are done with a collective at about the same time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from otel_dltrace.analysis.collectives.clocks import Clocks, clocks
from otel_dltrace.analysis.collectives.joined import Joined, join
from otel_dltrace.analysis.collectives.waits import disagreeing, widen
from otel_dltrace.analysis.spread import median
from otel_dltrace.model.spans import SpanBatch

_LATEST = 50
"""Clocks drift: so many of the latest collectives tell."""
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Moves:
    """What puts hosts whose clocks are seen to be *apart* on one time line, to within *uncertainty*; all in ns.

    *by_process* (by nonce) is what to add to a process's times; it is empty where no clock is seen to be off.
    """

    by_process: Mapping[int, int]
    uncertainty: int = 0
    apart: int = 0


def moves(batches: Sequence[SpanBatch]) -> Moves:
    """Return what puts the hosts of *batches*, of one run, on one time line (`put_right`)."""
    line = clocks(batches)
    right = put_right(line, join(batches))
    by = [to - at for at, to in zip(line.offsets, right.offsets, strict=True)]
    if not any(by):
        return Moves({})
    by_process = {batch.process.nonce: ns for batch, ns in zip(batches, by, strict=True)}
    return Moves(by_process, right.uncertainty, max(by) - min(by))


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
    if any(moved):
        return max(moved) - min(moved)
    return right.uncertainty if right != line else 0

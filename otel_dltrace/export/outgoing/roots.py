"""The root span of each step, from the drain of worker rank 0's host, over its local ranks' extent.

A process that is a run of its own, whatever its rank, has its own roots: there is no rank 0 beside it.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from otel_dltrace.export.outgoing.gate import SETTLE_S
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP, NO_USER_STEP, Bind, root_ids
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import STEP, TRAIN_STEP, Level
from otel_dltrace.model.spans import empty_rows

if TYPE_CHECKING:
    from otel_dltrace.export.member import Member

ROOT = (Descriptor(STEP, TRAIN_STEP),)
"""The names that rows of roots speak of."""
EXTENT = np.dtype([("step", "<u4"), ("start", "<i8"), ("end", "<i8")])
_REMEMBERED = 4096


@dataclass
class _Seen:
    members: set[int]
    shards: set[int]
    start: int
    end: int
    since: float


@dataclass(frozen=True)
class Root:
    """One row, the root of *step*, in the name of worker rank 0 or of who is alone (*owner*)."""

    owner: "Member"
    step: int
    shard: int
    row: Column


@dataclass
class Roots:
    """Collects the local ranks' extents per step until all have decided it, or *settle* seconds have passed.

    A rank that is known to stand in the step is waited for however long that takes.
    """

    bind: Bind
    settle: float = SETTLE_S
    _owner: "Member | None" = None
    _steps: dict[int, _Seen] = field(default_factory=dict)
    _orphaned: dict[int, _Seen] = field(default_factory=dict)
    """Steps that rank 0 has not decided, nor any before: it may be elsewhere, or be told of last."""
    _sent: set[int] = field(default_factory=set)

    def add(self, member: "Member", step: int, shard: int, extent: tuple[int, int], now: float) -> None:
        """Note that the local rank *member* spent *extent* (monotonic ns) in *step*."""
        if member.process.owns_roots:
            self._owner = member
        if step in self._sent:
            return
        seen = self._steps.get(step)
        if seen is None:
            seen = self._orphaned.pop(step, None) or _Seen(set(), set(), extent[0], extent[1], now)
            seen.since = now
            self._steps[step] = seen
        seen.members.add(member.process.nonce)
        seen.shards.add(shard)
        seen.start, seen.end = min(seen.start, extent[0]), max(seen.end, extent[1])

    def pending_from(self) -> int:
        """Return the first step whose root has not gone out, NO_STEP if none."""
        return min(self._steps, default=NO_STEP)

    def due(self, members: int, now: float, final: bool, standing: Collection[int] = ()) -> list[Root]:
        """Return the roots that are complete; *members* processes are local, and some are still *standing* in steps.

        None without rank 0, unless the run is one process's own.
        """
        complete: dict[int, list[tuple[int, int, int]]] = {}
        for step in sorted(self._steps):
            seen = self._steps[step]
            is_over = step not in standing and now - seen.since >= self.settle
            if not (final or len(seen.members) >= members or is_over):
                continue
            del self._steps[step]
            if self._owner is None:
                self._set_aside(step, seen)
                continue
            self._remember(step)
            for shard in seen.shards:
                complete.setdefault(shard, []).append((step, seen.start, seen.end))
        return [root for shard, extents in sorted(complete.items()) for root in self._roots_of(shard, extents)]

    def _roots_of(self, shard: int, extents: list[tuple[int, int, int]]) -> Iterator[Root]:
        """Yield the roots in *shard* of the steps that *extents* tell of, made at once."""
        assert self._owner is not None
        rows = root_rows(self.bind, np.array(extents, EXTENT), shard)
        for i, (step, _, _) in enumerate(extents):
            yield Root(self._owner, step, shard, rows[i : i + 1])

    def _set_aside(self, step: int, seen: _Seen) -> None:
        self._orphaned[step] = seen
        if len(self._orphaned) > _REMEMBERED:
            del self._orphaned[next(iter(self._orphaned))]

    def _remember(self, step: int) -> None:
        self._sent.add(step)
        if len(self._sent) > _REMEMBERED:
            self._sent = {s for s in self._sent if s > step - _REMEMBERED // 2}


def root_rows(bind: Bind, extents: Column, shard: int) -> Column:
    """Return the roots of the steps of *bind*'s job, of which *extents* (`EXTENT`) say when each was."""
    rows = empty_rows(len(extents))
    for name in EXTENT.names or ():
        rows[name] = extents[name]
    rows["span_id"] = root_ids(bind, extents["step"].tolist(), shard)
    rows["size"], rows["b"], rows["level"] = NO_USER_STEP, -1, Level.STEP
    return rows

"""What goes out over OTLP: each step once, in full or as its stages, within the budget (contract 5)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.plan import SlowSteps, Window, share_of
from otel_dltrace.model.semconv import Level
from otel_dltrace.model.spans import Column, empty_rows

SETTLE_S = 2.0
"""How long a step is waited for after its end, unless the next one ends before."""
MAX_HELD = 200_000
"""Rows held in memory; beyond, details are read again from the run directory."""
_REMEMBERED = 1024


@dataclass(frozen=True)
class Outgoing:
    """Rows that go out together: a step's (all of one *shard*), or some made outside any step.

    *extent* is the rank's, in ns; a step that never got its own span (an evaluation after the last
    one) is *stepless*: nothing is there for its rows to hang under.
    """

    step: int
    rows: Column
    left_out: int = 0
    shard: int = 0
    extent: tuple[int, int] | None = None
    stepless: bool = False


class StepGate:
    """Holds the spans of one rank until their step is decided.

    Args:
        bind: Who the rank is.
        window: The steps that go out in full.
        budget: Spans per trace, 0 for no limit.
        read_again: Returns a step's rows from the run directory.
    """

    def __init__(self, bind: Bind, window: Window, budget: int, read_again: Callable[[int], Column]) -> None:
        self._bind, self._window, self._budget = bind, window, budget
        self._read_again = read_again
        self._slow = SlowSteps()
        self._held: dict[int, list[Column]] = {}
        self._count = 0
        self._offloaded: set[int] = set()
        self._ended: dict[int, tuple[int, int, float]] = {}
        self._decided: dict[int, tuple[bool, int]] = {}
        self._ready: list[Outgoing] = []
        self._loose: list[tuple[float, Column]] = []
        self.late = 0

    def add(self, rows: Column, is_step: Column, now: float) -> None:
        """Take in finished *rows*; *is_step* masks the rank's step spans, *now* is in seconds."""
        for i in np.flatnonzero(is_step):
            self._ended[int(rows["step"][i])] = (int(rows["start"][i]), int(rows["end"][i]), now)
        for step in np.unique(rows["step"]).tolist():
            part = rows[rows["step"] == step]
            if step == NO_STEP:
                self._loose.append((now, part))
            elif step in self._decided:
                self._add_late(step, part)
            else:
                self._held.setdefault(step, []).append(part)
                self._count += len(part)
        if self._count > MAX_HELD:
            self._offload()

    def _add_late(self, step: int, rows: Column) -> None:
        full, shard = self._decided[step]
        keep = rows if full else rows[rows["level"] <= Level.STEP]
        self.late += len(rows)
        if len(keep):
            self._ready.append(Outgoing(step, keep, shard=shard))

    def _offload(self) -> None:
        """Let go of the details of the steps that hold most; the run directory has them."""
        for step in sorted(self._held, key=lambda s: -sum(map(len, self._held[s]))):
            rows = np.concatenate(self._held[step])
            keep = rows[rows["level"] <= Level.STEP]
            self._held[step] = [keep]
            self._offloaded.add(step)
            self._count -= len(rows) - len(keep)
            if self._count <= MAX_HELD // 2:
                return

    def due(self, now: float, final: bool = False) -> list[Outgoing]:
        """Return what is decided by *now*; everything, if *final*."""
        out, self._ready = self._ready, []
        last = max(self._ended, default=-1)
        steps = sorted(self._held) if final else sorted(self._ended)
        for step in steps:
            ended = self._ended.get(step)
            if final or (ended is not None and (last > step or now - ended[2] >= SETTLE_S)):
                out.append(self._decide(step))
        loose = [rows for at, rows in self._loose if final or now - at >= SETTLE_S]
        self._loose = [] if final else [(at, rows) for at, rows in self._loose if now - at < SETTLE_S]
        out += [Outgoing(NO_STEP, rows) for rows in loose if len(rows)]
        return out

    def _decide(self, step: int) -> Outgoing:
        ended = self._ended.pop(step, None)
        held = self._held.pop(step, [])
        rows = np.concatenate(held) if held else empty_rows()
        self._count -= len(rows)
        slow = ended is not None and self._slow.is_slow(ended[1] - ended[0])
        b = self._bind
        # Servers come after the workers in the budget's count of ranks.
        place = b.rank if b.role == "worker" else b.world_size + b.rank
        share = share_of(place, b.world_size, b.servers, self._budget, step)
        full = share.full and (slow or step in self._window)
        offloaded = step in self._offloaded
        self._offloaded.discard(step)
        if offloaded and full:
            rows = self._read_again(step)
        chosen = within(rows, share.limit) if full else rows[rows["level"] <= Level.STEP]
        self._decided[step] = (full, share.shard)
        while len(self._decided) > _REMEMBERED:
            del self._decided[next(iter(self._decided))]
        extent = (ended[0], ended[1]) if ended is not None else None
        return Outgoing(step, chosen, len(rows) - len(chosen), share.shard, extent, stepless=ended is None)

    def undecided_from(self) -> int:
        """Return the first step that is still held, NO_STEP if none is."""
        return min((*self._held, *self._ended), default=NO_STEP)

    @property
    def has_loose(self) -> bool:
        """Whether rows made outside any step are still held."""
        return bool(self._loose)


def within(rows: Column, limit: int) -> Column:
    """Return *rows* without their finest levels, as many as it takes to be at most *limit* spans."""
    for level in (Level.PARTITION, Level.PHASE, Level.COLLECTIVE):
        if len(rows) <= limit:
            break
        rows = rows[rows["level"] < level]
    return rows

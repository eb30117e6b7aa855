"""What goes out over OTLP: each step once, in full or as its stages, within the budget (contract 5)."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from otel_dltrace.export.outgoing.budget import StepBudget
from otel_dltrace.export.outgoing.served import Served, SlowHere
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.plan import Share, SlowSteps, Window, share_of
from otel_dltrace.model.semconv import Flag, Level
from otel_dltrace.model.spans import stack_rows

SETTLE_S = 2.0
"""How long at least a step is waited for after its end, unless the next one ends before."""
MAX_HELD = 200_000
"""Rows held in memory; beyond, details are read again from the run directory."""
_REMEMBERED = 1024
_FAILED = np.uint16(Flag.ERROR | Flag.TRUNCATED)
MOST_FAILED = 100
"""Steps of a rank that go out in full for having failed: a program may fail and go on in every one."""
LOST_STEPS = 64
"""A step is given up that many steps later: its own span was overwritten before it was read."""


class _Ended(NamedTuple):
    extent: tuple[int, int]
    seq: int
    since: float


class Outgoing(NamedTuple):
    """Rows that go out together: a step's (all of one *shard*), or some made outside any step.

    *extent* is the rank's, in ns, and *seq* the WORLD group's number at its start (0: not known); a
    step that never got its own span (an evaluation after the last one) is *stepless*: nothing is
    there for its rows to hang under. One that was *slow*, failed or cut off goes out whatever the window says.
    """

    step: int
    rows: Column
    left_out: int = 0
    shard: int = 0
    extent: tuple[int, int] | None = None
    seq: int = 0
    stepless: bool = False
    slow: bool = False


class StepGate:
    """Holds the spans of one rank until their step is decided; those of a server until the steps of others are.

    Args:
        bind: Who the rank is.
        window: The steps that go out in full.
        budget: Spans per trace, 0 for no limit.
        read_again: Returns a step's rows from the run directory.
        settle: How long a step is waited for, in seconds.
        slow_here: What a server knows of others' steps.
    """

    def __init__(
        self,
        bind: Bind,
        window: Window,
        budget: int,
        read_again: Callable[[int], Column],
        settle: float = SETTLE_S,
        slow_here: SlowHere | None = None,
    ) -> None:
        self._settle = settle
        self._bind, self._window, self._budget = bind, window, budget
        self._read_again = read_again
        self._slow, self._steps = SlowSteps(), StepBudget()
        self._failed = 0
        self._held: dict[int, list[Column]] = {}
        self._count = 0
        self._offloaded: dict[int, int] = {}
        self._ended: dict[int, _Ended] = {}
        self._last = -1
        self._decided: dict[int, tuple[bool, int, int]] = {}
        """By step: whether it went out in full, its shard, and how many more spans the budget has room for."""
        self._ready: list[Outgoing] = []
        self._loose: list[tuple[float, Column]] = []
        self._served = Served(bind, window, budget, slow_here or SlowHere())
        self.late = 0

    def add(self, rows: Column, is_step: Column, now: float) -> None:
        """Take in finished *rows*; *is_step* masks the rank's step spans, *now* is in seconds."""
        for step, extent, seq in ends_of(rows, is_step):
            self._ended[step] = _Ended(extent, seq, now)
        has_steps = self._bind.role == "worker"
        held, decided, forgotten_below = self._held, self._decided, next(iter(self._decided), 0)
        for step, part in by_step(rows):
            if step == NO_STEP or not has_steps:
                self._loose.append((now, part))
            elif step not in held and (step in decided or step < forgotten_below):
                self._add_late(step, part)
            else:
                self._count += len(part)
                held.setdefault(step, []).append(part)
        if self._count > MAX_HELD:
            self._offload()

    def _add_late(self, step: int, rows: Column) -> None:
        share = self._share(step)
        # So late that it was forgotten what was decided: the window still says the same.
        full, shard, room = self._decided.get(step, (share.full and step in self._window, share.shard, share.limit))
        self._ended.pop(step, None)
        keep = self._steps.within(step, rows, room) if full else stages_of(rows)
        if step in self._decided:
            self._decided[step] = (full, shard, room - len(keep))
        self.late += len(rows)
        self._ready.append(Outgoing(step, keep, len(rows) - len(keep), shard))

    def _offload(self) -> None:
        """Let go of the details of the steps that hold most; the run directory has them."""
        for step in sorted(self._held, key=lambda s: -sum(map(len, self._held[s]))):
            rows = stack_rows(self._held[step])
            keep = stages_of(rows)
            self._held[step] = [keep]
            self._offloaded[step] = self._offloaded.get(step, 0) + len(rows) - len(keep)
            self._count -= len(rows) - len(keep)
            if self._count <= MAX_HELD // 2:
                return

    def due(self, now: float, final: bool = False) -> list[Outgoing]:
        """Return what is decided by *now*; if *final* everything, but what others have yet to decide for a server."""
        out, self._ready = self._ready, []
        if not (self._held or self._loose or self._served.steps):
            return out
        self._last = last = max([self._last, *self._ended])
        for step in sorted(self._held):
            ended = self._ended.get(step)
            is_lost = ended is None and step + LOST_STEPS <= last
            is_over = ended is not None and (last > step or now - ended.since >= self._settle)
            if final or is_over or is_lost:
                out.append(self._decide(step, ended))
        for rows in self._loose_due(now, final):
            step = int(rows["step"][0])
            if step == NO_STEP:
                out.append(Outgoing(NO_STEP, rows))
            else:
                self._served.add(step, rows)
        out += [Outgoing(*part, stepless=True) for part in self._served.due()]
        return out

    def _loose_due(self, now: float, final: bool) -> list[Column]:
        """Return what is in no step and has waited; all of it where it is more than may be held."""
        final = final or sum(len(rows) for _, rows in self._loose) > MAX_HELD
        due = [rows for at, rows in self._loose if final or now - at >= self._settle]
        self._loose = [] if final else [(at, rows) for at, rows in self._loose if now - at < self._settle]
        return due

    def _decide(self, step: int, ended: _Ended | None) -> Outgoing:
        if ended is not None:
            del self._ended[step]
        parts = self._held.pop(step)
        rows = parts[0] if len(parts) == 1 else stack_rows(parts)
        number = len(rows)
        self._count -= number
        slow = ended is not None and self._slow.is_slow(ended.extent[1] - ended.extent[0])
        is_within = step in self._window
        share = self._share(step)
        slow = slow or (share.full and not is_within and self._has_failed(rows))
        full = share.full and (slow or is_within)
        offloaded = self._offloaded.pop(step, 0)
        if offloaded and full:
            rows, offloaded = self._read_again(step), 0
            number = len(rows)
        rows = self._steps.within(step, rows, share.limit) if full else stages_of(rows)
        decided = self._decided
        decided[step] = (full, share.shard, share.limit - len(rows))
        if len(decided) > _REMEMBERED:
            del decided[next(iter(decided))]
        left_out = number + offloaded - len(rows)
        if ended is None:
            return Outgoing(step, rows, left_out, share.shard, stepless=True)
        return Outgoing(step, rows, left_out, share.shard, ended.extent, ended.seq, slow=slow)

    def _has_failed(self, rows: Column) -> bool:
        if self._failed == MOST_FAILED or not (rows["flags"] & _FAILED).any():
            return False
        self._failed += 1
        return True

    def _share(self, step: int) -> Share:
        b = self._bind
        return share_of(b.rank, b.world_size, b.servers, self._budget, step)

    def undecided_from(self) -> int:
        """Return the first step that is still held, NO_STEP if none is."""
        loose = (int(rows["step"][0]) for _, rows in self._loose)
        return min((*self._held, *self._ended, *self._served.steps, *loose), default=NO_STEP)

    def left_out(self, step: int) -> Column | None:
        """Return what *step* left out of what is within the budget, as `StepBudget.left_out` does."""
        return self._steps.left_out(step)

    @property
    def has_loose(self) -> bool:
        """Whether rows made outside any step are still held."""
        return any(rows["step"][0] == NO_STEP for _, rows in self._loose)


def stages_of(rows: Column) -> Column:
    """Return the steps and stages in *rows*."""
    return rows.compress(rows["level"] <= Level.STEP)


def ends_of(rows: Column, is_step: Column) -> Iterator[tuple[int, tuple[int, int], int]]:
    """Yield of each of *rows* that *is_step* its number, its extent (ns) and the WORLD group's seq at its start."""
    own = rows.compress(is_step)
    columns = (own[name].tolist() for name in ("step", "start", "end", "seq"))
    for step, start, end, seq in zip(*columns, strict=True):
        yield step, (start, end), seq


def by_step(rows: Column) -> Iterator[tuple[int, Column]]:
    """Yield each step in *rows*, in order, with its rows."""
    if not len(rows):
        return
    rows = rows.take(np.argsort(rows["step"], kind="stable"))
    steps = rows["step"]
    begins = [0, *((steps[1:] != steps[:-1]).nonzero()[0] + 1).tolist()]
    for step, begin, end in zip(steps[begins].tolist(), begins, [*begins[1:], len(rows)], strict=True):
        yield step, rows[begin:end]

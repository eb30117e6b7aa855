"""Which rank makes the others wait, and in which stage: excess_r = own_r - median of the others' own.

Own time is without waiting (`own`), so the victims of a straggler, whose steps are as long, do not stand
out. A stage of a rank is a candidate if its excess is over max(5 % of the median step, 1 ms) in more than half
of the steady steps that all ranks closed. Of ranks whose excess is about the same the one whose stage comes
earliest is to blame (a wait that nobody recorded shows later than its cause), else the one with the most.
The begins of the collectives, which are exact, must agree: the accused comes last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from otel_dltrace.analysis.breakdown import BETWEEN, RESIDUAL
from otel_dltrace.analysis.collectives import Joined
from otel_dltrace.analysis.frontier import FrontierStage, frontier
from otel_dltrace.analysis.own import columns, own, spent, steps_with_operations
from otel_dltrace.analysis.select import spell
from otel_dltrace.analysis.spread import median
from otel_dltrace.analysis.table import StepTable, common_steps
from otel_dltrace.analysis.waits import arrivals
from otel_dltrace.model.spans import Column

SHARE_OF_STEP = 0.05
LEAST = 1_000_000
SHARE_OF_STEPS = 0.5
ABOUT_THE_SAME = 0.75
MIN_STEPS = 5
Verdict = Literal["straggler", "none", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Straggler:
    """The rank that makes the others wait; medians in ns per step.

    *own* is its own time in *stage* ("" if no stage of its own stands out), *others* the median of the
    others', *excess* the median difference, over the threshold in *late* of the steps. It came last to
    the collectives in *last* of *arrivals* steps, *lateness* after the one before it.
    """

    rank: int
    stage: str
    own: int
    others: int
    excess: int
    late: int
    last: int
    arrivals: int
    lateness: int


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The verdict over *steps* steady steps that all ranks closed, and why there is none (*reason*).

    *threshold* is the ns by which a rank must exceed the others in more than *share* of the steps.
    """

    verdict: Verdict
    reason: str
    straggler: Straggler | None
    steps: int
    threshold: int
    share: float
    frontier: tuple[FrontierStage, ...]


@dataclass(frozen=True)
class _Evidence:
    """Arrays over R ranks, n steps and C columns; *last* (n,) is the index of the rank that came last, -1: nobody."""

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    own: Column
    others: Column
    threshold: int
    opaque: frozenset[int]
    last: Column
    margin: Column
    arrived: int

    @property
    def excess(self) -> Column:
        return self.own - self.others

    @property
    def late(self) -> Column:
        """In how many steps each rank's column is over the threshold, (R, C)."""
        steps: Column = (self.excess > self.threshold).sum(axis=1)
        return steps


def stragglers(
    tables: Sequence[StepTable],
    joined: Joined,
    warm_up: int = 0,
    expected: int = 1,
    drifted: Sequence[int] = (),
    violation: int = 0,
) -> Stragglers:
    """Return who makes the others wait, that nobody does, or why it cannot be told.

    Args:
        tables: One per rank.
        joined: The collectives, whose begins confirm or contradict.
        warm_up: Steps below it do not count.
        expected: The world's size.
        drifted: Ranks whose steps are numbered differently.
        violation: What the clocks of several hosts are known to be off by, ns.
    """
    steps = common_steps(tables)
    steps = steps[steps >= warm_up]
    cut = [t.at(steps) for t in tables]
    names = columns(tables[0].stages) if tables else ()
    times = np.stack([spent(t) for t in cut]) if cut else np.zeros((0, 0, 0))
    front = frontier(names, [t.rank for t in tables], times)
    durations = np.concatenate([t.duration for t in cut]) if cut else np.zeros(0)
    threshold = max(round(SHARE_OF_STEP * median(durations)), LEAST)
    why = _why_not(tables, steps, expected, drifted)
    if why:
        verdict, reason, found = "cannot tell", why, None
    else:
        verdict, reason, found = _judge(_evidence(tables, cut, steps, joined, threshold, violation))
    return Stragglers(verdict, reason, found, len(steps), threshold, SHARE_OF_STEPS, front)


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


def _why_not(tables: Sequence[StepTable], steps: Column, expected: int, drifted: Sequence[int]) -> str:
    present = [t.rank for t in tables if len(t.steps)]
    missing = sorted(set(range(expected)) - set(present))
    if not present:
        return "no rank recorded a step"
    if expected < 2 and len(present) < 2:
        return "the run has one rank, and nobody waits for it"
    if missing:
        return f"{len(missing)} of {expected} ranks recorded no step: {spell(missing)}"
    if drifted:
        return f"rank {spell(drifted)} numbers its steps differently from the others"
    if len(steps) < MIN_STEPS:
        return f"only {len(steps)} steady steps were closed by all ranks, and it takes {MIN_STEPS}"
    return ""


def _evidence(
    tables: Sequence[StepTable],
    cut: Sequence[StepTable],
    steps: Column,
    joined: Joined,
    threshold: int,
    violation: int,
) -> _Evidence:
    # Own times are found in the whole table, since blocked time before a step needs the step before.
    times = np.stack([own(t)[np.isin(t.steps, steps)] for t in tables]).astype(np.float64)
    names = columns(tables[0].stages)
    ranks = tuple(t.rank for t in tables)
    seen = min(steps_with_operations(t).mean() for t in cut)
    # Backward waits inside C++; where no operation was recorded that wait looks like computing.
    opaque = frozenset(i for i, name in enumerate(names) if name == "backward" and seen <= SHARE_OF_STEPS)
    last, margin, arrived = _last_to_come(joined, ranks, steps, violation)
    return _Evidence(ranks, names, times, others_median(times), threshold, opaque, last, margin, arrived)


def _last_to_come(joined: Joined, ranks: tuple[int, ...], steps: Column, violation: int) -> tuple[Column, Column, int]:
    """Return who came last in each step and by how much (its largest margin), and how many steps have collectives."""
    late = arrivals(joined, violation)
    row = np.searchsorted(steps, joined["step"])
    known = np.isin(joined["step"], steps)
    place = (np.searchsorted(ranks, joined["rank"][known]), row[known])
    sums, most = np.zeros((2, len(ranks), len(steps)), np.int64)
    np.add.at(sums, place, late[known])
    np.maximum.at(most, place, late[known])
    last = np.where(sums.max(axis=0) > 0, sums.argmax(axis=0), -1)
    return last, most[np.maximum(last, 0), np.arange(len(steps))], len(np.unique(row[known]))


def _judge(e: _Evidence) -> tuple[Verdict, str, Straggler | None]:
    accused, suspicion = _accused(e)
    others = np.bincount(e.last[e.last >= 0], minlength=len(e.ranks))
    latest = int(others.argmax())
    often = others[latest] > SHARE_OF_STEPS * e.arrived
    after = median(e.margin[e.last == latest])
    if accused is None:
        if e.arrived and often and after > e.threshold:
            return "straggler", "", _straggler(e, latest, -1)
        return ("cannot tell", suspicion, None) if suspicion else ("none", "", None)
    rank, column = accused
    if e.arrived and not (often and latest == rank):
        return "cannot tell", _contradiction(e, rank, column, int(others[rank])), None
    return "straggler", "", _straggler(e, rank, column)


def _accused(e: _Evidence) -> tuple[tuple[int, int] | None, str]:
    """Return (rank, column) that stands out, as indices; or why nothing can be said of what does."""
    often = e.late > SHARE_OF_STEPS * e.own.shape[1]
    excess = np.where(often, np.median(e.excess, axis=1), 0)
    hidden = [(r, c) for r, c in np.argwhere(often).tolist() if c in e.opaque]
    excess[:, list(e.opaque)] = 0
    scores = excess.sum(axis=1)
    if scores.max() <= 0:
        return None, _suspicion(e, hidden[0]) if hidden else ""
    best = np.flatnonzero(scores >= ABOUT_THE_SAME * scores.max())
    # The time between steps comes before a step, but what a rank waits for there began in the step before.
    when = [*range(1, len(e.names)), 0]
    rank = min(
        best.tolist(), key=lambda r: (min(when.index(c) for c in np.flatnonzero(excess[r]).tolist()), -scores[r])
    )
    return (rank, int(excess[rank].argmax())), ""


def _suspicion(e: _Evidence, at: tuple[int, int]) -> str:
    rank, column = at
    longer = np.median(e.excess[rank, :, column]) / 1e6
    return (
        f"rank {e.ranks[rank]}'s {e.names[column]} takes {longer:.1f} ms longer than the others', but without its "
        "operations (OTEL_DLTRACE_LEVEL=collective) waiting cannot be told from computing"
    )


def _contradiction(e: _Evidence, rank: int, column: int, last: int) -> str:
    longer = np.median(e.excess[rank, :, column]) / 1e6
    return (
        f"rank {e.ranks[rank]}'s {e.names[column]} takes {longer:.1f} ms longer than the others', but it came last "
        f"to the collectives in only {last} of {e.arrived} steps"
    )


def _straggler(e: _Evidence, rank: int, column: int) -> Straggler:
    own_time = others = excess = late = 0
    if column >= 0:
        own_time, others = median(e.own[rank, :, column]), median(e.others[rank, :, column])
        excess, late = median(e.excess[rank, :, column]), int(e.late[rank, column])
    mine = e.last == rank
    return Straggler(
        e.ranks[rank],
        e.names[column] if column >= 0 else "",
        own_time,
        others,
        excess,
        late,
        int(mine.sum()),
        e.arrived,
        median(e.margin[mine]),
    )

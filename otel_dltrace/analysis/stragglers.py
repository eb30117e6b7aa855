"""Which rank makes the others wait, and in which stage: excess_r = own_r - median of the others' own.

Own time is without waiting (`own`), so the victims of a straggler, whose steps are as long, do not stand
out. A stage of a rank is a candidate if its excess is over max(5 % of the median step, 1 ms) in more than half
of the steady steps that all ranks closed. Of ranks whose excess is about the same the one whose stage comes
earliest is to blame (a wait that nobody recorded shows later than its cause), else the one with the most.
The begins of the collectives, which are exact, must agree: the accused comes last, or nothing is said.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from otel_dltrace.analysis.collectives import Joined
from otel_dltrace.analysis.evidence import SHARE_OF_STEPS, Evidence, evidence
from otel_dltrace.analysis.frontier import FrontierStage, frontier
from otel_dltrace.analysis.own import columns, spent
from otel_dltrace.analysis.select import spell
from otel_dltrace.analysis.spread import median
from otel_dltrace.analysis.table import StepTable, common_steps
from otel_dltrace.model.spans import Column

SHARE_OF_STEP = 0.05
LEAST = 1_000_000
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


Judgement = tuple[Verdict, str, Straggler | None]


def stragglers(
    tables: Sequence[StepTable],
    joined: Joined,
    warm_up: int = 0,
    expected: int = 1,
    drifted: Sequence[int] = (),
) -> Stragglers:
    """Return who makes the others wait, that nobody does, or why it cannot be told.

    Args:
        tables: One per rank.
        joined: The collectives, whose begins confirm or contradict.
        warm_up: Steps below it do not count.
        expected: The world's size.
        drifted: Ranks whose steps are numbered differently.
    """
    steps = common_steps(tables)
    steps = steps[steps >= warm_up]
    durations = np.concatenate([t.duration[t.rows_of(steps)] for t in tables]) if tables else np.zeros(0)
    threshold = max(round(SHARE_OF_STEP * median(durations)), LEAST)
    why = _why_not(tables, steps, expected, drifted)
    verdict, reason, found = _cannot_tell(why) if why else _judge(evidence(tables, steps, joined, threshold))
    return Stragglers(verdict, reason, found, len(steps), threshold, SHARE_OF_STEPS, _frontier(tables, steps))


def _cannot_tell(reason: str) -> Judgement:
    return "cannot tell", reason, None


def _frontier(tables: Sequence[StepTable], steps: Column) -> tuple[FrontierStage, ...]:
    if not tables:
        return ()
    times = np.stack([spent(t)[t.rows_of(steps)] for t in tables])
    return frontier(columns(tables[0].stages), [t.rank for t in tables], times)


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


def _judge(e: Evidence) -> Judgement:
    times_last = np.bincount(e.last[e.last >= 0], minlength=len(e.ranks))
    latest = int(times_last.argmax())
    if times_last[latest] <= SHARE_OF_STEPS * e.arrived:
        latest = -1
    accused, suspicion = _accused(e, latest)
    if accused is None:
        if latest >= 0 and median(e.margin[e.last == latest]) > e.threshold:
            return "straggler", "", _straggler(e, latest, -1)
        return _cannot_tell(suspicion) if suspicion else ("none", "", None)
    rank, column = accused
    if e.arrived and latest != rank:
        return _cannot_tell(_contradiction(e, rank, column, int(times_last[rank])))
    return "straggler", "", _straggler(e, rank, column)


def _accused(e: Evidence, latest: int) -> tuple[tuple[int, int] | None, str]:
    """Return (rank, column) that stands out, as indices; or why nothing can be said of what does.

    The rank that usually comes last (*latest*, -1: none) is the first suspect.
    """
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
    first = {r: min(when.index(c) for c in np.flatnonzero(excess[r]).tolist()) for r in best.tolist()}
    rank = latest if latest >= 0 and scores[latest] > 0 else min(first, key=lambda r: (first[r], -scores[r]))
    return (rank, int(excess[rank].argmax())), ""


def _suspicion(e: Evidence, at: tuple[int, int]) -> str:
    rank, column = at
    longer = np.median(e.excess[rank, :, column]) / 1e6
    return (
        f"rank {e.ranks[rank]}'s {e.names[column]} takes {longer:.1f} ms longer than the others', but without its "
        "operations (OTEL_DLTRACE_LEVEL=collective) waiting cannot be told from computing"
    )


def _contradiction(e: Evidence, rank: int, column: int, last: int) -> str:
    longer = np.median(e.excess[rank, :, column]) / 1e6
    return (
        f"rank {e.ranks[rank]}'s {e.names[column]} takes {longer:.1f} ms longer than the others', but it came last "
        f"to the collectives in only {last} of {e.arrived} steps"
    )


def _straggler(e: Evidence, rank: int, column: int) -> Straggler:
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

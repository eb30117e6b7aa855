"""Which rank makes the others wait, and in which stage: excess_r = own_r - median of the others' own.

Own time is without waiting (`own`), so the victims of a straggler, whose steps are as long, do not stand
out. A stage of a rank is a candidate if its excess is over max(5 % of the median step, 1 ms) in more than half
of the steady steps that all ranks have done, by more than chance (`excess`). Which of the candidates
it is, `judgement` says.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from otel_dltrace.analysis.blame.evidence import evidence
from otel_dltrace.analysis.blame.excess import beyond_chance
from otel_dltrace.analysis.blame.frontier import FrontierStage, frontier
from otel_dltrace.analysis.blame.judgement import Judgement, Straggler, Verdict, cannot_tell, judge
from otel_dltrace.analysis.blame.marked import behind
from otel_dltrace.analysis.blame.stepless import SHARE_OF_TIME, last_comer
from otel_dltrace.analysis.collectives.aligned import telling
from otel_dltrace.analysis.collectives.joined import Joined
from otel_dltrace.analysis.select import gaps, spell, spell_stretches
from otel_dltrace.analysis.spread import median
from otel_dltrace.analysis.steps.own import columns, spent
from otel_dltrace.analysis.steps.table import StepTable, common_steps
from otel_dltrace.model.arrays import Column

SHARE_OF_STEP = 0.05
LEAST = 1_000_000
MIN_STEPS = 5
NO_STEPS = "no rank has done a step"


@dataclass(frozen=True, slots=True)
class Stragglers:
    """The verdict over *steps* steady steps that all ranks have done, and why there is none (*reason*).

    In a run without steps, *steps* is 0, and it is over the collectives.

    *found* are the stragglers, the worst one first: several only where each is known to come late. Where others are
    slow in its stage as well, each is compared with those that are not.
    *threshold* is the ns by which a rank must exceed the others in more than *share* of the steps. *longest* is the
    slowest rank's mean time from the end of one step to that of the next: what the exposed times of the *frontier* add
    up to, unless ranks are slow in different steps. By *uncertainty* (ns) hosts' clocks may put an arrival off.
    """

    verdict: Verdict
    reason: str
    found: tuple[Straggler, ...]
    steps: int
    threshold: int
    share: float
    frontier: tuple[FrontierStage, ...]
    longest: int
    uncertainty: int = 0


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
    threshold = excess_threshold(tables, steps)
    why = _why_not(tables, steps, expected, drifted)
    if why == NO_STEPS and len(joined):
        verdict, reason, found = _by_arrivals(tables, joined)
    else:
        verdict, reason, found = cannot_tell(why) if why else judge(evidence(tables, steps, joined, threshold))
        found = tuple(_with_phase(one, found, tables, steps) for one in found)
    share = beyond_chance(len(steps)) / max(len(steps), 1)
    times = _times(tables, steps)
    ahead = frontier(columns(tables[0].stages) if tables else (), [t.rank for t in tables], times)
    longest = round(float(times.sum(axis=2).mean(axis=1).max())) if times.size else 0
    unsure = round(median(telling(joined).uncertainty))
    return Stragglers(verdict, reason, found, len(steps), threshold, share, ahead, longest, unsure)


def _with_phase(one: Straggler, found: Sequence[Straggler], tables: Sequence[StepTable], steps: Column) -> Straggler:
    """Return *one* of those *found* with the program's own phase that is behind it, if any is."""
    slow = [other.rank for other in found if other.stage == one.stage]
    phase, of_phase = behind(tables, steps, one.rank, one.stage, one.excess, slow)
    return replace(one, phase=phase, of_phase=of_phase)


def _by_arrivals(tables: Sequence[StepTable], joined: Joined) -> Judgement:
    """Judge a run without steps by its collectives."""
    worst = last_comer(tables, joined)
    if worst is None:
        return cannot_tell(f"{NO_STEPS}, and no rank alone is known to cost the others {SHARE_OF_TIME:.0%} of the time")
    late = worst.last, worst.arrivals, worst.late.p50
    return "straggler", "", (Straggler(worst.rank, "", 0, 0, 0, 0, *late),)


def excess_threshold(tables: Sequence[StepTable], steps: Column) -> int:
    """Return the ns by which a rank must exceed the others in *steps*, to stand out."""
    durations = np.concatenate([t.duration[t.rows_of(steps)] for t in tables]) if tables else np.zeros(0)
    return max(round(SHARE_OF_STEP * median(durations)), LEAST)


def _times(tables: Sequence[StepTable], steps: Column) -> Column:
    """Return what each rank spent in each of *steps* on what, shape (ranks, steps, columns), ns."""
    return np.stack([spent(t)[t.rows_of(steps)] for t in tables]) if tables else np.zeros((0, 0, 0))


def _why_not(tables: Sequence[StepTable], steps: Column, expected: int, drifted: Sequence[int]) -> str:
    present = [t.rank for t in tables if len(t.steps)]
    if not present:
        missing = _missing([t.rank for t in tables], expected, "are not here") if tables else ""
        return f"{NO_STEPS}, and {missing}" if missing else NO_STEPS
    if expected < 2 and len(present) < 2:
        return "the run has one rank, and nobody waits for it" if present[0] >= 0 else "no rank is known"
    if missing := _missing(present, expected, "have no step in the part looked at"):
        return missing
    if drifted:
        return f"rank {spell(drifted)} numbers its steps differently from the others"
    if len(steps) < MIN_STEPS:
        steady = "steady step was" if len(steps) == 1 else "steady steps were"
        return f"only {len(steps)} {steady} done by all ranks, and this needs {MIN_STEPS}"
    return ""


def _missing(present: Collection[int], expected: int, what: str) -> str:
    """Return how many ranks are not *present*, *what* is to be said of them, and which they are; "" if all are."""
    missing = gaps(present, expected)
    num_missing = sum(last - first + 1 for first, last in missing)
    return f"{num_missing} of {expected} ranks {what}: {spell_stretches(missing)}" if missing else ""

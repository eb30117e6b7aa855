"""What speaks for and against each rank: its own time against the others', and who comes last to the collectives."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from otel_dltrace.analysis.blame.excess import beside_the_rest, others_median, steps_over
from otel_dltrace.analysis.collectives.aligned import is_aligned, telling
from otel_dltrace.analysis.collectives.clocks import clocks
from otel_dltrace.analysis.collectives.joined import Joined, lateness_unknown
from otel_dltrace.analysis.collectives.lateness import in_a_row, lateness, released
from otel_dltrace.analysis.steps.own import columns, comparable, mixed, own
from otel_dltrace.analysis.steps.table import StepTable
from otel_dltrace.analysis.steps.untold import SHARE_OF_STEPS, lacking, lacks_waits, untold
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.spans import SpanBatch


@dataclass(frozen=True)
class Evidence:
    """What is known of R ranks in n steps, by C columns (`columns`); times in ns.

    Attributes:
        ranks: The ranks.
        names: The columns' names.
        own: Each rank's own time, (R, n, C).
        others: The median of the other ranks' own time, (R, n, C).
        threshold: By how much a rank must exceed the others.
        opaque: The columns that may hold waits which were not recorded.
        lacking: What would have told these waits.
        blind: No operation was recorded at all, or not for how long ranks waited.
        summed: By how much a rank came later than the others to a step's collectives, all together, (R, n).
        most: The same, at most to one of them or to those `in_a_row`, (R, n).
        arrived: How many of the steps have collectives of which the clocks can tell who came late.
        all: Whether these are all that a rank takes part in, (R,): not if it has messages, or collectives without an
            id, to which nobody knows who came late.
        hosts: The numbers of the ranks' hosts, as far as their clocks matter, (R,).
        until: When each rank was done with each column, by its host's wall clock, (R, n, C).
        elsewhere: For how long a rank was in what nobody knows who came late to, (R, n).
        steps: The steps that are compared, (n,).
        joined: The collectives that may tell who came late.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    own: Column
    others: Column
    threshold: int
    opaque: frozenset[int]
    lacking: str
    blind: bool
    summed: Column
    most: Column
    arrived: int
    all: tuple[bool, ...]
    hosts: tuple[int, ...]
    until: Column
    elsewhere: Column
    steps: Column
    joined: Joined

    @property
    def excess(self) -> Column:
        """By how much each rank's own time exceeds the others', (R, n, C)."""
        excess: Column = self.own - self.others
        return excess

    @property
    def late(self) -> Column:
        """In how many steps each rank's column is over the threshold, (R, C)."""
        return steps_over(self.excess, self.threshold)

    @property
    def released(self) -> Column:
        """By how much later than the others each rank was done with the collective before its latest, (R, n)."""
        return released(self.joined, self.ranks, self.steps)

    @property
    def told(self) -> Column:
        """Mask (R,) of the ranks of which collectives tell whether they come late: not a few beside many messages."""
        in_most = self.arrived > SHARE_OF_STEPS * self.own.shape[1]
        told: Column = (np.array(self.all) | in_most) & (self.arrived > 0)
        return told

    @property
    def came_late(self) -> Column:
        """Mask of the steps to whose collectives each rank came late, (R, n).

        Half the threshold will do, as this only confirms; noise that comes late to some and early to
        others cancels in the sum.
        """
        limit = self.threshold / 2
        late: Column = (self.summed > limit) & (self.most > limit)
        return late


def evidence(tables: Sequence[StepTable], steps: Column, joined: Joined, threshold: int) -> Evidence:
    """Return what the *steps* that all ranks of *tables* closed say, at a *threshold* in ns."""
    joined = telling(joined)
    # Own times are found in the whole table, since blocked time before a step needs the step before.
    untimed = mixed(tables, steps)
    times = comparable(np.stack([own(t)[t.rows_of(steps)] for t in tables]).astype(np.float64), untimed)
    names = columns(tables[0].stages)
    ranks = tuple(t.rank for t in tables)
    # A wait for the others that nobody recorded looks like computing.
    hidden = [untold(t, steps) for t in tables]
    on_any: frozenset[str] = frozenset().union(*hidden)
    opaque = frozenset(i for i, name in enumerate(names) if name in on_any)
    why = next((lacking(t, steps) for t, stages in zip(tables, hidden, strict=True) if stages), "")
    untold_of_devices = frozenset(np.flatnonzero(untimed.sum(axis=0) > SHARE_OF_STEPS * len(steps)).tolist())
    if untold_of_devices:
        why = why or "the times of all ranks' devices"
    none_seen = not any(t.batch.is_kind(s.COLLECTIVE, s.P2P).any() for t in tables)
    summed, most, arrived = _lateness_per_step(joined, ranks, steps, threshold)
    line = clocks([t.batch for t in tables])
    return Evidence(
        ranks=ranks,
        names=names,
        own=times,
        others=others_median(times),
        threshold=threshold,
        opaque=opaque | untold_of_devices,
        lacking=why,
        blind=none_seen or any(map(lacks_waits, tables)),
        summed=summed,
        most=most,
        arrived=arrived,
        all=tuple(not _waits_elsewhere(t.batch, steps) for t in tables),
        hosts=(0,) * len(tables) if is_aligned(joined).all() else line.hosts,
        until=np.stack([_until(t)[t.rows_of(steps)] + offset for t, offset in zip(tables, line.offsets, strict=True)]),
        elsewhere=np.stack([elsewhere(t.batch, steps) for t in tables]),
        steps=steps,
        joined=joined,
    )


def beside_who_waits(e: Evidence, longer: Column, slow: Sequence[int]) -> Evidence:
    """Return *e* with those that are *longer* in a column, mask (R, C), beside those that are not.

    So are those in the places *slow*, of several, told to come late: beside the ranks that wait for them.
    """
    e = replace(e, others=beside_the_rest(e.own, longer))
    if len(slow) < 2:
        return e
    ranks = [e.ranks[place] for place in slow]
    summed, most, arrived = _lateness_per_step(e.joined, e.ranks, e.steps, e.threshold, ranks)
    return replace(e, summed=summed, most=most, arrived=arrived)


def most_by_any_clock(e: Evidence) -> Column:
    """Return *most* of *e*, (R, n), as if hosts' clocks were right: how ranks of one host differ in it is certain."""
    read = replace(e.joined, uncertainty=np.zeros_like(e.joined.uncertainty))
    return _lateness_per_step(read, e.ranks, e.steps, e.threshold)[1]


def _until(t: StepTable) -> Column:
    """Return when the rank was done with each column, (n, S + 2): it begins the step after what is between steps.

    With a stage that it does not have it is done as soon as with those before.
    """
    before = np.maximum.accumulate(np.column_stack((t.start, t.last)), axis=1)[:, 1:]
    return np.column_stack((t.start, np.where(t.pieces > 0, t.last, before), t.end))


def _waits_elsewhere(batch: SpanBatch, steps: Column) -> bool:
    """Return whether a rank communicates in most of *steps* where nobody knows who came late.

    So it is in messages, and in collectives without an id, as where two DDP models share a backward.
    """
    untold_in = batch["step"][lateness_unknown(batch)]
    return len(np.intersect1d(untold_in, steps)) > SHARE_OF_STEPS * len(steps)


def elsewhere(batch: SpanBatch, steps: Column) -> Column:
    """Return for how many ns a rank communicates in each of *steps* where nobody knows who came late."""
    rows = batch.rows[lateness_unknown(batch) & np.isin(batch["step"], steps)]
    time = np.zeros(len(steps), np.int64)
    np.add.at(time, np.searchsorted(steps, rows["step"]), rows["end"] - rows["start"])
    return time


def _lateness_per_step(
    joined: Joined, ranks: tuple[int, ...], steps: Column, threshold: int, slow: Sequence[int] = ()
) -> tuple[Column, Column, int]:
    late = lateness(joined, slow)
    # One in which the clocks would hide a rank that came late says nothing.
    tells = (joined.uncertainty <= threshold / 2) | (joined.reduce(np.maximum, np.abs(late)) > 0)
    # Nor does a step in which a large one may hide what a small one behind it, for which all are there, cannot show.
    hidden = np.setdiff1d(joined["step"][~joined.to_rows(tells)], joined["step"][late != 0])
    known = np.isin(joined["step"], np.setdiff1d(steps, hidden)) & joined.to_rows(tells)
    late = late[known]
    row = np.searchsorted(steps, joined["step"][known])
    place = (np.searchsorted(ranks, joined["rank"][known]), row)
    summed, most = np.zeros((2, len(ranks), len(steps)))
    np.add.at(summed, place, late)
    np.maximum.at(most, place, late)
    together = in_a_row(joined, joined.reduce(np.logical_and, known))
    place = np.searchsorted(ranks, together["rank"]), np.searchsorted(steps, together["step"])
    np.maximum.at(most, place, lateness(together, slow))
    return summed, most, len(np.unique(row))

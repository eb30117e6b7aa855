"""Whether all ranks mean the same by "step n": the WORLD group's seq at its begin must agree (contract 4)."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from otel_dltrace.analysis.steps.table import StepTable


@dataclass(frozen=True, slots=True)
class DriftedRank:
    """A rank whose steps are numbered differently: before *step* its last collective was *seq*, the others' *expected*.

    *steps_apart* is what to add to its ordinals from there on to get the others', None where no shift fits.
    """

    rank: int
    step: int
    seq: int
    expected: int
    steps_apart: int | None


@dataclass(frozen=True, slots=True)
class Drift:
    """What was found in *compared* steps; *reference* is the rank whose numbering most ranks share (the lowest)."""

    compared: int
    reference: int
    ranks: tuple[DriftedRank, ...]


def drift(tables: Sequence[StepTable]) -> Drift:
    """Return the ranks whose ordinals disagree; a step whose seq is not known (0) is not compared."""
    known: dict[int, dict[int, int]] = {}
    for t in tables:
        told = t.seq > 0
        if told.any():
            known[t.rank] = dict(zip(t.steps[told].tolist(), t.seq[told].tolist(), strict=True))
    if len(known) < 2:
        return Drift(0, -1, ())
    reference = _reference(known)
    compared = {step for rank, seqs in known.items() if rank != reference for step in seqs.keys() & known[reference]}
    found = [_compare(rank, seqs, known[reference]) for rank, seqs in known.items() if rank != reference]
    return Drift(len(compared), reference, tuple(rank for rank in found if rank is not None))


def _reference(known: dict[int, dict[int, int]]) -> int:
    """Return the lowest rank that agrees with most others in the last step they all have (the lowest of equals)."""
    shared = set.intersection(*(set(seqs) for seqs in known.values()))
    if not shared:
        return min(known)
    at = max(shared)
    votes = Counter(seqs[at] for seqs in known.values())
    most = max(votes.values())
    return min(rank for rank, seqs in known.items() if votes[seqs[at]] == most)


def _compare(rank: int, seqs: dict[int, int], reference: dict[int, int]) -> DriftedRank | None:
    apart = sorted(step for step in seqs.keys() & reference.keys() if seqs[step] != reference[step])
    if not apart:
        return None
    first = apart[0]
    shift = _shift(seqs, reference, first)
    # One that fetched a batch more has begun a step before the last collective of an epoch, and not another step.
    return None if shift == 0 else DriftedRank(rank, first, seqs[first], reference[first], shift)


def _shift(seqs: dict[int, int], reference: dict[int, int], first: int) -> int | None:
    """Return the shift of ordinals that makes all seqs from step *first* agree."""
    at = {seq: step for step, seq in reference.items()}
    shifts = {at[seq] - step for step, seq in seqs.items() if step >= first and seq in at}
    return shifts.pop() if len(shifts) == 1 else None

"""Where ranks stand, or stood when they were cut off, in plain words."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from otel_dltrace.analysis.select import spell
from otel_dltrace.analysis.stops.left_open import Elsewhere, LeftOpen, Standing
from otel_dltrace.report.words import plain

_MOST = 6


def left_open(found: LeftOpen) -> list[str]:
    """Return a sentence for the ranks that are, or were, at one place."""
    sentences = [_standing(one, more) for one, more in _alike(found.standing)] + [*map(_elsewhere, found.elsewhere)]
    more = len(sentences) - _MOST
    were = "places were" if more > 1 else "place was"
    return [*sentences[:_MOST], f"{more} more {were} left open: --json has all."] if more > 0 else sentences


def _alike(standing: Sequence[Standing]) -> Iterator[tuple[Standing, int]]:
    """Yield what is told in a sentence, with how many more are: as many may be under way as a model has tensors."""
    found: dict[Standing, list[Standing]] = {}
    for one in standing:
        apart = replace(one, tensor="", number=0, lasts=None if one.lasts is None else 0)
        found.setdefault(apart if one.is_asynchronous else one, []).append(one)
    for alike in found.values():
        longest = max((one.lasts for one in alike if one.lasts is not None), default=None)
        yield replace(alike[0], lasts=longest), len(alike) - 1


def _standing(one: Standing, more: int) -> str:
    named = " ".join(dict.fromkeys(filter(None, (plain(one.operation), plain(one.tensor)))))
    where = " ".join(filter(None, (one.backend, one.group)))
    facts = [f"number {one.number}"] * (one.number > 0) + [f"of {plain(where)}"] * bool(where)
    told = f" ({', '.join(facts)})" if facts else ""
    peer = f" with rank {one.peer}" if one.peer >= 0 else ""
    it = "them" if more else "it"
    others = [f"{_have(one.absent, one.lasts)} not come to {it}"] * bool(one.absent)
    others += [f"{_have(one.past, one.lasts)} ended {it}"] * bool(one.past)
    rest = f"; {', '.join(others)}" if others else ""
    what = f"{named}{peer}{told}" + f" and {more:,} more" * bool(more)
    if one.is_asynchronous:  # who waits for it is not known, and it may be over
        return f"{_when(one.lasts)} {_have(one.ranks, one.lasts)} {what} under way{rest}."
    return f"{_when(one.lasts)} {_stand(one.ranks, one.lasts)} in {what}{rest}."


def _elsewhere(one: Elsewhere) -> str:
    step = "no step" if one.step is None else f"step {one.step}"
    after = f"; what ended last was {plain(one.last)}" if one.last else ""
    return f"{_when(one.lasts)} {_stand(one.ranks, one.lasts)} in {step}{after}."


def _when(lasts: int | None) -> str:
    return "When cut off," if lasts is None else f"For {lasts / 1e9:,.0f} s now" if lasts else "Now"


def _have(ranks: Sequence[int], lasts: int | None) -> str:
    return f"{_ranks(ranks)} {'had' if lasts is None else 'have' if len(ranks) > 1 else 'has'}"


def _stand(ranks: Sequence[int], lasts: int | None) -> str:
    return f"{_ranks(ranks)} {'stood' if lasts is None else 'stand' if len(ranks) > 1 else 'stands'}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {spell(ranks)}"

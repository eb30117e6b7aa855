"""Where ranks stand, or stood when they were cut off, in plain words."""

from collections.abc import Sequence

from otel_dltrace.analysis.left_open import Elsewhere, LeftOpen, Standing
from otel_dltrace.analysis.select import spell
from otel_dltrace.report.words import plain

_MOST = 6


def left_open(found: LeftOpen) -> list[str]:
    """Return a sentence for the ranks that are, or were, at one place."""
    sentences = [*map(_standing, found.standing), *map(_elsewhere, found.elsewhere)]
    more = len(sentences) - _MOST
    return [*sentences[:_MOST], f"{more} more places were left open: --json has all."] if more > 0 else sentences


def _standing(one: Standing) -> str:
    named = " ".join(dict.fromkeys(filter(None, (plain(one.operation), plain(one.tensor)))))
    where = " ".join(filter(None, (one.backend, one.group)))
    facts = [f"number {one.number}"] * (one.number > 0) + [f"of {plain(where)}"] * bool(where)
    told = f" ({', '.join(facts)})" if facts else ""
    peer = f" with rank {one.peer}" if one.peer >= 0 else ""
    others = [f"{_have(one.absent, one.lasts)} not come to it"] * bool(one.absent)
    others += [f"{_have(one.past, one.lasts)} ended it"] * bool(one.past)
    rest = f"; {', '.join(others)}" if others else ""
    what = f"{named}{peer}{told}"
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

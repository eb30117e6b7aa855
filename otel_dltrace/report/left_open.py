"""Where ranks stand, or stood when they were cut off, in plain words."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from otel_dltrace.analysis.select import spell
from otel_dltrace.analysis.stops.left_open import Elsewhere, LeftOpen, Standing
from otel_dltrace.report.words import short

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
    what = " ".join(dict.fromkeys(filter(None, (short(one.operation), short(one.tensor)))))
    if one.peer >= 0:
        what += f" with rank {one.peer}"
    what += _facts(one)
    if more:
        what += f" and {more:,} more"
    it = "them" if more else "it"
    others = []
    if one.absent:
        others.append(f"{_have(one.absent, one.lasts)} not come to {it}")
    if one.past:
        others.append(f"{_have(one.past, one.lasts)} ended {it}")
    rest = f"; {', '.join(others)}" if others else ""
    if one.is_asynchronous:  # who waits for it is not known, and it may be over
        return f"{_has_under_way(one.ranks, one.lasts, what)}{rest}."
    return f"{_is_in(one.ranks, one.lasts, what)}{rest}."


def _facts(one: Standing) -> str:
    facts = [f"number {one.number}"] if one.number > 0 else []
    where = " ".join(filter(None, (one.backend, one.group)))
    if where:
        facts.append(f"of {short(where)}")
    return f" ({', '.join(facts)})" if facts else ""


def _elsewhere(one: Elsewhere) -> str:
    step = "no step" if one.step is None else f"step {one.step}"
    after = f"; what ended last was {short(one.last)}" if one.last else ""
    return f"{_is_in(one.ranks, one.lasts, step)}{after}."


def _is_in(ranks: Sequence[int], lasts: int | None, what: str) -> str:
    many, who = len(ranks) > 1, _who(ranks)
    if lasts is None:
        return f"When cut off, {who} {'were' if many else 'was'} in {what}"
    if not lasts:
        return f"{who.capitalize()} {'are' if many else 'is'} in {what} now"
    return f"{who.capitalize()} {'have' if many else 'has'} been in {what} for {_seconds(lasts)}"


def _has_under_way(ranks: Sequence[int], lasts: int | None, what: str) -> str:
    if lasts is None:
        return f"When cut off, {_who(ranks)} had {what} under way"
    have = f"{_who(ranks).capitalize()} {'have' if len(ranks) > 1 else 'has'}"
    return f"{have} had {what} under way for {_seconds(lasts)}" if lasts else f"{have} {what} under way now"


def _have(ranks: Sequence[int], lasts: int | None) -> str:
    """Return what *ranks* have done, or had before they were cut off."""
    return f"{_who(ranks)} {'had' if lasts is None else 'have' if len(ranks) > 1 else 'has'}"


def _who(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {spell(ranks)}"


def _seconds(ns: int) -> str:
    return f"{ns / 1e9:,.0f} s"

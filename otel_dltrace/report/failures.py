"""The errors of a run in plain words, the first one first."""

from collections.abc import Sequence

from otel_dltrace.analysis.select import spell
from otel_dltrace.analysis.stops.failures import WORKER, Failure, Failures, Missing
from otel_dltrace.model.semconv import RANK_STEP
from otel_dltrace.report.words import ms, plain, short

_MOST = 4
_S = 1_000_000_000


def failures(f: Failures) -> list[str]:
    """Return a sentence for each error."""
    sentences = [_sentence(one, _later(one, f.uncertainty) if i else "") for i, one in enumerate(f.found)]
    more = len(sentences) - _MOST
    told = [*sentences[:_MOST], f"{more} more error{'s' * (more > 1)}: --json has all."] if more > 0 else sentences
    return [*told, *(_gone(one, f.found[0].step) for one in f.missing)]


def _gone(one: Missing, step: int | None) -> str:
    whose = _members(WORKER, one.ranks)
    after = "that" if one.last is None else f"step {one.last}"
    never = "" if step is None else f"never began step {step} and "
    return (
        f"{whose[0].upper()}{whose[1:]} {never}recorded nothing after {after}, and no error: ended or killed by then, "
        "perhaps."
    )


def _later(one: Failure, uncertainty: int) -> str:
    if one.other_host and one.after <= uncertainty:
        return ", at about the same time"
    return f", {one.after / _S:,.1f} s later" if one.after >= _S else f", {ms(one.after)} ms later"


def _sentence(one: Failure, later: str) -> str:
    is_known = len(one.ranks) > 1 and not one.vague
    before = f", {_members(one.role, [one.first])} before the others" if is_known else ""
    message = f": {plain(one.message)}" if one.message else ""
    had = "had" if later else f"had the first error{before}:"
    said = f"{_members(one.role, one.ranks)} {had} {plain(one.kind) or 'an error'}{message} ({_where(one)}){later}."
    return said[0].upper() + said[1:]


def _members(role: str, ranks: Sequence[int]) -> str:
    if [*ranks] == [-1]:
        return "a process without a rank"
    name = "rank" if role == WORKER else plain(role)
    return f"{name}{'s' * (len(ranks) > 1)} {spell(ranks)}"


def _where(one: Failure) -> str:
    step = "outside any step" if one.step is None else f"of step {one.step}"
    where = f"in step {one.step}" if one.operation == RANK_STEP else f"in {short(one.operation)} {step}"
    return f"{where}, {one.count:,} times in all" if one.count > len(one.ranks) else where

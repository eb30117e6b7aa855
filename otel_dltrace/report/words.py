"""Findings in plain words, and numbers as people read them."""

from otel_dltrace.analysis.blame.frontier import FrontierStage
from otel_dltrace.analysis.blame.judgement import Straggler
from otel_dltrace.analysis.blame.stragglers import Stragglers
from otel_dltrace.analysis.compose import Guards
from otel_dltrace.analysis.select import gaps, spell, spell_stretches
from otel_dltrace.analysis.steps.drift import Drift
from otel_dltrace.analysis.steps.table import BETWEEN, RESIDUAL
from otel_dltrace.model.summary import losses

_SUBJECTS = {BETWEEN: "the time between its steps is", RESIDUAL: "the part of its step outside any stage takes"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_KIB = 1024
_MANY = 100
_LONGEST_NAME = 160
_PARTS = 10
"""An uncertainty of less than one part in so many of a time is not told."""
_MOST_DAMAGE = 3
_MOST_NAMED = 8
_NO_STEPS = "No rank recorded a step: `otel_dltrace.step()` marks them, and the report then says where their time goes."
_MARK_THEM = "Have the program mark its steps with `otel_dltrace.step()`, at the same place on all ranks."
_IN_TURN = 1.2
"""Above so many times the slowest rank's mean the sum of the exposed times is told: noise alone makes less."""


def ms(ns: int) -> str:
    """Return a time in ms, with three digits or so."""
    return f"{ns / 1e6:,.2f}" if ns < 10_000_000 else f"{ns / 1e6:,.1f}"


def rate(per_second: float) -> str:
    """Return a number per second, with three digits or more; a large model's steps take minutes."""
    if 0 < per_second < 1:
        return f"{per_second:#.3g}"  # with its zeros: 0.50 says less than 0.500
    return f"{per_second:,.2f}" if round(per_second, 2) < _MANY else f"{per_second:,.1f}"


def size(count: int) -> str:
    """Return a number of bytes in the unit that keeps it short."""
    value, unit = float(count), 0
    while round(value, 1) >= _KIB and unit < len(_UNITS) - 1:
        value, unit = value / _KIB, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def plain(text: str) -> str:
    """Return *text*, which programs and servers chose, without what a terminal would act on."""
    return "".join(c if c.isprintable() else "?" for c in text)


def short(name: str) -> str:
    """Return *name*, of a tensor, a phase or an operation, as `plain` has it; a long one without its middle."""
    half = _LONGEST_NAME // 2
    return plain(name if len(name) <= _LONGEST_NAME else f"{name[:half]}...{name[-half:]}")


def verdict(s: Stragglers) -> list[str]:
    """Return the answer to "who makes the others wait", one sentence each, the main one first."""
    if s.verdict == "cannot tell":
        return [f"Cannot tell who makes the others wait: {plain(s.reason)}."]
    if s.verdict == "none":
        margin = f"by {ms(s.threshold)} ms in any stage in more than {s.share:.0%} of {s.steps} steps"
        return [f"No rank makes the others wait in most steps: none exceeds them {margin}."]
    first, *others = s.found
    if not s.steps:
        last = f"it comes last to {first.late} of {first.arrivals} collectives, by {ms(first.lateness)} ms"
        return [f"Rank {first.rank} makes the others wait: {last} (p50).", _NO_STEPS]
    sentences = [f"Rank {first.rank} makes the others wait: {_cause(first, s.steps, s.uncertainty)}."]
    if first.stage:
        sentences.append(_confirmation(first, s.uncertainty))
    sentences += [f"So does rank {o.rank}: {_cause(o, s.steps, s.uncertainty)}." for o in others[: _MOST_NAMED - 1]]
    more = [other.rank for other in others[_MOST_NAMED - 1 :]]
    do = "do ranks" if len(more) > 1 else "does rank"
    return [*sentences, f"So {do} {spell(more)}: --json has their figures."] if more else sentences


def _cause(s: Straggler, steps: int, unsure: int) -> str:
    if not s.stage:
        return f"{_arrival(s, unsure)}, though no stage of its own stands out"
    subject = _SUBJECTS.get(s.stage, f"its {short(s.stage)} takes")
    phase = f", {ms(s.of_phase)} ms of it in its phase {short(s.phase)}" if s.phase else ""
    return f"{subject} {ms(s.own)} ms, {ms(s.excess)} ms longer than the others' (in {s.slow} of {steps} steps){phase}"


def _confirmation(s: Straggler, unsure: int) -> str:
    if not s.arrivals:
        return "Nothing confirms it: no collective shows who came late."
    if 2 * s.late <= s.arrivals:
        seldom = f"it comes late to the collectives in {s.late} of {s.arrivals} steps"
        return f"Nothing confirms it: {seldom}, and its other communication does not tell."
    return f"The begins of the collectives confirm it: {_arrival(s, unsure)}."


def _arrival(s: Straggler, unsure: int) -> str:
    within = f", give or take {ms(unsure)} ms of the hosts' clocks" if _PARTS * unsure > s.lateness else ""
    steps = f"in {s.late} of {s.arrivals} steps"
    return f"it comes to the collectives {ms(s.lateness)} ms after the others{within} ({steps})"


def where_the_step_goes(s: Stragglers) -> str:
    """Return the exposed times in one sentence, the longest first; "" where there are none."""
    longest = sorted((stage for stage in s.frontier if stage.exposed > 0), key=lambda stage: -stage.exposed)
    if not longest:
        return ""
    parts = [f"{_where(stage)} {ms(stage.exposed)} ({_leader(stage)})" for stage in longest]
    sentence = f"Where the slowest rank's step goes, waiting included, ms and who leads: {', '.join(parts)}."
    together = sum(stage.exposed for stage in longest)
    if together <= _IN_TURN * s.longest:
        return sentence
    most = ms(s.longest)
    return f"{sentence} That is {ms(together)} ms, and no rank takes more than {most}: as when they are slow in turn."


def _where(stage: FrontierStage) -> str:
    # Not "residual": what is blocked in communication there is in it, and in the tables it is not.
    return "outside any stage" if stage.name == RESIDUAL else short(stage.name)


def _leader(stage: FrontierStage) -> str:
    return "no rank alone" if stage.ambiguous else f"rank {stage.leader}"


def drift(d: Drift) -> list[str]:
    """Return one sentence for each rank whose steps are numbered differently, and what mends it."""
    sentences = []
    for rank in d.ranks:
        apart = "" if rank.steps_apart is None else f"; its numbers are {abs(rank.steps_apart)} apart from there on"
        sentences.append(
            f"Rank {rank.rank} numbers its steps differently: before step {rank.step} its last collective was number "
            f"{rank.seq}, rank {d.reference}'s number {rank.expected}{apart}."
        )
    return [*sentences, _MARK_THEM] if sentences else []


def rests_on(g: Guards) -> str:
    """Return what the figures rest on, without which none should be read."""
    none = "none lost" if g.is_over and not g.damage else "none known to be lost"
    missing = f", missing {spell_stretches(gaps(g.ranks, g.expected))}" if g.missing else ""
    parts = [
        f"ranks {spell(g.ranks) or 'none'} of {g.expected}{missing}",
        f"steps {g.steps[0]}-{g.steps[1]}, {g.common_steps} done by all ranks" if g.steps else "no steps",
        f"{g.spans:,} spans, {g.truncated:,} of them left open",
        plain(", ".join(losses(dict(g.lost)))) or none,
        g.clock if g.hosts < 2 else f"{g.clock} ({g.hosts}, read to +-{g.uncertainty / 1e3:,.1f} us{_seen_apart(g)})",
    ]
    if g.unused:
        parts.append(f"{g.unused} more processes with steps of the same ranks not shown")
    if not g.is_over:
        cure = "`otel-dltrace recover RUN` finishes the work of one that is gone"
        parts.append(f"more may come: a drain has not ended ({cure})")
    if g.damage:
        more = f" and {len(g.damage) - _MOST_DAMAGE} more" * (len(g.damage) > _MOST_DAMAGE)
        parts.append(f"without what cannot be read: {', '.join(map(plain, g.damage[:_MOST_DAMAGE]))}{more}")
    return f"Rests on: {'; '.join(parts)}. {_clocks_of_times(g)}"


def _seen_apart(g: Guards) -> str:
    return f", and {ms(g.apart)} ms apart, as the ends of collectives show" if g.apart else ""


def _clocks_of_times(g: Guards) -> str:
    if not g.device:
        return "All times are host times."
    tied = f", tied to the host's clock to within {g.device_residual / 1e3:,.1f} us" if g.device_residual else ""
    return f"The times of {g.device:,} spans are their device's{tied}; all others are host times."

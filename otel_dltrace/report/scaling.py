"""How a job scales, for people: in words, then as tables with the ranks as the axis, then what each column means."""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from otel_dltrace.analysis.negotiation.shares import FIRST_EPOCH
from otel_dltrace.analysis.scaling import RANK_STEPS, WARM_UP, Part, RunScaling, Scaling
from otel_dltrace.report.tables import new_table, section, show
from otel_dltrace.report.words import ms, plain, rate

WORTH_A_WORD = 2.0
"""The steps apart are named if one takes so many times a later one."""
_DEFINITIONS = (
    "step: that of the slowest rank; steps/s: of the slowest rank, the time between steps included; "
    "samples/s: of all ranks together, where all record their batch sizes",
    "speed-up: {rate} of the run, by that of the run with the fewest ranks; "
    "efficiency, of more ranks than that: speed-up by how many times the ranks",
    "communication: the part of the ranks' time in which any operation is under way, computation beside it or not; "
    "exposed: the part in which a rank is blocked by it",
    "negotiation: its share of communication: as Horovod's timeline records it, without one the wait for the last rank",
)
_RANK_STEPS = (
    "not every run records all its samples, so each rank's step counts as one: "
    "fair where a rank's batch is always the same size"
)


def write_scaling(found: Scaling, console: Console, fold: int | None = None) -> None:
    """Write *found* to *console*, sentences in lines of *fold* characters if it is given."""
    show(parts(found), console, fold)


def parts(found: Scaling) -> list[RenderableType]:
    """Return what is shown, in order."""
    out: list[RenderableType] = [Text(sentence) for sentence in sentences(found)]
    out += _steady(found)
    if any(run.first for run in found.runs):
        out += _first(found.runs)
    definitions = [line.format(rate=found.rate) for line in _DEFINITIONS]
    out += [Text(f"\n{definitions[0]}", style="dim"), *(Text(line, style="dim") for line in definitions[1:])]
    if found.rate == RANK_STEPS:
        out.append(Text(_RANK_STEPS, style="dim"))
    return out


def sentences(found: Scaling) -> list[str]:
    """Return how well the largest run scales, and which runs begin so slowly that it would hide that."""
    base, largest = found.runs[0], found.runs[-1]
    out = []
    if largest.ranks > base.ranks and largest.speed_up is not None:
        out.append(
            f"{largest.ranks} ranks do {largest.speed_up:.2f} times the work of {base.ranks}: "
            f"a parallel efficiency of {_percent(largest.efficiency)}, {_apart(found.runs)} apart."
        )
    ranks = [run.ranks for run in found.runs]
    begins = (_slow_begin(run, ranks.count(run.ranks) == 1) for run in found.runs)
    return [*out, *filter(None, begins)]


def _slow_begin(run: RunScaling, is_only: bool) -> str:
    if run.first is None or not run.first.steps or not run.steady.step.mean:
        return ""
    times = run.first.step.mean / run.steady.step.mean
    if times < WORTH_A_WORD:
        return ""
    which = "a step of the first epoch" if run.apart == FIRST_EPOCH else "one of the first steps"
    on = f"{run.ranks} rank{'s' * (run.ranks != 1)}" + ("" if is_only else f" ({plain(run.title)})")
    return f"On {on} {which} takes {times:,.1f} times a later one: do not measure scaling by it."


def _steady(found: Scaling) -> list[RenderableType]:
    table = new_table(
        ["run"],
        ["ranks", "steps", "step p50\nms", "steps/s", "samples/s", "speed-up", "efficiency", *_SHARES],
    )
    for run in found.runs:
        part = run.steady
        samples = "" if part.samples_per_second is None else rate(part.samples_per_second)
        speed_up = "" if run.speed_up is None else f"{run.speed_up:.2f}"
        rates = (rate(part.steps_per_second), samples, speed_up, _percent(run.efficiency))
        table.add_row(Text(plain(run.title)), *_begin(run, part), *rates, *_shares(part))
    told = [
        f"of {plain(run.title)} {run.told} of {run.ranks} ranks record their steps"
        for run in found.runs
        if run.told < run.ranks
    ]
    return section(f"Scaling, without {_apart(found.runs)}", table, *told)


def _apart(runs: Sequence[RunScaling]) -> str:
    names = {run.apart for run in runs}
    return names.pop() if len(names) == 1 else f"{WARM_UP} ({FIRST_EPOCH} where it is known)"


_SHARES = ("communi-\ncation", "exposed", "negotiation")


def _first(runs: Sequence[RunScaling]) -> list[RenderableType]:
    table = new_table(["run"], ["ranks", "steps", "step p50\nms", "step max\nms", *_SHARES])
    for run in runs:
        if run.first is not None:
            shares = _shares(run.first)
            table.add_row(Text(plain(run.title)), *_begin(run, run.first), ms(run.first.step.max), *shares)
    return section(f"Apart: {_apart(runs)}", table)


def _begin(run: RunScaling, part: Part) -> list[str]:
    return [str(run.ranks), f"{part.steps:,}", ms(part.step.p50)]


def _shares(part: Part) -> list[str]:
    return [_percent(part.communication), _percent(part.exposed), _percent(part.negotiation)]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.0%}"

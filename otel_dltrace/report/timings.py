"""The timings for people: each part of a step, on each rank."""

from collections.abc import Sequence

from rich.console import RenderableType
from rich.text import Text

from otel_dltrace.analysis.steps.throughput import Rates
from otel_dltrace.analysis.steps.timings import GRAD_SYNC, TRAIN_BATCH, StageTimings, Timing, Timings
from otel_dltrace.report.tables import new_table, section
from otel_dltrace.report.words import ms, rate, short

MOST_RANKS = 4
"""Ranks that a part shows: the ones that spend most on it."""
_OVER_OTHERS = {TRAIN_BATCH: TRAIN_BATCH, GRAD_SYNC: f"{GRAD_SYNC} (communication that a rank is blocked in)"}


def timing_parts(timings: Timings, since: int) -> list[RenderableType]:
    """Return the table of the timings *since* a step, with what must be known to read it."""
    columns = ["steps", "mean\nms", "p50\nms", "p99\nms", "total\nms", "of the\nsteps"]
    table = new_table(["stage", "rank"], columns)
    table.add_column("slowest", no_wrap=True)
    for stage in timings.stages:
        for row, timing in enumerate(_shown(stage.ranks)):
            name, slowest = (short(stage.name), _slowest(stage)) if row == 0 else ("", Text())
            table.add_row(Text(name), str(timing.rank), *_figures(timing), slowest)
    hidden = max((len(stage.ranks) for stage in timings.stages), default=0) - MOST_RANKS
    more = f"the {MOST_RANKS} ranks that spend most on a stage: --json has all" if hidden > 0 else ""
    title = f"Timings from step {since} on, of the steps that had them"
    return section(title, table, _note(timings), more) if timings.stages else []


def _note(timings: Timings) -> str:
    """Return which of the rows lie over others."""
    names = [_OVER_OTHERS[stage.name] for stage in timings.stages if stage.name in _OVER_OTHERS]
    return f"{' and '.join(names)} overlap{'s' * (len(names) == 1)} other rows" if names else ""


def rates(found: Rates) -> list[str]:
    """Return steps, batches and samples per second as cells, "" for what is not known."""
    figures = (found.steps_per_second, found.batches_per_second, found.samples_per_second)
    return ["" if value is None else rate(value) for value in figures]


def _shown(ranks: Sequence[Timing]) -> list[Timing]:
    most = sorted(ranks, key=lambda timing: -timing.total)[:MOST_RANKS]
    return sorted(most, key=lambda timing: timing.rank)


def _figures(timing: Timing) -> list[str]:
    times = (timing.mean, timing.p50, timing.p99, timing.total)
    return [f"{timing.steps:,}", *map(ms, times), f"{timing.share:.1%}"]


def _slowest(stage: StageTimings) -> Text:
    if stage.slowest is None or not stage.excess:
        return Text()
    text = f"rank {stage.slowest}, by {ms(stage.excess)} ms"
    return Text(f"{text}*", style="bold red") if stage.stands_out else Text(text)

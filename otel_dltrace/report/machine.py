"""What the machine did, for people: in words beside each slow stage, and as a table of what was used."""

from collections.abc import Callable, Sequence

from rich.console import RenderableType
from rich.text import Text

from otel_dltrace.analysis.blame.slow import SlowStage
from otel_dltrace.analysis.saturation import GC_SHARE, LINE_RATE_SHARE, THRESHOLDS, Saturation, Sign, SlowStageSigns
from otel_dltrace.analysis.select import spell
from otel_dltrace.analysis.steps.own import IN_WORDS
from otel_dltrace.analysis.utilisation import UtilisationRow
from otel_dltrace.report.tables import new_table, section
from otel_dltrace.report.words import ms, plain, short, size

MOST_STAGES = 8
MOST_ROWS = 40
FEW_STEPS = 3
SMALL = 100
"""Below this a figure gets a decimal."""
_FAR_MORE = 3
"""How many times the usual excess of a slow stage its worst step is told at."""
_NO_METRICS = "What the machines did then is not known: OTEL_DLTRACE_METRICS=1 records it."


def _throttled(sign: Sign, host: str) -> str:
    gpu, _, reason = plain(sign.of).partition(" ")
    return f"{gpu} of {host} was throttled {sign.value:.0%} of the time ({reason})"


def _on_the_line(sign: Sign, host: str) -> str:
    interface, _, way = plain(sign.of).rpartition(" ")
    return f"{interface} of {host} {way} at {sign.value:.0%} of its line rate"


_SIGNS: dict[str, Callable[[Sign, str], str]] = {
    "cpu": lambda sign, host: f"the CPUs of {host} were {sign.value:.0%} busy",
    "disk": lambda sign, host: f"disk {plain(sign.of)} of {host} was {sign.value:.0%} busy",
    "disk read": lambda sign, _: f"its process read {size(round(sign.value))}/s from disks",
    "disk write": lambda sign, _: f"its process wrote {size(round(sign.value))}/s to disks",
    "network": _on_the_line,
    "gpu throttled": _throttled,
    "gc": lambda sign, _: f"garbage collection took {sign.value:.0%} of it",
    "major page faults": lambda sign, _: f"its process waited for the disk in {sign.value:,.0f} page faults a second",
    "minor page faults": lambda sign, _: f"its process had {sign.value:,.0f} page faults a second",
    "involuntary switches": lambda sign, _: f"its process was taken off the CPU {sign.value:,.0f} times a second",
}
_SUFFIXES = {"/s": "/s", "W": " W", "Cel": " °C"}


def saturation_parts(found: Saturation) -> list[RenderableType]:
    """Return the slow stages in words, and from when on a stage is slow and a sign is told."""
    if not found.stages:
        return []
    out: list[RenderableType] = [Text("\nSlow stages, and what the machine did meanwhile", style="bold")]
    out += [Text(sentence(stage)) for stage in found.stages[:MOST_STAGES]]
    if len(found.stages) > MOST_STAGES:
        out.append(Text(f"{len(found.stages) - MOST_STAGES} more: --json has all"))
    if not found.sampled:
        out.append(Text(_NO_METRICS))
    return [*out, Text(basis(found), style="dim")]


def sentence(found: SlowStageSigns) -> str:
    """Return in one sentence which stage was slow, when, by how much, and what was above its threshold then."""
    told = meanwhile(found)
    nothing = "; nothing that was sampled then is above its threshold" if found.sampled else ""
    return f"{_slow(found.slow)}{f', while {told}' if told else nothing}."


def meanwhile(found: SlowStageSigns) -> str:
    """Return what was above its threshold while a stage was slow, "" for nothing."""
    parts = [_SIGNS[sign.kind](sign, plain(found.host)) for sign in found.signs]
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _slow(slow: SlowStage) -> str:
    subject = f"Rank {slow.rank}'s {IN_WORDS.get(slow.stage, short(slow.stage))} took {ms(slow.own)} ms"
    by = "longer than the others'" if slow.against == "others" else "longer than its median"
    named = f"step{'s' * (len(slow.steps) > 1)} {spell(slow.steps)}"
    steps = named if len(slow.steps) <= FEW_STEPS else f"{len(slow.steps)} of {slow.of} steps"
    worst = f", {ms(slow.most)} ms in step {slow.worst}" if slow.most > _FAR_MORE * slow.excess else ""
    return f"{subject}, {ms(slow.excess)} ms {by} (in {steps}{worst})"


def basis(found: Saturation) -> str:
    """Return from when on a stage is slow and a sign is told, as one note."""
    slow = (
        f"Slow: more than {ms(found.excess)} ms above the other ranks in most steps, or {ms(found.outlier)} ms above "
        "them in two fifths of the steps, or above the rank's own median; waiting for others left out."
    )
    if not (found.sampled or any(stage.signs for stage in found.stages)):
        return slow
    limits = [f"gc {GC_SHARE:.0%}"]
    if found.sampled:
        limits += [f"{one.kind} {figure(one.least, one.quantity.unit)}" for one in THRESHOLDS]
        limits.append(f"network {LINE_RATE_SHARE:.0%}")
    told = f"What the machines did happened at the same time, which proves no cause; thresholds: {', '.join(limits)}."
    return f"{slow} {told}"


def utilisation_parts(rows: Sequence[UtilisationRow]) -> list[RenderableType]:
    """Return the table of what was used; in words where there is nothing to put in it."""
    if not rows:
        return []
    used = [row for row in rows if row.max > 0]
    still = f"{len(rows) - len(used)} stayed at 0" if len(used) < len(rows) else ""
    if not used:
        return [Text(f"\nNothing that was sampled was used: {still}; --json has all", style="dim")]
    table = new_table(["host", "of", "what"], ["samples", "mean", "p95", "max"])
    for row in used[:MOST_ROWS]:
        who = f"rank {row.rank}" if row.rank >= 0 else row.of
        figures = (figure(value, row.unit) for value in (row.mean, row.p95, row.max))
        table.add_row(Text(plain(row.host)), Text(plain(who)), row.what, f"{row.samples:,}", *figures)
    more = f"{len(used) - MOST_ROWS} more" if len(used) > MOST_ROWS else ""
    left = ", ".join(filter(None, (more, still)))
    return section("What was used", table, f"{left}: --json has all" if left else "")


def figure(value: float, unit: str) -> str:
    """Return *value* as people read it in its *unit*."""
    if unit == "1":
        return f"{value:.0%}"
    if unit in ("By", "By/s"):
        return size(round(value)) + unit.removeprefix("By")
    number = f"{value:,.1f}" if round(value, 1) < SMALL else f"{value:,.0f}"
    return number + _SUFFIXES.get(unit, "")

"""The report for people: what was found in words first, then the tables; computes nothing."""

from collections.abc import Collection, Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from otel_dltrace.analysis.blame.marked import PhaseRow
from otel_dltrace.analysis.collectives.operations import OperationRow
from otel_dltrace.analysis.collectives.waits import RankWaits, Waits
from otel_dltrace.analysis.compose import RunReport
from otel_dltrace.analysis.select import spell
from otel_dltrace.analysis.spread import Spread
from otel_dltrace.analysis.steps.breakdown import OPERATIONS, Breakdown, RankBreakdown
from otel_dltrace.analysis.steps.table import BETWEEN, RESIDUAL
from otel_dltrace.analysis.steps.throughput import Throughput
from otel_dltrace.model.semconv import PUSH_PULL
from otel_dltrace.report import words
from otel_dltrace.report.failures import failures
from otel_dltrace.report.left_open import left_open
from otel_dltrace.report.machine import saturation_parts, utilisation_parts
from otel_dltrace.report.tables import MOST_ROWS, left_over, new_table, section, show
from otel_dltrace.report.timings import rates, timing_parts
from otel_dltrace.report.words import ms, short, size

_STYLES = {"straggler": "bold red", "none": "bold green", "cannot tell": "bold yellow"}
_ENDS = {
    "host_issue": "host_issue: the time of the call alone, the work went on",
    "bound": "bound: the work was done some time before",
    "recorder": "recorder: the device measured how long it took; when follows from the order of its group",
}


def write(report: RunReport, console: Console, fold: int | None = None) -> None:
    """Write *report* to *console*, sentences in lines of *fold* characters if it is given."""
    show(parts(report), console, fold)


def parts(report: RunReport) -> list[RenderableType]:
    """Return what the report shows, in order."""
    first, *more = words.verdict(report.stragglers)
    out: list[RenderableType] = [Text(first, style=_STYLES[report.stragglers.verdict]), *map(Text, more)]
    out += [Text(sentence, style="yellow") for sentence in words.drift(report.drift)]
    out += [Text(sentence, style="yellow") for sentence in failures(report.failures)]
    out += [Text(sentence, style="yellow") for sentence in left_open(report.left_open)]
    if exposed := words.where_the_step_goes(report.stragglers):
        out.append(Text(exposed))
    named = {straggler.rank for straggler in report.stragglers.found}
    b = report.breakdown
    since = max(b.warm_up, report.guards.steps[0] if report.guards.steps else 0)
    out += saturation_parts(report.saturation)
    if any(rank.step.count for rank in b.steady):
        out += _steps(b, report.throughput, named, since)
    if b.stages:
        out += _stages(b, b.steady, f"Steps from {since} on: mean ms of each stage per step", named)
    if b.first and b.stages:
        out += _stages(b, b.first, f"The first steps apart: {spell(range(b.warm_up))}", named, mark=False)
    out += timing_parts(report.timings, since)
    if report.phases:
        out += _phases(report.phases)
    if report.operations:
        out += _operations(report.operations)
    if report.waits.joined:
        out += _waits(report.waits, named)
    out += utilisation_parts(report.utilisation)
    out.append(Text(f"\n{words.rests_on(report.guards)}", style="dim"))
    return out


def _shown(ranks: Sequence[int], named: Collection[int]) -> tuple[set[int], str]:
    """Return which ranks have a row, those that were named before all, and a caption if some have none."""
    if len(ranks) <= MOST_ROWS:
        return set(ranks), ""
    order = sorted(ranks, key=lambda rank: (rank not in named, rank))
    return set(order[:MOST_ROWS]), f"{len(ranks) - MOST_ROWS} more ranks: choose with --rank, or --json has all"


def _steps(b: Breakdown, done: Throughput, named: Collection[int], since: int) -> list[RenderableType]:
    numbers = ["steps", "mean", "p50", "p95", "max", "steps/s", "batches/s", "samples/s"]
    table = new_table(["rank"], numbers)
    shown, hidden = _shown([r.rank for r in b.steady], named)
    for r, throughput in zip(b.steady, done.ranks, strict=True):
        if r.rank in shown:
            mean = _cell(ms(r.step.mean), ("step", r.rank) in b.slowest)
            spread = (ms(r.step.p50), ms(r.step.p95), ms(r.step.max))
            table.add_row(str(r.rank), f"{r.step.count:,}", mean, *spread, *rates(throughput.rates))
    if done.overall is not None and len(done.ranks) > 1:
        table.add_row("all", *[""] * 5, *rates(done.overall))
    return section(f"Steps from {since} on, ms", table, hidden)


def _stages(
    b: Breakdown, ranks: Sequence[RankBreakdown], title: str, named: Collection[int], mark: bool = True
) -> list[RenderableType]:
    has_operations = any(r.operations for r in ranks)
    names = (*b.stages, *([OPERATIONS] if has_operations else []), RESIDUAL, BETWEEN)
    table = new_table(["rank"], [short(name).replace("_", "_\n").replace(" ", "\n") for name in names])
    shown, hidden = _shown([r.rank for r in ranks], named)
    for r in (r for r in ranks if r.rank in shown and r.step.count):
        outside = [r.operations or Spread()] if has_operations else []
        times = [*(stage.time for stage in r.stages), *outside, r.residual, r.between]
        marked = [mark and (name, r.rank) in b.slowest for name in names]
        table.add_row(str(r.rank), *(_cell(ms(time.mean), star) for time, star in zip(times, marked, strict=True)))
    legend = "* the slowest, where one stands out" if mark and b.slowest else ""
    note = "operations: blocked in communication outside any stage" if has_operations else ""
    return section(title, table, legend, note, hidden)


def _cell(text: str, marked: bool) -> Text:
    return Text(f"{text}*", style="bold red") if marked else Text(text)


def _phases(rows: Sequence[PhaseRow]) -> list[RenderableType]:
    table = new_table(["phase"], ["calls\na rank", "mean\nms", "p95\nms", "a step\nms", "most on\nrank"])
    for row in rows[:MOST_ROWS]:
        low, high = min(one.per_step for one in row.ranks), max(row.ranks, key=lambda one: one.per_step)
        per_step, most = ms(high.per_step) if high.per_step else "", ""
        if high.per_step > low:
            per_step, most = f"{ms(low)}..{ms(high.per_step)}", str(high.rank)
        table.add_row(Text(short(row.name)), _range(row.count), ms(row.time.mean), ms(row.time.p95), per_step, most)
    return section("Phases that the program marks", table, left_over(rows, "phases"))


def _operations(rows: Sequence[OperationRow]) -> list[RenderableType]:
    numbers = ["calls\na rank", "bytes\na rank", "total\nms", "mean\nms", "p95\nms", "skew\np50 ms", "end is"]
    table = new_table(["operation", "group", "dtype"], numbers)
    for row in rows[:MOST_ROWS]:
        names = (f"{row.operation} {row.tensor}", f"{row.backend} {row.group}", row.dtype)
        low, high = map(size, row.bytes)
        moved = low if low == high else f"{low}..{high}"
        times = (ms(row.time.total), ms(row.time.mean), ms(row.time.p95), ms(row.skew.p50) if row.skew.count else "")
        table.add_row(*(Text(short(name.strip())) for name in names), _range(row.count), moved, *times, row.source)
    notes = [_ENDS[source] for source in sorted({row.source for row in rows}) if source in _ENDS]
    notes.append(left_over(rows, "kinds"))
    if any(row.operation == PUSH_PULL for row in rows):
        notes.append("for push_pull, `report --by key` shows the key, partition and server")
    return section("Operations", table, *notes)


def _range(least_and_most: tuple[int, int]) -> str:
    low, high = least_and_most
    return f"{low:,}" if low == high else f"{low:,}..{high:,}"


def _waits(w: Waits, named: Collection[int]) -> list[RenderableType]:
    parts = ["collectives", "wait\nms", "of it\nblocked", "core\nms", "completion\nms"] if w.analysed else []
    table = new_table(["rank"], [*parts, "came last", "by p50\nms"])
    shown, hidden = _shown([r.rank for r in w.ranks], named)
    for r in (r for r in w.ranks if r.rank in shown):
        cells = [f"{r.collectives:,}", *_parts(r, w)] if w.analysed else []
        table.add_row(str(r.rank), *cells, f"{r.last:,} of {r.arrivals:,}", ms(r.late.p50) if r.last else "")
    return section("Waiting for others in collectives, in all", table, _basis(w), hidden)


def _parts(r: RankWaits, w: Waits) -> list[str]:
    if not r.collectives:
        return [""] * 4
    unsure = f"< +-{ms(w.uncertainty)}"
    return [unsure if part is None else ms(part) for part in (r.wait, r.blocked, r.core, r.completion)]


def _basis(w: Waits) -> str:
    notes = [f"{w.analysed:,} of {w.joined:,} joined collectives show waiting"]
    if w.other_ends:
        notes.append(f"{w.other_ends:,} have no end of the work: who called last is known, the wait is not")
    if w.incomplete:
        notes.append(f"{w.incomplete:,} lack a rank")
    if w.violations:
        notes.append(f"{w.violations:,} times a rank was done before the last one came, by up to {ms(w.violation)} ms")
    return "; ".join(notes)

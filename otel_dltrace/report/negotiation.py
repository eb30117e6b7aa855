"""The report by negotiation, for people: its share, who was ready last, tensors, activities."""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from otel_dltrace.analysis.negotiation.coordinator import Negotiations
from otel_dltrace.analysis.negotiation.hidden import STAGES, UNBLOCKED, Overlap
from otel_dltrace.analysis.negotiation.phases import Activity
from otel_dltrace.analysis.negotiation.shares import FIRST_EPOCH, Share
from otel_dltrace.analysis.negotiation.tensors import ReadyRank
from otel_dltrace.analysis.push_pulls.last_comers import later_by_far
from otel_dltrace.model.activities import BACKEND
from otel_dltrace.model.semconv import MPI
from otel_dltrace.report.tables import MOST_ROWS, left_over, new_table, section, show
from otel_dltrace.report.words import ms, short

_NOTHING = "This run has no operation of Horovod or MPI that ranks share: --by negotiation reports on those."
_TICKS = (
    "ready is when Horovod's rank 0 saw it, once per cycle (HOROVOD_CYCLE_TIME); ranks are those of the process set"
)
_CALLS = "ready is when the rank called, as it saw it itself; ranks are those of the job"
_NO_TIMELINE = (
    "What Horovod does inside the operations, and by which library, is in its own timeline, which this run "
    "does not have: HOROVOD_TIMELINE=timeline.json has rank 0 write it, and level phase reads it."
)
_NO_OVERLAP = (
    "How much of it computation hides cannot be told: no forward, backward or optimizer is recorded with it, "
    "or no waits (OTEL_DLTRACE_LEVEL=phase records them)."
)
_UNSAID = "no negotiation says it"
_CLOCKS = "the clocks of the hosts do not agree well enough"
_AT_ONCE = "in each negotiation several ranks are ready last at the same time"
_NOT_OF_ALL = "it takes a collective with all its ranks here (messages do not tell, --rank leaves some out)"
_OVERLAP = (
    "overlap: of the time in which an operation runs, the part in which its rank computes too, each moment once; "
)
_COMPUTES = {
    STAGES: "to compute is to be in forward, backward or optimizer, blocked in no operation and no wait",
    UNBLOCKED: "to compute is to be blocked in no operation and no wait, as no forward or backward is recorded",
}
_SHARES = "for each step, the time in which anything was negotiated, or an operation ran; communication is either"
_WAITS = (
    "to negotiate is to wait in a collective until its last rank has begun it, the rest of it is the operation; "
    "communication is either; each rank's step counts"
)
_FIRST_TO_LAST = (
    "its negotiation is from the first rank that called to the last, its operation from each rank's call to its end"
)
_OF = {BACKEND: "What rank 0 does in the operations", MPI: "What the ranks do"}
_MOST_STEPS = 8


def write_negotiations(found: Negotiations, console: Console, fold: int | None = None) -> None:
    """Write *found* to *console*, sentences in lines of *fold* characters if it is given."""
    show(parts(found), console, fold)


def parts(found: Negotiations) -> list[RenderableType]:
    """Return what the report by negotiation shows, in order."""
    if not (found.tensors or found.activities or found.overlap):
        return [Text(_NOTHING)]
    out: list[RenderableType] = [Text(sentence) for sentence in sentences(found)]
    if found.whole or found.overlap:
        out.append(Text(_OVERLAP + _COMPUTES[found.overlap.of if found.overlap else STAGES], style="dim"))
    out += _shares(found)
    if found.ranks:
        clocks = f"clocks of the hosts agree to +-{ms(found.uncertainty)} ms" if found.uncertainty else ""
        out += _ranks(found.ranks, _CALLS if found.called else _TICKS, clocks)
    if found.tensors:
        out += _tensors(found)
    if found.activities:
        out += _libraries(found.libraries, found.backend)
        out += _activities(found.activities, found.backend)
    return out


def sentences(found: Negotiations) -> list[str]:
    """Return the share of negotiation, who was ready last, and what computation hides, a sentence each."""
    out = []
    if found.whole is not None:
        who = "Horovod communicates" if found.coordinated else "the ranks communicate"
        out.append(
            f"Negotiation takes {_percent(found.whole.negotiation, found.whole.communication)} of the time in which "
            f"{who}: {ms(found.whole.negotiation)} of {ms(found.whole.communication)} ms."
        )
    out += [*_last(found), _hidden(found.overlap)]
    if found.backend == BACKEND and not found.coordinated:
        out.append(_NO_TIMELINE)
    return out


def _hidden(overlap: Overlap | None) -> str:
    if overlap is None:
        return _NO_OVERLAP
    what = "forward, backward or optimizer ran" if overlap.of == STAGES else "the rank was not blocked"
    return (
        f"Computation hides {_percent(overlap.overlapped, overlap.communication)} of the operations' time: "
        f"{what} in {ms(overlap.overlapped)} of {ms(overlap.communication)} ms."
    )


def _last(found: Negotiations) -> list[str]:
    most = max(found.ranks, key=lambda rank: (rank.times, -rank.rank), default=None)
    if most is None:
        return [f"Who was ready last cannot be told: {_UNSAID if found.coordinated else _NOT_OF_ALL}."]
    if not most.times:
        return [f"Who was ready last cannot be told: {_CLOCKS if found.uncertainty else _AT_ONCE}."]
    silent = f" ({found.silent:,} more do not say who was ready when)" if found.silent else ""
    out = [
        f"Rank {most.rank} is ready last most often: in {most.times:,} of {most.negotiations:,} negotiations, "
        f"by {ms(most.late.p50)} ms (p50){silent}."
    ]
    latest = later_by_far(found.ranks, most, lambda rank: rank.late.total)
    if latest is not None:
        times = f"in {latest.times:,} of {latest.negotiations:,} negotiations"
        by = f"by {ms(latest.late.mean)} ms on average, {ms(latest.late.max)} ms at most"
        out.insert(0, f"The others wait longest for rank {latest.rank}: it is ready last {times}, {by}.")
    return out


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _shares(found: Negotiations) -> list[RenderableType]:
    note = _SHARES if found.coordinated else _WAITS
    first, others = ("the first epoch", "later epochs") if found.apart == FIRST_EPOCH else ("the first", "later ones")
    out: list[RenderableType] = []
    rows = [(name, share) for name, share in ((first, found.first), (others, found.others)) if share]
    if rows:
        out += section("Negotiation, by step (mean)", _share_table("steps", rows), note)
    if found.epochs:
        rows = [(str(epoch.number), epoch.share) for epoch in found.epochs[:MOST_ROWS]]
        table = _share_table("epoch", rows)
        out += section("Negotiation, by epoch (mean of its steps)", table, left_over(found.epochs, "epochs"))
    if found.steps:
        longest = sorted(found.steps, key=lambda one: (-one.share.negotiation, one.number))
        rows = [(str(step.number), step.share) for step in longest[:_MOST_STEPS]]
        more = "--json has each step" if len(found.steps) > _MOST_STEPS else ""
        out += section("The steps that negotiate longest", _share_table("step", rows), more)
    return out


def _share_table(name: str, rows: Sequence[tuple[str, Share]]) -> Table:
    numbers = ["steps", "a step\nms", "negotiation\nms", "operations\nms", "negotiation of\ncommunication"]
    table = new_table([name], numbers)
    for what, share in rows:
        table.add_row(what, *_share(share))
    return table


def _share(share: Share) -> list[str]:
    times = (share.extent, share.negotiation, share.operation)
    return [
        f"{share.steps:,}",
        *(ms(round(time / share.steps)) for time in times),
        _percent(share.negotiation, share.communication),
    ]


def _ranks(ranks: Sequence[ReadyRank], *notes: str) -> list[RenderableType]:
    table = new_table(["rank"], ["negotiations", "ready last", "by p50\nms", "by p95\nms", "by max\nms"])
    for rank in ranks[:MOST_ROWS]:
        late = rank.late
        figures = [ms(late.p50), ms(late.p95), ms(late.max)] if late.count else [""] * 3
        table.add_row(str(rank.rank), f"{rank.negotiations:,}", f"{rank.times:,}", *figures)
    return section(
        "Who is ready last, and by how much after the one before it", table, *notes, left_over(ranks, "ranks")
    )


def _tensors(found: Negotiations) -> list[RenderableType]:
    columns = ["times", "negotiation\np50 ms", "p95\nms", "operation\np50 ms", "p95\nms", "ready last"]
    table = new_table(["collective" if found.backend == MPI else "tensor", "operation"], columns)
    for tensor in found.tensors[:MOST_ROWS]:
        last = f"rank {tensor.last}: {tensor.last_times:,} of {tensor.ticked:,}, {ms(tensor.late)} ms"
        table.add_row(
            Text(short(tensor.tensor)),
            Text(short(tensor.operation)),
            # Each rank has its own bar of an operation, but where Horovod tells them.
            f"{max(tensor.negotiation.count, tensor.bar.count if found.coordinated else 0):,}",
            *(ms(figure) for time in (tensor.negotiation, tensor.bar) for figure in (time.p50, time.p95)),
            last if tensor.last_times else "",
        )
    notes = ["" if found.coordinated else _FIRST_TO_LAST]
    if found.backend == MPI:
        return section("Collectives, by their negotiation", table, *notes, left_over(found.tensors, "collectives"))
    notes.append("tensors that Horovod fused share one operation: do not add them up")
    return section("Tensors, by their negotiation", table, *notes, left_over(found.tensors, "tensors"))


def _libraries(libraries: Sequence[Activity], backend: str) -> list[RenderableType]:
    table = new_table(["library"], ["bars", "p50\nms", "p95\nms", "any of them\nms"])
    for library in libraries:
        table.add_row(library.name, *_bars(library))
    return section(f"{_OF[backend]}, by library", table)


def _activities(rows: Sequence[Activity], backend: str) -> list[RenderableType]:
    table = new_table(["activity", "library"], ["bars", "p50\nms", "p95\nms", "any of them\nms"])
    for activity in rows[:MOST_ROWS]:
        table.add_row(Text(short(activity.name)), activity.library, *_bars(activity))
    return section(_OF[backend], table, left_over(rows, "activities"))


def _bars(activity: Activity) -> list[str]:
    time = activity.time
    return [f"{time.count:,}", ms(time.p50), ms(time.p95), ms(activity.covered)]

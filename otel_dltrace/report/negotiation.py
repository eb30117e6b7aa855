"""The report by negotiation, for people: its share, who was ready last, tensors, activities."""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from otel_dltrace.analysis.negotiation import Activity, Negotiations, ReadyRank, Share, TensorNegotiation
from otel_dltrace.report.tables import MOST_ROWS, new_table, section
from otel_dltrace.report.words import ms, plain

_NOTHING = "No operation of Horovod is in there: --by negotiation tells of its timeline."
_TICKS = (
    "ready is when Horovod's rank 0 saw it, once in a cycle (HOROVOD_CYCLE_TIME); ranks are those of the process set"
)
_CALLS = "ready is when the rank called, as it saw it itself; ranks are those of the job"
_NO_TIMELINE = (
    "What share of the time negotiation takes, and how much of it computation hides, is in Horovod's own timeline, "
    "which this run has not: HOROVOD_TIMELINE=timeline.json."
)
_NO_OVERLAP = "How much of it computation hides cannot be told: no forward, backward or optimizer is recorded with it."


def write_negotiations(found: Negotiations, console: Console) -> None:
    """Write *found* to *console*."""
    for part in parts(found):
        console.print(part, highlight=False)


def parts(found: Negotiations) -> list[RenderableType]:
    """Return what the report by negotiation shows, in order."""
    if not (found.tensors or found.activities):
        return [Text(_NOTHING)]
    out: list[RenderableType] = [Text(sentence) for sentence in sentences(found)]
    out += _shares(found)
    if found.ranks:
        out += _ranks(found.ranks, _CALLS if found.called else _TICKS)
    out += _tensors(found.tensors)
    if found.activities:
        out += _activities(found.activities)
    return out


def sentences(found: Negotiations) -> list[str]:
    """Return the share of negotiation, who was ready last, and what computation hides, a sentence each."""
    out = []
    if found.whole is not None:
        out.append(
            f"Negotiation takes {_percent(found.whole.negotiation, found.whole.communication)} of the time in which "
            f"Horovod communicates: {ms(found.whole.negotiation)} of {ms(found.whole.communication)} ms."
        )
    out += _last(found)
    overlap = found.overlap
    if found.called and found.whole is None:
        out.append(_NO_TIMELINE)
    elif overlap is None:
        out.append(_NO_OVERLAP)
    else:
        out.append(
            f"Computation hides {_percent(overlap.overlapped, overlap.communication)} of the operations' time: "
            f"forward, backward or optimizer ran in {ms(overlap.overlapped)} of {ms(overlap.communication)} ms."
        )
    return out


def _last(found: Negotiations) -> list[str]:
    most = max(found.ranks, key=lambda rank: (rank.times, -rank.rank), default=None)
    if most is None:
        return ["Who was ready last cannot be told: no negotiation says it."]
    silent = f" ({found.silent:,} more do not say who was ready when)" if found.silent else ""
    return [
        f"Rank {most.rank} is ready last most often: in {most.times:,} of {most.negotiations:,} negotiations, "
        f"by {ms(most.late.p50)} ms (p50){silent}."
    ]


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "0%"


def _shares(found: Negotiations) -> list[RenderableType]:
    table = new_table(
        ["steps"], ["steps", "a step\nms", "negotiation\nms", "operations\nms", "negotiation of\ncommunication"]
    )
    for name, share in (("the first", found.first), ("the others", found.others)):
        if share is not None:
            table.add_row(name, *_share(share))
    note = "for each step, the time in which anything was negotiated, or an operation ran; communication is either"
    return section("Negotiation, by step (mean)", table, note)


def _share(share: Share) -> list[str]:
    times = (share.extent, share.negotiation, share.operation)
    return [
        f"{share.steps:,}",
        *(ms(round(time / share.steps)) for time in times),
        _percent(share.negotiation, share.communication),
    ]


def _ranks(ranks: Sequence[ReadyRank], what: str) -> list[RenderableType]:
    table = new_table(["rank"], ["negotiations", "ready last", "by p50\nms", "by p95\nms", "by max\nms"])
    for rank in ranks[:MOST_ROWS]:
        late = rank.late
        figures = [ms(late.p50), ms(late.p95), ms(late.max)] if late.count else [""] * 3
        table.add_row(str(rank.rank), f"{rank.negotiations:,}", f"{rank.times:,}", *figures)
    return section("Who is ready last, and by how much after the one before it", table, what, _more(ranks, "ranks"))


def _tensors(tensors: Sequence[TensorNegotiation]) -> list[RenderableType]:
    columns = ["times", "negotiation\np50 ms", "p95\nms", "operation\np50 ms", "p95\nms", "ready last"]
    table = new_table(["tensor", "operation"], columns)
    for tensor in tensors[:MOST_ROWS]:
        last = f"rank {tensor.last}: {tensor.last_times:,} of {tensor.ticked:,}, {ms(tensor.late)} ms"
        table.add_row(
            Text(plain(tensor.tensor)),
            Text(plain(tensor.operation)),
            f"{max(tensor.negotiation.count, tensor.bar.count):,}",
            *(ms(figure) for time in (tensor.negotiation, tensor.bar) for figure in (time.p50, time.p95)),
            last if tensor.ticked else "",
        )
    note = "tensors that Horovod fused share one operation: do not add them up"
    return section("Tensors, by their negotiation", table, note, _more(tensors, "tensors"))


def _activities(activities: Sequence[Activity]) -> list[RenderableType]:
    table = new_table(["activity"], ["bars", "p50\nms", "p95\nms", "any of them\nms"])
    for activity in activities[:MOST_ROWS]:
        time = activity.time
        table.add_row(Text(plain(activity.name)), f"{time.count:,}", ms(time.p50), ms(time.p95), ms(activity.covered))
    return section("What rank 0 does in the operations", table, _more(activities, "activities"))


def _more(rows: Sequence[object], name: str) -> str:
    return f"{len(rows) - MOST_ROWS} more {name}: --json has all" if len(rows) > MOST_ROWS else ""

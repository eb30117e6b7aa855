"""The report by key, for people: who comes last, then keys as the workers saw them and as the servers did."""

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.text import Text

from otel_dltrace.analysis.push_pulls.keys import Keys, RankArrivals
from otel_dltrace.analysis.push_pulls.last_comers import Last, later_by_far
from otel_dltrace.analysis.push_pulls.server_keys import ServerKey
from otel_dltrace.analysis.push_pulls.worker_keys import WorkerKey
from otel_dltrace.model.plan import FINEST
from otel_dltrace.report.tables import MOST_ROWS, left_over, new_table, section, show
from otel_dltrace.report.words import ms, short

_NOTHING = "This run has no push_pull: --by key reports on the tensors of a parameter server."


def write_keys(keys: Keys, console: Console, fold: int | None = None) -> None:
    """Write *keys* to *console*, sentences in lines of *fold* characters if it is given."""
    show(parts(keys), console, fold)


def parts(keys: Keys) -> list[RenderableType]:
    """Return what the report by key shows, in order."""
    if not (keys.workers or keys.servers):
        return [Text(_NOTHING)]
    out: list[RenderableType] = [Text(sentence) for sentence in sentences(keys)]
    if any(rank.workers or rank.servers for rank in keys.ranks):
        out += _ranks(keys.ranks)
    if keys.workers:
        out += _workers(keys.workers)
    if keys.servers:
        out += _servers(keys.servers)
    if keys.uncertainty:
        out.append(Text(f"\n{_clocks(keys)}", style="dim"))
    return out


def _clocks(keys: Keys) -> str:
    if keys.are_off:
        return f"The workers' clocks are off by up to {ms(keys.uncertainty)} ms: within that none of them comes last."
    read = f"The workers' clocks were read to +-{keys.uncertainty / 1e3:,.1f} us"
    return f"{read}; how well those of several hosts agree is not known."


def sentences(keys: Keys) -> list[str]:
    """Return who comes last, which server is slow, and where the longest key spends its time, a sentence each."""
    out = _who_is_last("workers", [rank.workers for rank in keys.ranks])
    out += _who_is_last("servers", [rank.servers for rank in keys.ranks], keys.local_size)
    if slow := keys.slow_server:
        out.append(
            f"Server {slow.server} takes {ms(slow.push)} ms (p50) to add a push, "
            f"the others {ms(slow.others)} ms for pushes of such a size or larger."
        )
    if way := keys.slow_way:
        out.append(
            f"A worker's first push to server {way.server} takes {ms(way.push)} ms (p50), one of such a size or "
            f"larger to the others {ms(way.others)} ms, and no server is slow to add it: it waits on the way, or until "
            "the server gets to it."
        )
    if keys.workers and not keys.servers and not any(key.stages for key in keys.workers):
        out.append(f"No stage of a partition was recorded, and nothing of a server; {FINEST}.")
    if keys.workers and keys.workers[0].longest:
        key, stage = keys.workers[0], keys.workers[0].longest
        out.append(
            f"The key that takes longest is {_name(key.key, key.tensor)}: {ms(key.time.p50)} ms (p50), "
            f"longest in {short(stage.name)} ({ms(stage.wait.p50)} ms queued, {ms(stage.time.p50)} ms in it)."
        )
    return out


def _who_is_last(seen_by: str, ranks: Sequence[Last | None], local_size: int = 1) -> list[str]:
    lasts = [last for last in ranks if last and last.times]
    if not lasts:
        return []
    whose = f", which pushes for its worker's {local_size} ranks," if local_size > 1 else ""
    most = max(lasts, key=lambda last: last.times)
    out = [
        f"Seen from the {seen_by}, rank {most.rank}{whose} comes last most often: "
        f"{most.times:,} of {most.arrivals:,} times, by {ms(most.late)} ms (p50)."
    ]
    more = later_by_far(lasts, most, lambda last: last.late_total)
    if more is not None:
        out.append(
            f"Seen from the {seen_by}, rank {more.rank}{whose} comes last by more: "
            f"{more.times:,} of {more.arrivals:,} times, by {ms(round(more.late_total / more.times))} ms on average, "
            f"{ms(more.late_max)} ms at most."
        )
    return out


def _name(key: int, tensor: str) -> str:
    return " ".join(filter(None, (str(key) if key >= 0 else "", short(tensor))))


def _ranks(ranks: Sequence[RankArrivals]) -> list[RenderableType]:
    columns = ["push_pulls", "came last", "by p50\nms", "pushes", "came last", "by p50\nms"]
    table = new_table(["rank"], columns)
    for rank in ranks[:MOST_ROWS]:
        table.add_row(str(rank.rank), *_arrivals(rank.workers), *_arrivals(rank.servers))
    return section("Who comes last: seen from the workers, and from the servers", table, left_over(ranks, "ranks"))


def _arrivals(last: Last | None) -> list[str]:
    if last is None:
        return [""] * 3
    return [f"{last.arrivals:,}", f"{last.times:,}", ms(last.late) if last.times else ""]


def _workers(keys: Sequence[WorkerKey]) -> list[RenderableType]:
    columns = ["calls", "p50\nms", "p95\nms", "queued\np50 ms", "in it\np50 ms", "slowest\npartition", "comes last"]
    table = new_table(["key", "tensor", "longest in"], columns)
    for key in keys[:MOST_ROWS]:
        stage = key.longest
        table.add_row(
            str(key.key) if key.key >= 0 else "",
            Text(short(key.tensor)),
            Text(short(stage.name)) if stage else "",
            f"{key.time.count:,}",
            ms(key.time.p50),
            ms(key.time.p95),
            *([ms(stage.wait.p50), ms(stage.time.p50)] if stage else ["", ""]),
            _slowest(key),
            _who(key.last),
        )
    return section("Keys, seen from the workers", table, left_over(keys, "keys"))


def _slowest(key: WorkerKey) -> str:
    if key.slowest is None:
        return ""
    return f"{key.slowest.partition} of {key.partitions}: {ms(key.slowest.time.p50)} ({ms(key.slowest.others)})"


def _who(last: Last | None) -> str:
    return f"rank {last.rank}: {last.times:,} of {last.arrivals:,}, {ms(last.late)} ms" if last else ""


def _servers(keys: Sequence[ServerKey]) -> list[RenderableType]:
    columns = ["pushes", "push\np50 ms", "gather\np50 ms", "wait\np50 ms", "transfer\np50 ms"]
    table = new_table(["server", "key", "tensor"], [*columns, "comes last"])
    for key in keys[:MOST_ROWS]:
        gather = ms(key.gather.p50) if key.gather.count else ""
        table.add_row(
            str(key.server),
            str(key.key),
            Text(" ".join(filter(None, (short(key.tensor), f"[{key.partition}]" if key.partition else "")))),
            f"{key.push.count:,}",
            ms(key.push.p50),
            gather,
            ms(key.wait.p50),
            ms(key.transfer.p50),
            _who(key.last),
        )
    note = "gather: from the first worker's push to the last one's; wait: of each, the pull that waits longest for it"
    return section("Keys, seen from the servers", table, note, left_over(keys, "keys"))

"""Which key, which partition, which worker makes a push_pull slow: seen from the workers, and from the servers.

Queue wait of a stage is the recorded one (start - end of the stage before it); a partition's time is from the begin of
its first wait to the end of its last stage. Late is who begins last: on the workers to a push_pull that all ranks have,
on a server, by one clock, to the pushes of one key and occurrence; by how much: after the one before it, without what
a server of ours was busy with in between, for it does one thing after the other. What takes longest does so by medians,
which are what is shown: by totals one slow first step would decide. Keys go by their median and how often they come, or
the broadcasts before the first step would be the longest ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from otel_dltrace.analysis.collectives.clocks import clocks
from otel_dltrace.analysis.collectives.joined import join
from otel_dltrace.analysis.collectives.waits import arrivals, widen
from otel_dltrace.analysis.push_pulls.last_comers import Last, of_rank
from otel_dltrace.analysis.push_pulls.server_keys import ServerKey, gathered_pushes, requests_of, server_keys
from otel_dltrace.analysis.push_pulls.slow_server import SlowServer, slow_server, slow_way
from otel_dltrace.analysis.push_pulls.worker_keys import WorkerKey, push_pulls, worker_keys
from otel_dltrace.analysis.steps.table import worker_batches
from otel_dltrace.model.spans import SpanBatch


@dataclass(frozen=True, slots=True)
class RankArrivals:
    """How often a rank came last, by the workers' clocks and by the servers'; None where nobody can tell."""

    rank: int
    workers: Last | None
    servers: Last | None


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of workers and of servers, what usually takes longest first.

    *uncertainty* (ns) is of workers' clocks, as they were read or, where they *are_off*, as push_pulls show that were
    done too early.

    Calls times median: of a worker's key its time, of a server's gather, wait and transfer together. A worker has
    *local_size* ranks, of which servers see the highest alone: it pushes for all of them. *slow_way* is as the workers
    see it, where no server is seen to be slow itself.
    """

    ranks: tuple[RankArrivals, ...]
    workers: tuple[WorkerKey, ...]
    servers: tuple[ServerKey, ...]
    slow_server: SlowServer | None
    slow_way: SlowServer | None
    uncertainty: int
    are_off: bool
    local_size: int


def keys(batches: Sequence[SpanBatch]) -> Keys:
    """Return what *batches*, one per process, say about each key."""
    joined = push_pulls(widen(join(batches)))
    late, uncertainty = arrivals(joined), int(joined.uncertainty.max(initial=0))
    requests, places = requests_of(batches)
    gathered, came_late = gathered_pushes(requests)
    ranks = {*joined["rank"].tolist(), *gathered["rank"].tolist()}
    workers, slow = worker_batches(batches), slow_server(requests, places)
    return Keys(
        tuple(
            RankArrivals(rank, of_rank(rank, joined["rank"], late), of_rank(rank, gathered["rank"], came_late))
            for rank in sorted(ranks)
        ),
        worker_keys(workers, joined, late),
        server_keys(requests, places, gathered, came_late),
        slow,
        None if slow else slow_way(workers, requests, places),
        uncertainty,
        uncertainty > clocks(batches).uncertainty,
        max((b.process.bind.local_world_size for b in batches if b.process.bind), default=1),
    )

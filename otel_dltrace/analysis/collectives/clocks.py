"""One time line for all ranks: exact on one host, wall clocks across hosts, with what that costs in certainty."""

from collections.abc import Sequence
from dataclasses import dataclass

from otel_dltrace.model.spans import Process, SpanBatch
from otel_dltrace.model.time import Anchor

ONE_CLOCK = "one monotonic clock"
WALL_CLOCKS = "wall clocks of several hosts"


@dataclass(frozen=True, slots=True)
class Clocks:
    """How times of different processes compare.

    *offsets* holds, by batch, what to add to its times; *hosts* the number of its host.
    *uncertainty* (ns) is that of two times read on different hosts: the two largest
    uncertainties of the hosts' anchors together. It knows nothing of how well the hosts'
    wall clocks agree, which only the collectives can tell (`waits`: violations).
    """

    method: str
    uncertainty: int
    offsets: tuple[int, ...]
    hosts: tuple[int, ...]


def clocks(batches: Sequence[SpanBatch]) -> Clocks:
    """Return how the times of *batches* compare: by boot, since a monotonic clock is one per boot."""
    keys = [host_of(batch.process) for batch in batches]
    hosts = sorted(set(keys))
    numbers = tuple(hosts.index(key) for key in keys)
    if len(hosts) < 2:
        return Clocks(ONE_CLOCK, 0, (0,) * len(batches), numbers)
    # One anchor per host, the tightest: two of one host would pull its own ranks apart.
    tightest: dict[str, Anchor] = {}
    for batch, key in zip(batches, keys, strict=True):
        anchor = batch.process.anchor
        if key not in tightest or anchor.uncertainty < tightest[key].uncertainty:
            tightest[key] = anchor
    uncertainty = sum(sorted(anchor.uncertainty for anchor in tightest.values())[-2:])
    return Clocks(WALL_CLOCKS, uncertainty, tuple(tightest[key].offset for key in keys), numbers)


def host_of(process: Process) -> str:
    """Return what tells the clock of *process* from others: its host's boot, or name where that is not known."""
    return process.boot_id or process.host

"""Which stages a partition goes through on which rank, and whose word each stage waits for: tables, no work."""

from dataclasses import dataclass
from enum import IntEnum

from otel_dltrace.model.queue_types import QueueType
from otel_dltrace.pushpull.layout import Layout

Q = QueueType


class Signal(IntEnum):
    """What local ranks say to each other about a key."""

    REDUCE_READY = 1
    DO_REDUCE = 2
    PCIE_REDUCE_READY = 3
    PUSH_READY = 4
    DO_COPYH2D = 5
    BCAST_READY = 6
    DO_BROADCAST = 7


@dataclass(frozen=True, slots=True)
class Wait:
    """A stage begins for a key once each of *sources* (local ranks) has sent *signal* for it."""

    signal: Signal
    sources: frozenset[int]


def stage_list(layout: Layout, compressed: bool) -> tuple[QueueType, ...]:
    """Return the stages of a partition on the rank of *layout*, in their order."""
    remote, host, root = layout.distributed, layout.uses_host, layout.is_root
    packed = compressed and remote and root
    follows = not layout.is_signal_root
    plan = (
        (Q.COORDINATE_REDUCE, follows),
        (Q.REDUCE, True),
        (Q.COPYD2H, host),
        (Q.PCIE_REDUCE, layout.crosses_switches),
        (Q.COMPRESS, packed),
        # On one machine with several switches the root's PUSH sends nothing: it waits for the others' sums.
        (Q.PUSH, host and root),
        (Q.COORDINATE_PUSH, host and not root),
        (Q.PULL, remote and root),
        (Q.DECOMPRESS, packed),
        (Q.COPYH2D, host),
        (Q.COORDINATE_BROADCAST, follows),
        (Q.BROADCAST, True),
    )
    return tuple(queue for queue, here in plan if here)


def waits(layout: Layout) -> dict[QueueType, Wait]:
    """Return what each stage of the rank of *layout* waits for, of those that wait at all."""
    me = layout.local_rank
    members = frozenset(layout.members) - {me}
    others = frozenset(range(layout.local_size)) - {me}
    director = frozenset({layout.signal_root})
    if layout.is_signal_root:
        table = {Q.REDUCE: Wait(Signal.REDUCE_READY, members), Q.BROADCAST: Wait(Signal.BCAST_READY, members)}
    else:
        table = {Q.REDUCE: Wait(Signal.DO_REDUCE, director), Q.BROADCAST: Wait(Signal.DO_BROADCAST, director)}
    if layout.uses_host and layout.is_root:
        table[Q.PUSH] = Wait(Signal.PUSH_READY, others)
        if layout.distributed:
            # It reads the sum as PUSH does: of a compressed tensor the others' shares are there before it.
            table[Q.COMPRESS] = table[Q.PUSH]
    elif layout.uses_host:
        table[Q.COPYH2D] = Wait(Signal.DO_COPYH2D, frozenset({layout.root}))
    if layout.crosses_switches and layout.switch == layout.num_switches - 1:
        twins = frozenset(range(layout.place, layout.local_size, layout.switch_size)) - {me}
        table[Q.PCIE_REDUCE] = Wait(Signal.PCIE_REDUCE_READY, twins)
    return {queue: wait for queue, wait in table.items() if wait.sources}

"""Point-to-point calls: who sends to whom, and which of their messages it is, counted from 1 (contract 1)."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from otel_dltrace.instrument._sites import Args, Kwargs
from otel_dltrace.instrument._torch.calls import Call
from otel_dltrace.instrument._torch.groups import c10d

ANY = -1
"""The source of a receive that takes from any rank, until it is done."""
MOST_NUMBERED = 1 << 17
"""So many kinds of messages are counted: a program may number its messages by their tags."""


@dataclass(frozen=True, slots=True)
class Ends:
    """One side of a message: by its rank in the world, the other side; whether this one sends."""

    group: str
    peer: int
    tag: int
    sends: bool


def ends_of(call: Call, group: Any, args: Args, kwargs: Kwargs) -> Ends:
    """Return between whom a *call* in *group* moves its message."""
    in_world, in_group = (call.argument(name, args, kwargs) for name in call.peer)
    tag = call.argument("tag", args, kwargs) or 0
    peer = ANY
    if in_world is not None:
        peer = int(in_world)
    elif in_group is not None:
        peer = rank_in_world(group, int(in_group))
    return Ends(group.group_name, peer, int(tag), call.sends)


def rank_in_world(group: Any, rank: int) -> int:
    """Return the rank in the world of *rank* in *group*; as it is where the group has no such rank."""
    try:
        return int(c10d().get_global_rank(group, rank))
    except ValueError:
        return rank


class Messages:
    """Numbers the messages of this process from 1, by group, source, destination and tag.

    Both sides count alike, since messages between two ranks with one tag do not overtake each
    other. A receive from any rank is counted when it is done, for its source is known only then.
    """

    def __init__(self) -> None:
        self._counts: Counter[Ends] = Counter()

    def number(self, ends: Ends) -> int:
        """Return the number of the next message between *ends*; 0, which is no number, where there are too many."""
        counts = self._counts
        number = counts[ends] + 1  # a counter has 0 for what it does not know
        if number == 1 and len(counts) >= MOST_NUMBERED:
            return 0
        counts[ends] = number
        return number

    def forget(self, group: str = "") -> None:
        """Count anew in *group* (by default in all): it is being destroyed, and its name may come again."""
        for ends in [ends for ends in self._counts if group in ("", ends.group)]:
            del self._counts[ends]

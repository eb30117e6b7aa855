"""Which communicator, window or file a call is made on: an id that all its ranks compute alike (contract 1)."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import count, repeat
from operator import index
from typing import Any

from otel_dltrace.model.identity import h64
from otel_dltrace.model.operation import MAX_DESCRIPTORS

UNKNOWN = ""
"""The id of a group that nobody saw being made: its operations have no number."""
NOBODY = -1
"""The peer of a call that has none, or one that is not known (yet)."""
Side = tuple[int, int, Iterator[int] | None]
"""The other side of messages: its rank in the world, their tag, and what numbers them; None: their status will tell."""
_UNNUMBERED = repeat(0)
_MOST_SIDES = 4096
_MOST_NUMBERED = 1 << 17
"""Of so many ranks and tags, sent to or received from, a group counts the messages; each takes a fifth of a KB."""
MOST_DESCRIBED = MAX_DESCRIPTORS // 2
"""Descriptors of operations, a few for each group that has an id; groups that a program makes further on have none."""


def number_of(value: Any, default: int = NOBODY) -> int:
    """Return the rank or tag *value*, *default* for None; NOBODY where it is no number, which the call will refuse."""
    if value is None:
        return default
    try:
        return int(value) if isinstance(value, float) else index(value)  # mpi4py takes both
    except (TypeError, ValueError, OverflowError):
        return NOBODY


class Group:
    """A communicator, a window or a file, as its ranks know it.

    Attributes:
        id: The same on all its ranks, "" if not known.
        size: How many ranks; of both sides, if it has two.
        last: The number of its last collective; they count from 1.
        persistent: How many persistent collectives have been made.
        made: How many groups have been made from it.
        is_given: MPI gives it, and it cannot be freed.
        described: Descriptors by operation, and then by type.
        sends: The other sides of sends, by the rank and the tag that the calls are given.
        receives: Likewise, of receives.
    """

    __slots__ = (
        *("_numbers", "_ranks", "described", "id", "is_given", "last", "made", "members", "persistent"),
        *("receives", "sends", "size"),
    )

    def __init__(
        self, group_id: str, size: int, ranks: dict[int, int] | None = None, *, is_given: bool = False
    ) -> None:
        self.id, self.size, self.is_given = group_id, size, is_given
        self.last = self.persistent = self.made = 0
        self.members: Counter[tuple[Any, ...]] = Counter()
        self.described: defaultdict[str, dict[Any, int]] = defaultdict(dict)
        self.sends: dict[tuple[Any, Any], Side] = {}
        self.receives: dict[tuple[Any, Any], Side] = {}
        self._ranks = ranks
        self._numbers: dict[tuple[str, int, int, bool], Iterator[int]] = {}

    def unnamed(self) -> "Group":
        """Return the same group as one without an id."""
        return Group(UNKNOWN, self.size, self._ranks)

    def number(self, series: str = "") -> int:
        """Return the number of the next collective of *series*; 0 where its ranks may count differently."""
        if not self.id:
            return 0
        if series:  # each rank may start it before or after others
            return next(self._numbers_of(series, 0, 0, sends=False))
        self.last += 1  # no two threads may call collectives of one group at a time
        return self.last

    def number_message(self, series: str, peer: int, tag: int, sends: bool) -> int:
        """Return the number of the next message to or from *peer* with *tag*, from 1; 0 if not known.

        Both sides count alike: messages between two ranks with one tag do not overtake each other.
        """
        return next(self._numbers_of(series, peer, tag, sends))

    def take_back(self, series: str, peer: int, tag: int, sends: bool | None) -> None:
        """Give the last number to the next message, or collective, too: the others never heard of what had it."""
        if sends is None:
            self.last -= 1
            return
        key = (series, peer, tag, sends)
        if key in self._numbers:
            self._numbers[key] = count(next(self._numbers[key]) - 1)
            (self.sends if sends else self.receives).clear()  # which count as before

    def _numbers_of(self, series: str, peer: int, tag: int, sends: bool) -> Iterator[int]:
        if not self.id or peer < 0 or tag < 0:
            return _UNNUMBERED
        key = (series, peer, tag, sends)
        try:
            return self._numbers[key]
        except KeyError:
            return self._numbers.setdefault(key, count(1)) if len(self._numbers) < _MOST_NUMBERED else _UNNUMBERED

    def side(self, handle: Any, rank: Any, tag: Any, *, sends: bool) -> Side:
        """Return the other side of a message for which a call on *handle* is given *rank* and *tag*; keep it."""
        given, number = number_of(rank), number_of(tag, 0 if sends else -1)
        peer = self.rank_in_world(handle, given)
        is_any = not sends and (given < 0 or number < 0)
        sides = self.sends if sends else self.receives
        if len(sides) >= _MOST_SIDES:  # a program may count with its tags
            sides.clear()
        sides[rank, tag] = side = peer, number, None if is_any else self._numbers_of("", peer, number, sends)
        return side

    def rank_in_world(self, handle: Any, rank: int) -> int:
        """Return the rank in the world of *rank* in the communicator, window or file *handle*."""
        if self._ranks is None or rank < 0:
            return rank if 0 <= rank < self.size else NOBODY
        known = self._ranks.get(rank)
        if known is None:
            known = self._ranks[rank] = _translate(handle, [rank])[0]
        return known


def _translate(handle: Any, ranks: list[int] | None, *, remote: bool = True) -> list[int]:
    """Return the ranks in the world of *ranks* (default: all) in *handle*; NOBODY for those of another world."""
    from mpi4py import MPI

    has_two_sides = remote and isinstance(handle, MPI.Intercomm)
    group = handle.Get_remote_group() if has_two_sides else handle.Get_group()
    try:
        if ranks is not None and not 0 <= min(ranks) <= max(ranks) < group.Get_size():
            return [NOBODY] * len(ranks)  # Open MPI does not look before it reads; the call will refuse it
        return _translate_members(group, ranks)
    finally:
        group.Free()


def _translate_members(group: Any, ranks: list[int] | None) -> list[int]:
    """Return the ranks in the world of *ranks* (default: all) in the group *group* of MPI."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Get_group()
    try:
        return [max(rank, NOBODY) for rank in group.Translate_ranks(ranks, world)]
    finally:
        world.Free()


def _sides(comm: Any) -> list[list[int]]:
    """Return who is in *comm*, by rank in the world: two sorted lists if it has two sides."""
    sides = [_translate(comm, None, remote=False)]
    if comm.Is_inter():
        sides.append(_translate(comm, None))
    return sorted(sides)


class Groups:
    """The communicators, windows and files of one process.

    Attributes:
        known: By handle.
        described: How many descriptors their operations have.
    """

    def __init__(self, module: Any) -> None:
        self._error = module.Exception
        world, alone = module.COMM_WORLD, module.COMM_SELF
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self.world = Group("world", self.size, is_given=True)
        # Each rank has its own: the id must not be another rank's.
        mine = Group(f"self.{self.rank}", 1, {0: self.rank}, is_given=True)
        self.known = {world.handle: self.world, alone.handle: mine}
        self._makers: dict[str, Group] = {}
        self._unseen: set[int] = set()
        self._described: dict[int, defaultdict[str, dict[Any, int]]] = {}
        self.described = 0

    @property
    def is_full(self) -> bool:
        """Whether what a program makes from now on has no id, and so no descriptors of its own."""
        return self.described >= MOST_DESCRIBED

    def of(self, handle: Any) -> Group | None:
        """Return the group of *handle*; None where it is none, which is for the call to refuse."""
        try:
            return self.known[handle.handle]
        except KeyError:
            pass
        except AttributeError:
            return None
        if not handle:
            return None
        with suppress(self._error, AttributeError):
            size = _size_of(handle) if hasattr(handle, "Get_rank") else 0
            group = self.known[handle.handle] = Group(UNKNOWN, size, {})
            group.described = self._described.setdefault(size, group.described)
            self._unseen.add(handle.handle)
            return group
        return None

    def makers(self, parent: Group, members: Any, tag: Any) -> Group:
        """Return those who make a group of *members* of *parent*: the others of it neither call nor count."""
        who = _translate_members(members, None)
        name = parent.id and f"{parent.id}.{h64('mpi', 'makers', repr(who), str(tag)):016x}"
        return self._makers.setdefault(name, Group(name, len(who), {}))

    def made(self, parent: Group, part: str, value: Any, new: Any) -> None:
        """Know that *new* was made from *parent*, which all its ranks do in the same order.

        Args:
            parent: The group that made it.
            part: What tells it from others that one call makes: see `Call`.
            value: The argument that *part* names.
            new: A communicator, window or file; a null one where this rank is outside.
        """
        if part != "members":
            parent.made += 1  # on every rank, also on one that is outside of the new one
        if not new:
            return
        self.known[new.handle] = Group(self._id_of(parent, part, value, new), _size_of(new), {})

    def _id_of(self, parent: Group, part: str, value: Any, new: Any) -> str:
        if not parent.id or part == "unknown" or self.is_full:
            return UNKNOWN
        if part == "members":
            # Only its members call it, and those of a second side have another parent.
            sides = _sides(new)
            if any(NOBODY in side for side in sides):
                return UNKNOWN
            who = repr(sides)
            key = (who, value)
            self.world.members[key] += 1
            return f"{h64('mpi', 'members', who, str(value), self.world.members[key]):016x}"
        what = repr(_sides(new)) if part == "ranks" else f"{part} {value}"
        return f"{h64('mpi', parent.id, parent.made, what):016x}"

    def forget(self, handle: int) -> None:
        """Know that the group of *handle* is gone: the number may come again for another."""
        known = self.known.get(handle)
        if known is not None and not known.is_given:
            del self.known[handle]
        # mpi4py frees duplicates that it made for itself along with what they are of, and nobody sees either. So all
        # that nobody saw being made is asked about anew.
        with suppress(KeyError):  # other threads forget them, too
            while True:
                unseen = self._unseen.pop()
                if unseen in self.known and self.known[unseen].id == UNKNOWN:
                    self.known.pop(unseen, None)


def _size_of(new: Any) -> int:
    if hasattr(new, "Get_remote_size"):
        return int(new.Get_size() + new.Get_remote_size())
    if hasattr(new, "Get_rank"):
        return int(new.Get_size())
    group = new.Get_group()
    try:
        return int(group.Get_size())
    finally:
        group.Free()

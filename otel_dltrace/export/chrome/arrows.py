"""Arrows between slices that are drawn at different times, as spans end: links, remote parents, collectives."""

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import NamedTuple, TypeVar

KEPT = 1 << 14
"""Slices that an arrow can still begin at, and arrows that wait for their begin: older ones are forgotten."""
_ENDS = 64
"""Arrows from one slice that wait."""
_ARROW = '{"ph":"%s","id":"0x%016x","pid":%d,"tid":%d,"ts":%d.%04d,"bp":"e","name":"%s","cat":"%s"}'
Value = TypeVar("Value")


class Place(NamedTuple):
    """Where a slice is drawn; *ns* is its start."""

    pid: int
    tid: int
    ns: int


class Line(NamedTuple):
    """One event and its lane."""

    pid: int
    tid: int
    text: bytes


class Arrows:
    """The ends that are known, and those that wait for their begin."""

    def __init__(self, first: int) -> None:
        self._number = first
        self._drawn: OrderedDict[Hashable, Place] = OrderedDict()
        self._waiting: OrderedDict[Hashable, list[tuple[str, Place]]] = OrderedDict()

    def drawn(self, key: Hashable, place: Place) -> Iterator[Line]:
        """Yield the arrows that waited for the slice *key*, which is drawn at *place*."""
        _keep(self._drawn, key, place)
        for kind, end in self._waiting.pop(key, ()):
            yield from self._join(kind, place, end)

    def link(self, kind: str, key: Hashable, place: Place) -> Iterator[Line]:
        """Yield the arrow from the slice *key* to the one at *place*, or have it wait."""
        begin = self._drawn.get(key)
        if begin is not None:
            yield from self._join(kind, begin, place)
        else:
            waiting = self._waiting.get(key, [])
            _keep(self._waiting, key, [*waiting, (kind, place)][-_ENDS:])

    def chain(self, kind: str, key: Hashable, place: Place) -> Iterator[Line]:
        """Yield the arrow between *place* and the one given before with this *key*, if that is of another process."""
        before = self._drawn.get(key)
        if before is not None and before.pid != place.pid:
            yield from self._join(kind, before, place)
        _keep(self._drawn, key, place)

    def forget(self) -> None:
        """Forget all ends: a new file has none of them."""
        self._drawn.clear()
        self._waiting.clear()

    def _join(self, kind: str, one: Place, other: Place) -> Iterator[Line]:
        self._number += 1
        # Viewers drop an arrow that ends before it begins: a link to what began later is turned round.
        begin, end = sorted((one, other), key=lambda place: place.ns)
        # Half a ns inside the slice: at its very start rounding can put the arrow's end before it.
        for phase, (pid, tid, ns) in (("s", begin), ("f", end)):
            text = _ARROW % (phase, self._number, pid, tid, ns // 1000, ns % 1000 * 10 + 5, kind, kind)
            yield Line(pid, tid, text.encode())


def _keep(table: OrderedDict[Hashable, Value], key: Hashable, value: Value) -> None:
    table[key] = value
    table.move_to_end(key)
    if len(table) > KEPT:
        table.popitem(last=False)

"""The latest slices of each lane, for a parent that ends, and so is drawn, after its children were."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from otel_dltrace.export.chrome.lanes import Lanes

KEPT = 1024
"""Slices remembered per lane (those of one parent count as one): the parent of an older one is drawn on another."""


class Root(NamedTuple):
    """A slice at the bottom of a lane, or several in a row that have one parent.

    *until* is its end, or 1 ns after its start.
    """

    family: int
    lane: int
    start: int
    end: int
    until: int
    parent: object


@dataclass
class _Row:
    roots: deque[Root]
    floor: int = 0
    """Before this time the lane is not known any more."""


class Roots:
    """What is at the bottom of the lanes of one process."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes
        self._rows: dict[tuple[int, int], _Row] = {}
        self._waiting: dict[object, list[Root]] = {}

    def take_below(self, parents: Iterable[object]) -> list[Root]:
        """Return the slices whose parents have come now; nobody will ask for them again."""
        return [root for parent in parents for root in self._waiting.pop(parent, ())]

    def add(self, root: Root) -> None:
        """Remember a slice; it comes after all others of its lane."""
        row = self._rows.setdefault((root.family, root.lane), _Row(deque()))
        if row.roots and row.roots[-1].parent == root.parent:
            before = row.roots.pop()
            root = root._replace(start=before.start)
            self._forget(before)
        row.roots.append(root)
        if root.parent is not None:
            self._waiting.setdefault(root.parent, []).append(root)
        if len(row.roots) > KEPT:
            old = row.roots.popleft()
            row.floor = old.until
            self._forget(old)

    def adopt(self, root: Root, below: list[Root]) -> int:
        """Return the lane on which *root* can be drawn around *below*, slices that belong in it; -1 if there is none.

        All that the lane has since *root* began must be among them: else a foreign slice would look like its child.
        """
        lane = below[-1].lane
        row = self._rows[root.family, lane]
        inside = []
        while row.roots and row.roots[-1].until > root.start:
            inside.append(row.roots.pop())
        if root.start < row.floor or not all(one in below and one.start > root.start for one in inside):
            row.roots.extend(reversed(inside))
            return -1
        self.add(root._replace(lane=lane))
        taken = self._lanes.taken[root.family]
        taken[lane] = max(taken[lane], root.until)
        return lane

    def _forget(self, root: Root) -> None:
        siblings = self._waiting.get(root.parent, [])
        if root in siblings:
            siblings.remove(root)
            if not siblings:
                del self._waiting[root.parent]

"""Spans whose parent is in another process: they belong to its step, and hang below its span."""

import numpy as np

from otel_dltrace.export.rings.records import PARENT_DTYPE
from otel_dltrace.model.arrays import Column, places_in
from otel_dltrace.model.semconv import Flag
from otel_dltrace.model.spans import empty_rows, stack_rows

MOST_WAITING = 10_000
"""Parents whose spans were overwritten before they were read."""
_REMOTE = np.uint16(Flag.REMOTE)


class RemoteParents:
    """Brings the spans of one ring together with their parents.

    A parent is written just before its span. But a scan reads chunk after chunk, so where a chunk ends between the two
    the span may come one scan earlier: it is held for so long.

    Attributes:
        held: Spans that wait for their parents.
    """

    def __init__(self) -> None:
        self.held = empty_rows()
        self._parents = np.zeros(0, PARENT_DTYPE)

    def place(self, rows: Column, parents: Column, is_last: bool) -> Column:
        """Return *rows*, and those held, in the steps and below the parents that *parents*, new ones, tell.

        Args:
            rows: Finished spans.
            parents: Rows of `PARENT_DTYPE`.
            is_last: Whether nothing more will come.
        """
        if not (len(parents) or len(self.held) or np.bitwise_or.reduce(rows["flags"]) & _REMOTE):
            return rows
        is_remote = rows["flags"] & _REMOTE != 0
        parents = np.concatenate([self._parents, parents])[-MOST_WAITING:]
        waited = len(self.held)
        children = stack_rows([self.held, rows.compress(is_remote)])
        known = places_in(children["span_no"], parents["span_no"])
        found = np.flatnonzero(known >= 0)
        for name, value in (("step", "step"), ("parent_id", "span")):
            children[name][found] = parents[value][known[found]]
        self._parents = np.delete(parents, known[found])
        lost = known < 0
        children["flags"][lost] &= ~_REMOTE
        stays = lost & (np.arange(len(children)) >= waited) & (not is_last)
        self.held = children.compress(stays)
        self.held["flags"] |= _REMOTE
        return stack_rows([rows.compress(~is_remote), children.compress(~stays)])

"""One descriptor table for what a ring holds and what else is told of its process."""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from otel_dltrace.model.arrays import Column
from otel_dltrace.model.descriptors import Descriptors
from otel_dltrace.model.operation import OTHER, Descriptor


class JointNames:
    """Numbers descriptors by what they say.

    Args:
        written: The process's table as far as it is in the run directory; its numbers stay.
    """

    def __init__(self, written: Sequence[Descriptor]) -> None:
        self._table: list[Descriptor] = list(written) or [OTHER]
        self._numbers: dict[Descriptor, int] = {}
        for number, descriptor in enumerate(self._table):
            self._numbers.setdefault(descriptor, number)
        self._of_ring: list[int] = []
        self._holes: list[int] = []
        self._made = Descriptors(())

    @property
    def descriptors(self) -> Descriptors:
        """The table so far."""
        if len(self._made) != len(self._table):
            self._made = Descriptors.of(self._table)
        return self._made

    def number(self, descriptor: Descriptor) -> int:
        """Return the number of *descriptor* in the table."""
        number = self._numbers.get(descriptor)
        if number is None:
            number = self._numbers[descriptor] = len(self._table)
            self._table.append(descriptor)
        return number

    def translate(self, rows: Column, ring: Sequence[Descriptor]) -> Column:
        """Return a copy of *rows*, whose numbers are of the table *ring*, with those of this one."""
        new = range(len(self._of_ring), len(ring))
        self._of_ring += [0] * len(new)
        for number in chain(self._holes, new):
            self._of_ring[number] = self.number(ring[number])
        # A number may be known before its name, where a signal handler's name overtook it.
        self._holes = [number for number in chain(self._holes, new) if ring[number] is OTHER]
        rows = rows.copy()
        places = np.array([*self._of_ring, self.number(OTHER)], np.uint32)
        rows["descriptor"] = places[np.minimum(rows["descriptor"], len(self._of_ring))]
        return rows

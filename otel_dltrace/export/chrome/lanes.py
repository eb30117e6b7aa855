"""The lanes of a process in a Chrome trace: which there are, their names, and their places among each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from otel_dltrace.model import semconv as s

STEPS, STAGES, OPERATIONS, PHASES = range(4)
FAMILIES = ("steps", "stages", "operations", "phases")
TOTAL = -1
"""In place of a partition: the push_pull of the whole tensor."""
MOST_TENSORS = 1 << 12
"""Tensors of Horovod that get lanes of their own, in a process: a program may name new ones without end."""
_HOROVOD = -2  # in place of a declared key
_FURTHER_TID, _FURTHER_PLACE = 1 << 24, 10_000_000
_MOST_FURTHER = 1 << 16
_PARTITIONS = 1 << 10
"""Partitions of a tensor that are kept in order; those of more than 4 GB come together at its end."""


@dataclass
class Lanes:
    """The lanes of one process: by family, the time until which each lane is taken.

    It outlives a batch, since a span may last into the next one.

    Attributes:
        families: The names of the families.
        stride: The largest number of families there will be.
        taken: For each family, for each of its lanes.
        further: Families beyond the stride, of tensors: by tensor, declared key and partition.
        pid: The number of the process in the trace.
    """

    families: list[str] = field(default_factory=lambda: list(FAMILIES))
    stride: int = len(FAMILIES)
    taken: list[list[int]] = field(default_factory=lambda: [[] for _ in FAMILIES])
    further: dict[tuple[str, int, int], int] = field(default_factory=dict)
    pid: int = 1
    _places: list[int] = field(default_factory=list)
    _tensors: dict[str, int] = field(default_factory=dict)
    _horovod: int = 0

    def counts(self) -> list[int]:
        """Return how many lanes each family has."""
        return [len(lanes) for lanes in self.taken]

    def family(self, name: str) -> int:
        """Return the number of the family *name*, a new one if need be; the last of all takes what is too many."""
        if name not in self.families and len(self.families) < self.stride:
            self.families.append(name)
            self.taken.append([])
        return self.families.index(name) if name in self.families else self.stride - 1

    def push_pull(self, tensor: str, key: int, partition: int) -> int:
        """Return the family of a *partition* of *tensor* (or `TOTAL`); *key* is the declared one, -1 for none."""
        known = self.further.get((tensor, key, partition))
        if known is not None:
            return known
        if len(self.further) == _MOST_FURTHER:
            return len(self.families) - 1
        number = key << 16 | partition if key >= 0 else partition
        name = f"{tensor or s.PUSH_PULL} " + ("total" if partition == TOTAL else f"key {number}")
        return self._further(tensor, key, partition, name)

    def horovod(self, tensor: str) -> int | None:
        """Return the family of *tensor*, as Horovod's timeline has a lane for each; None once there are too many."""
        known = self.further.get((tensor, _HOROVOD, TOTAL))
        if known is not None:
            return known
        if self._horovod == MOST_TENSORS or len(self.further) == _MOST_FURTHER:
            return None
        self._horovod += 1
        return self._further(tensor, _HOROVOD, TOTAL, tensor)

    def _further(self, tensor: str, key: int, partition: int, name: str) -> int:
        # By declaration, where that is known: as the tensors come in the model.
        at = key if key >= 0 else _MOST_FURTHER + self._tensors.setdefault(tensor, len(self._tensors))
        self._places.append(_FURTHER_PLACE + at * _PARTITIONS + min(partition + 1, _PARTITIONS - 1))
        self.families.append(name)
        self.taken.append([])
        self.further[tensor, key, partition] = len(self.families) - 1
        return len(self.families) - 1

    def thread(self, family: Any, lane: Any) -> Any:
        """Return the thread id of a lane; from 1, since Perfetto takes thread 0 for the kernel's idle task."""
        further = family >= self.stride
        # Lanes of one family are far apart there: how many families there will be is not known.
        number = (1 + family + self.stride * lane) * (1 - further) + (_FURTHER_TID + family + (lane << 16)) * further
        return self.turned(number)

    def turned(self, number: Any) -> Any:
        """Return *number* of a thread with 1 and the process's own exchanged; turned again it is as it was.

        Perfetto takes the thread with its process's number for the main one, and draws it above all: let it be steps.
        """
        return number + (number == 1) * (self.pid - 1) + (number == self.pid) * (1 - self.pid)

    def names(self, before: Sequence[int]) -> Iterator[tuple[int, str, int]]:
        """Yield (thread id, name, place among the others) of the lanes that are new since *before* (by family)."""
        for family, lanes in enumerate(self.taken):
            for lane in range(before[family] if family < len(before) else 0, len(lanes)):
                yield (self.thread(family, lane), *self.name_of(family, lane))

    def name_of(self, family: int, lane: int) -> tuple[str, int]:
        """Return the name of a lane and its place among the others."""
        name = self.families[family] + (f" {lane + 1}" if lane else "")
        return name, self._places[family - self.stride] if family >= self.stride else family * 1_000_000 + lane

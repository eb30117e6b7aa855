"""The queue before a stage: it gives out a partition once all that the stage waits for has been signalled."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from operator import itemgetter
from typing import Any, Protocol

from otel_dltrace.model.queue_types import QueueType
from otel_dltrace.pushpull.errors import MismatchError, PeerLostError, PushPullError, shown
from otel_dltrace.pushpull.stages import Wait


class Queued(Protocol):
    """What a queue has to know about a partition."""

    key: int
    nbytes: int

    @property
    def name(self) -> str:
        """The tensor's name."""

    @property
    def mark(self) -> int:
        """The tensor's fingerprint."""

    @property
    def priority(self) -> int:
        """Higher goes first, where the queue is scheduled."""


_Entry = tuple[int, int, int, Any]
"""A partition behind what orders it: its priority and key where the queue is scheduled, and when it came."""


@dataclass(slots=True)
class StageQueue:
    """First come, first served among the partitions that are ready.

    With *credit* it is scheduled: the highest priority first, then the lowest key; and no more than *credit* bytes
    are between `take` and `finished`.
    """

    queue: QueueType
    wait: Wait | None = None
    credit: int | None = None
    _waiting: dict[int, _Entry] = field(default_factory=dict)
    _ready: dict[int, list[_Entry]] = field(default_factory=dict)
    """Heaps of those for which all is signalled: one for each size where there is a credit, else one."""
    _signals: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    _left: set[int] = field(default_factory=set)
    _error: PushPullError | None = None
    _closed: bool = False
    _numbers: Iterator[int] = field(default_factory=count)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, task: Queued) -> None:
        """Add a partition."""
        with self._changed:
            order = (0, 0) if self.credit is None else (-task.priority, task.key)
            self._waiting[task.key] = (*order, next(self._numbers), task)
            self._look_at(task.key)

    def take(self) -> Any:
        """Return the next partition that is ready, None when the queue was closed.

        Raises:
            PeerLostError: A partition waits for a local rank that has left.
            MismatchError: A local rank means another tensor by the same key.
        """
        with self._changed:
            while not self._closed:
                affordable = [heap for size, heap in self._ready.items() if heap and self._affordable(size)]
                if affordable:
                    return self._taken(heappop(min(affordable, key=itemgetter(0)))[-1])
                if self._error is not None:
                    raise self._error
                self._changed.wait()
        return None

    def finished(self, task: Queued) -> None:
        """Give back the credit of a partition that is through with the stage."""
        if self.credit is not None:
            with self._changed:
                self.credit += task.nbytes
                self._changed.notify()

    def signalled(self, source: int, key: int, mark: int) -> None:
        """Note that local rank *source* is ready for *key*."""
        with self._changed:
            self._signals[key][source] = mark
            self._look_at(key)

    def left(self, source: int) -> None:
        """Note that local rank *source* sends no more."""
        with self._changed:
            self._left.add(source)
            for key in [*self._waiting]:
                self._look_at(key)

    def close(self) -> None:
        """Let whoever takes go home."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def waiting_for(self, key: int) -> list[int]:
        """Return the local ranks that have not signalled *key*."""
        return sorted(self._missing(key))

    def _missing(self, key: int) -> AbstractSet[int]:
        return self.wait.sources - self._signals.get(key, {}).keys() if self.wait else frozenset()

    def _look_at(self, key: int) -> None:
        """See whether a partition that waits has become ready, or never will."""
        if key not in self._waiting:
            return
        task, missing = self._waiting[key][-1], self._missing(key)
        self._error = self._error or self._trouble(task, missing)
        if not missing and self._error is None:
            size = 0 if self.credit is None else task.nbytes
            heappush(self._ready.setdefault(size, []), self._waiting.pop(key))
        if not missing or self._error is not None:
            self._changed.notify()

    def _affordable(self, size: int) -> bool:
        return self.credit is None or size <= self.credit

    def _taken(self, task: Queued) -> Queued:
        self._signals.pop(task.key, None)
        if self.credit is not None:
            self.credit -= task.nbytes
        return task

    def _trouble(self, task: Queued, missing: AbstractSet[int]) -> PushPullError | None:
        """Return why *task*, for which *missing* are to signal, cannot be done."""
        for source, mark in self._signals.get(task.key, {}).items():
            if mark != task.mark:
                return MismatchError(
                    f"key {task.key} is {shown(task.name)} here and another tensor on local rank {source}: declare the "
                    "same tensors with the same sizes in the same order everywhere"
                )
        if gone := missing & self._left:
            return PeerLostError(f"local rank {min(gone)} has shut down and never got to {shown(task.name)}")
        return None

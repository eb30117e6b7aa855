"""The queue before a stage: it gives out a partition once all that the stage waits for has been signalled."""

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Protocol

from otel_dltrace.model.queue_types import QueueType
from otel_dltrace.pushpull.errors import MismatchError, PeerLostError
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


@dataclass(slots=True)
class StageQueue:
    """First come, first served among the partitions that are ready.

    With *credit* it is scheduled: the highest priority first, then the lowest key; and no more than *credit* bytes
    are between `take` and `finished`.
    """

    queue: QueueType
    wait: Wait | None = None
    credit: int | None = None
    _tasks: list[Any] = field(default_factory=list)
    _signals: dict[int, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))
    _left: set[int] = field(default_factory=set)
    _closed: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def put(self, task: Queued) -> None:
        """Add a partition."""
        with self._changed:
            self._tasks.append(task)
            if self.credit is not None:
                self._tasks.sort(key=lambda one: (-one.priority, one.key))
            self._changed.notify()

    def take(self) -> Any:
        """Return the next partition that is ready, None when the queue was closed.

        Raises:
            PeerLostError: A partition waits for a local rank that has left.
            MismatchError: A local rank means another tensor by the same key.
        """
        with self._changed:
            while not self._closed:
                for position, task in enumerate(self._tasks):
                    if self._affordable(task) and self._ready(task):
                        del self._tasks[position]
                        self._signals.pop(task.key, None)
                        if self.credit is not None:
                            self.credit -= task.nbytes
                        return task
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
            self._changed.notify()

    def left(self, source: int) -> None:
        """Note that local rank *source* sends no more."""
        with self._changed:
            self._left.add(source)
            self._changed.notify_all()

    def close(self) -> None:
        """Let whoever takes go home."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def waiting_for(self, key: int) -> list[int]:
        """Return the local ranks that have not signalled *key*."""
        return sorted(self.wait.sources - self._signals.get(key, {}).keys()) if self.wait else []

    def _affordable(self, task: Queued) -> bool:
        return self.credit is None or task.nbytes <= self.credit

    def _ready(self, task: Queued) -> bool:
        if self.wait is None:
            return True
        signals = self._signals.get(task.key, {})
        for source, mark in signals.items():
            if mark != task.mark:
                raise MismatchError(
                    f"key {task.key} is {task.name!r} here and another tensor on local rank {source}: declare the "
                    "same tensors with the same sizes in the same order everywhere"
                )
        missing = self.wait.sources - signals.keys()
        if gone := missing & self._left:
            raise PeerLostError(f"local rank {min(gone)} has shut down and never got to {task.name!r}")
        return not missing

"""Who is late: what keeps an operation that is not done in time."""

import time
from collections.abc import Mapping

from otel_dltrace.model.queue_types import QueueType
from otel_dltrace.pushpull.errors import shown
from otel_dltrace.pushpull.layout import Layout
from otel_dltrace.pushpull.queues import StageQueue
from otel_dltrace.pushpull.tasks import Operation, Task

SERVER_S = 5.0
"""How much longer than a server's own patience its answer may take."""
_BETWEEN_S = 1.0
"""How much of the time between two polls counts at most: who asks no more often does other things."""
_SERVED = (QueueType.PUSH, QueueType.PULL, QueueType.COPYH2D)


def is_served(operation: Operation, layout: Layout) -> bool:
    """Return whether *operation* waits for a server, which has the same timeout and knows who is late."""
    task = _slowest(operation)
    return layout.distributed and task is not None and task.queue in _SERVED


def is_late(operation: Operation, layout: Layout, limit: float) -> bool:
    """Return whether *operation*, now asked for in vain, was so for as long as anybody waits: *limit* seconds."""
    now = time.monotonic()
    operation.awaited += min(now - (operation.asked or now), _BETWEEN_S)
    operation.asked = now
    over = operation.awaited - limit
    return over > 0 and not (over < limit + SERVER_S and is_served(operation, layout))


def complaint(operation: Operation, queues: Mapping[QueueType, StageQueue], limit: float) -> str:
    """Say who, or what, kept the partition of *operation* that is furthest behind for *limit* seconds."""
    task, name = _slowest(operation), shown(operation.tensor.name)
    if task is None:
        return f"not done within {limit:g} s: the last partition of {name} has just come"
    ranks = ", ".join(map(str, queues[task.queue].waiting_for(task.key)))
    late = f"no word from local rank {ranks}" if ranks else "not done"
    return f"{late} within {limit:g} s: partition {task.partition} of {name} is at {task.queue.name}"


def _slowest(operation: Operation) -> Task | None:
    """Return the partition that is furthest behind."""
    waiting = (task for task in operation.tasks if not task.through)
    return min(waiting, key=lambda task: task.at, default=None)

"""How many samples a batch has, and which of the batches that wait a forward is given."""

from collections import UserDict, deque
from collections.abc import Hashable, Iterable
from itertools import islice
from typing import Any

from otel_dltrace.record.guard import pass_on

MOST_PARTS = 8


def batch_size(batch: Any, depth: int = 3) -> int:
    """Return the first dimension of the first tensor in *batch*, 0 where there is none near its top."""
    shape = getattr(batch, "shape", None)
    if shape is not None:
        rows = shape[0] if len(shape) else 0
        # While a graph is made of the model it is no int, and to make one of it would be a part of the graph.
        return rows if isinstance(rows, int) else 0
    if not depth:
        return 0
    for part in _parts(batch):
        size = batch_size(part, depth - 1)
        if size:
            return size
    return 0


def _parts(batch: Any) -> Iterable[Any]:
    """Return the first parts of *batch*; of a mapping what it holds, since one may compute what it is asked for."""
    if isinstance(batch, (list, tuple)):
        return batch[:MOST_PARTS]
    held = vars(batch).get("data") if isinstance(batch, UserDict) else batch  # as the batches of transformers do
    return islice(dict.values(held), MOST_PARTS) if isinstance(held, dict) else ()


def take(waiting: deque[tuple[Hashable, int]], given: object) -> int:
    """Return the size of what a forward is *given* of the batches *waiting*, each with its source; it waits no more.

    It is the oldest one, or all of several loaders joined, as the size of what is given tells. Those
    before it were left out (a peek, a batch that was skipped), and would shift all that follow.
    """
    try:
        rows = batch_size(given)
    except Exception as broken:  # noqa: BLE001  -- an argument of one's own class may say of its shape what it likes
        pass_on(broken)
        rows = 0
    sizes = [size for _, size in waiting]
    if rows in sizes:
        for _ in range(sizes.index(rows)):
            waiting.popleft()
    elif rows == sum(dict(waiting).values()):  # the latest of each source
        waiting.clear()
        return rows
    return waiting.popleft()[1]

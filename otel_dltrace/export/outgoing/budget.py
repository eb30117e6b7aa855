"""What of a step goes out where the budget has no room for all, and where the rest of it then hangs (contract 5)."""

import numpy as np

from otel_dltrace.model.arrays import Column
from otel_dltrace.model.semconv import Level

_DEEPEST = 64
"""Spans below spans that are left out, as far as a parent is looked for above them."""
_REMEMBERED = 16
"""Steps of which it is known what was left out, for what ends later than they do."""


class StepBudget:
    """Keeps steps within the budget, also in pieces: what comes late hangs where its step's spans do."""

    def __init__(self) -> None:
        self._left_out: dict[int, Column] = {}

    def within(self, step: int, rows: Column, limit: int) -> Column:
        """Return *rows*, of *step*, without their finest levels, as many as it takes to be at most *limit* spans.

        What was below a span that is left out, now or before, hangs under the next one above that is there.
        """
        if len(rows) <= limit and step not in self._left_out:
            return rows
        kept, left_out = _divided(rows, limit)
        before = self._left_out.pop(step, None)
        if before is not None:
            left_out = np.concatenate([before, left_out])
        if not len(left_out):
            return kept
        self._left_out[step] = left_out
        if len(self._left_out) > _REMEMBERED:
            del self._left_out[next(iter(self._left_out))]
        return hung_higher(kept, left_out)

    def left_out(self, step: int) -> Column | None:
        """Return what *step* left out, ids and their parents' (n, 2), None where that is nothing."""
        return self._left_out.get(step)


def _divided(rows: Column, limit: int) -> tuple[Column, Column]:
    """Return what there is room for, and of the rest ids and their parents', shape (n, 2)."""
    kept = rows
    for level in (Level.PARTITION, Level.PHASE, Level.COLLECTIVE):
        if len(kept) <= limit:
            break
        kept = rows.compress(rows["level"] < level)
    finest = kept["level"].max(initial=0) if len(kept) < len(rows) else Level.PARTITION
    left_out = rows.compress(rows["level"] > finest)
    return kept, np.stack([left_out["span_id"], left_out["parent_id"]], axis=1)


def hung_higher(rows: Column, left_out: Column) -> Column:
    """Return *rows*, each under the nearest span above that is not *left_out* (ids and their parents')."""
    parents, above = rows["parent_id"].tolist(), dict(left_out.tolist())
    for _ in range(_DEEPEST):
        higher = [above.get(parent, parent) for parent in parents]
        if higher == parents:
            break
        parents = higher
    out: Column = rows.copy()
    out["parent_id"] = parents
    return out

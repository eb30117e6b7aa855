"""How many spans a trace outside any step may hold (contract 5)."""

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from otel_dltrace.export.outgoing.gate import Outgoing
from otel_dltrace.export.rundir.traces import PHASES, parts_outside
from otel_dltrace.model.arrays import Column, distinct, is_among, places_in
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.spans import SpanBatch, stack_rows

_REMEMBERED = 1024


class _Sent(NamedTuple):
    """Of one trace: how many spans went out, and which ones, of those above them, are still to come."""

    number: int = 0
    owed: frozenset[int] = frozenset()


class OutsideBudget:
    """Keeps traces outside any step within the budget: of each the spans that began first.

    Every rank may send as many into one of them: operations are numbered alike on all, so the first ones of
    a trace are there of every rank. A phase that is itself a trace's top always goes out, and so does what a
    span that went out hangs under: it ends, and comes, after it.

    Args:
        bind: Who the rank is.
        budget: Spans per trace, 0 for no limit.
    """

    def __init__(self, bind: Bind, budget: int) -> None:
        self._most = max(1, budget // max(1, bind.world_size + bind.servers)) if budget > 0 else 0
        self._sent: dict[int, _Sent] = {}

    def within(self, outgoing: Outgoing, batch: SpanBatch) -> Outgoing:
        """Return of *outgoing*, whose rows are *batch*'s and outside any step, what its traces have room for."""
        if not self._most:
            return outgoing
        parts, which = distinct(parts_outside(batch))
        to_come = batch.above.compress(places_in(batch.above["span_id"], batch["span_id"]) < 0)
        rows = stack_rows(
            [self._chosen(part, batch.rows.compress(which == at), to_come) for at, part in enumerate(parts.tolist())]
        )
        while len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]
        return outgoing._replace(rows=rows, left_out=len(batch) - len(rows))

    def _chosen(self, part: int, rows: Column, to_come: Column) -> Column:
        sent = self._sent.get(part, _Sent())
        is_due = is_among(rows["span_id"], _ids(sent.owed)) | (rows["parent_id"] == 0) & (part >= PHASES)
        due, others = rows.compress(is_due), rows.compress(~is_due)
        owed = sent.owed.difference(due["span_id"].tolist())
        others = _first(others, self._most - sent.number - len(due) - len(owed))
        above = owed | _above(stack_rows([due, others]), to_come)
        # Each that goes out may need another one above it, for which there must be room as well.
        over = sent.number + len(due) + len(others) + len(above) - self._most
        if over > 0:
            others = _first(others, len(others) - over)
            above = owed | _above(stack_rows([due, others]), to_come)
        kept = stack_rows([due, others])
        # Once one is left out, none follows that may hang under it.
        number = sent.number + len(kept) if len(kept) == len(rows) else self._most - len(above)
        self._sent[part] = _Sent(number, above)
        return kept


def _first(rows: Column, most: int) -> Column:
    """Return the *most* of *rows* that began first, in the order in which they are."""
    if len(rows) <= most:
        return rows
    return rows.take(np.sort(np.lexsort((rows["level"], rows["start"]))[: max(0, most)]))


def _above(rows: Column, to_come: Column) -> frozenset[int]:
    """Return the ids of what *rows* hang under, near and far, and that is *to_come*: open still, or ended later."""
    found: set[int] = set()
    below = rows
    while len(below) and len(to_come):
        at = places_in(below["parent_id"], to_come["span_id"])
        is_later = (at >= 0) & ((to_come["end"][at] == 0) | (to_come["end"][at] >= below["end"]))
        below = to_come.take(distinct(at.compress(is_later))[0])
        below = below.compress(~is_among(below["span_id"], _ids(found)))  # damaged rows may hang under each other
        found.update(below["span_id"].tolist())
    return frozenset(found)


def _ids(spans: Collection[int]) -> Column:
    # Of a list in which some do not fit into 63 bits numpy makes floats, which take neighbours for one.
    return np.fromiter(spans, np.uint64, len(spans))

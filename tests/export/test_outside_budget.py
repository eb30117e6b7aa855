"""Traces outside any step keep to the budget, and what is left out leaves nothing without its parent."""

from collections.abc import Iterator

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_dltrace.export.outgoing.gate import Outgoing
from otel_dltrace.export.outgoing.outside_budget import OutsideBudget
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import Process, SpanBatch, empty_rows, stack_rows
from otel_dltrace.model.time import Anchor

BIND = Bind("job", "0", world="w", role="worker", rank=0, world_size=2)
DESCRIPTORS = [Descriptor("phase", "solve"), Descriptor("collective", "all_reduce")]
PHASE, OPERATION = range(len(DESCRIPTORS))
TOP = (1 << 63) - 1
"""Ids of spans are on both sides of what fits into 63 bits."""


def deliveries(parents: list[int], cuts: list[int]) -> Iterator[SpanBatch]:
    """Yield a phase's spans as the drain passes them on: what is below a span ends, and comes, before it.

    The first one is the phase; number *i + 1* hangs under one before it, the *parents[i]*-th from the end.
    """
    rows = empty_rows(len(parents) + 1)
    rows["step"], rows["seq"], rows["level"] = NO_STEP, 1, 2
    rows["start"] = np.arange(1, len(rows) + 1)
    rows["span_id"] = [TOP + number for number in range(len(rows))]
    rows["parent_id"][1:] = [TOP + max(0, number - back) for number, back in enumerate(parents, 1)]
    rows["end"] = 2 * len(rows) + 1 - rows["start"]  # one within the other, as far as they are above each other
    is_leaf = ~np.isin(rows["span_id"], rows["parent_id"])
    rows["descriptor"] = np.where(is_leaf, OPERATION, PHASE)
    rows["end"][is_leaf] = rows["start"][is_leaf] + 1
    rows = rows[np.argsort(rows["end"], kind="stable")]
    for begin, end in zip([0, *cuts], [*cuts, len(rows)], strict=True):
        is_open = rows[end:][rows["start"][end:] <= rows["end"][max(0, end - 1)]].copy()
        is_open["end"] = 0
        process = Process(1, BIND, "host", "boot", 1, Anchor(0, 0, 1))
        yield SpanBatch(rows[begin:end], DESCRIPTORS, process, above=stack_rows([is_open, rows[:end]]))


def sent_of(batches: Iterator[SpanBatch], budget: int) -> tuple[Column, int]:
    """Return what goes out of *batches*, and how many were left out."""
    gate = OutsideBudget(BIND, budget)
    out = [gate.within(Outgoing(NO_STEP, batch.rows), batch) for batch in batches]
    return stack_rows([one.rows for one in out]), sum(one.left_out for one in out)


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=60),
    st.lists(st.integers(0, 60), max_size=8),
    st.integers(2, 120),
)
def test_nothing_goes_out_without_what_it_hangs_under(parents: list[int], cuts: list[int], budget: int) -> None:
    """However a trace comes in pieces: its phases end last, and there is room for them."""
    number = len(parents) + 1
    cuts = sorted({cut for cut in cuts if cut < number})

    sent, left_out = sent_of(deliveries(parents, cuts), budget)

    share = budget // BIND.world_size
    assert set(sent["parent_id"].tolist()) - {0} <= set(sent["span_id"].tolist())
    assert TOP in sent["span_id"]
    assert len(sent) <= max(1, share)
    assert len(sent) + left_out == number
    assert left_out == 0 or number > share

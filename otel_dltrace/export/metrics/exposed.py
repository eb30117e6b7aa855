"""How long collectives held a rank's training thread up in each step, from its spans as they come.

Blocked is the time in ``wait`` phases and in blocking collectives, and in each backward in which DDP launches its
buckets the time after the last launch (`last_launches`). Only what happens in the backward, in the optimizer or outside
any stage counts: what a rank waits for while it fetches data is no gradients.
"""

import numpy as np

from otel_dltrace.export.metrics.last_launches import after_last_launch, is_within
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.buckets import bucket_number, first_calls, is_hooked
from otel_dltrace.model.descriptors import Descriptors
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.spans import empty_rows, stack_rows

_NONE = -1
"""The number of what is no bucket."""
_MOST_HELD = 100_000
"""Rows of steps that have not ended; beyond, the oldest are let go of."""


class Exposed:
    """Holds a rank's operations and stages until the step after theirs has ended: DDP's may come one step later."""

    def __init__(self) -> None:
        self._held = empty_rows()
        self._ended: list[int] = []
        self._table = Descriptors(())
        self._is_wait: Column = np.zeros(0, bool)
        self._bucket: Column = np.zeros(0, np.int64)
        self._is_hooked: Column = np.zeros(0, bool)
        self._names: Column = np.zeros(0, object)

    def add(self, rows: Column, descriptors: Descriptors, ended: Column) -> dict[int, int]:
        """Take *rows* in, among them the steps *ended* (by start).

        Returns:
            What `end` does, of the steps after which another one has ended.
        """
        self._know(descriptors)
        self._held = stack_rows([self._held, rows.compress(self._concerns(rows))])[-_MOST_HELD:]
        if not len(ended):
            return {}
        over, self._ended = [*self._ended, *ended["step"][:-1].tolist()], ended["step"][-1:].tolist()
        return self._tell(over)

    def end(self) -> dict[int, int]:
        """Return the ns of each of the steps left in which there were operations."""
        over, self._ended = self._ended, []
        return self._tell(over)

    def _tell(self, over: list[int]) -> dict[int, int]:
        held = self._held
        self._held = held.compress(held["step"].astype(np.int64) > max(over, default=-1))
        told = held.compress(np.isin(held["step"], over))
        is_stage = self._table.is_kind(told, s.STAGE)
        operations = told.compress(~is_stage)
        return self._blocked(operations, told.compress(is_stage)) if len(operations) else {}

    def _know(self, descriptors: Descriptors) -> None:
        """Look at the names, only when there are new ones: there may be 64k."""
        if descriptors is not self._table:
            self._table = descriptors
            self._is_wait = descriptors.column(lambda d: d.kind == s.PHASE and d.name == s.WAIT, bool)
            self._bucket = descriptors.column(lambda d: bucket_number(d) if d.is_bucket else _NONE, np.int64)
            self._is_hooked = descriptors.column(is_hooked, bool)
            self._names = descriptors.column(lambda d: d.name, object)

    def _concerns(self, rows: Column) -> Column:
        of = self._table
        is_call = of.is_kind(rows, s.COLLECTIVE) | of.is_kind(rows, s.P2P)
        is_any = self._is_wait[of.numbers(rows)] | is_call | of.is_kind(rows, s.STAGE)
        mask: Column = is_any & (rows["step"] != NO_STEP)
        return mask

    def _blocked(self, operations: Column, stages: Column) -> dict[int, int]:
        names = self._names[self._table.numbers(stages)]
        numbers = self._table.numbers(operations)
        is_wait, bucket, hooked = self._is_wait[numbers], self._bucket[numbers], self._is_hooked[numbers]
        begun = operations["start"].copy()
        if hooked.any():
            calls = begun[~is_wait & (bucket == _NONE)]
            begun[hooked] = first_calls(begun[hooked], operations["end"][hooked], calls)
        return _blocked(operations, is_wait, bucket, begun, stages, names)


def _blocked(
    operations: Column, is_wait: Column, bucket: Column, begun: Column, stages: Column, names: Column
) -> dict[int, int]:
    """Return the ns for which *operations*, calls and waits, some of them buckets of DDP's, block each step.

    What a bucket communicates is *begun* with its launch, or in its hook.
    """
    is_async = operations["flags"] & np.uint16(s.Flag.ASYNC) != 0
    is_bound = operations["source"] == s.Source.BOUND
    backward, is_bucket = stages.compress(names == s.BACKWARD), bucket != _NONE
    launched = is_bucket & (is_bound | (is_async & is_within(operations, backward)))
    within = _stage_at(stages, names, operations["start"])
    blocking = is_wait | (~is_async & ~is_bound)
    counts = blocking & np.isin(within, np.array(["", s.BACKWARD, s.OPTIMIZER], object))
    begin, end = operations["start"][counts], operations["end"][counts]
    step = operations["step"][counts]
    tail = after_last_launch(operations.compress(launched), begun[launched], bucket[launched], backward)
    begin, end, step = (np.concatenate(pair) for pair in zip((begin, end, step), tail, strict=True))
    out = dict.fromkeys(operations["step"].tolist(), 0)
    # A device comes to what the host has issued when it does: how long such a step waits is not known.
    unknown = set(operations["step"][is_bucket & (operations["source"] == s.Source.HOST_ISSUE)].tolist())
    for number, length in zip(*_lengths(begin, end, step), strict=True):
        out[number] += length
    return {number: length for number, length in out.items() if number not in unknown}


def _stage_at(stages: Column, names: Column, at: Column) -> Column:
    """Return the name of the stage that holds each time, "" outside any; one of several pieces holds the others'."""
    is_whole = stages["a"] <= 1
    if not is_whole.any():
        return np.full(len(at), "", object)
    stages, names = stages.compress(is_whole), names[is_whole]
    order = np.argsort(stages["start"], kind="stable")
    stages, names = stages.take(order), names[order]
    place = np.maximum(np.searchsorted(stages["start"], at, "right") - 1, 0)
    holds = (stages["start"][place] <= at) & (at < stages["end"][place])
    return np.where(holds, names[place], "")


def _lengths(begin: Column, end: Column, step: Column) -> tuple[list[int], list[int]]:
    """Return the step of each interval, and what it adds to the union of those before it: a wait lies in its call."""
    order = np.argsort(begin, kind="stable")
    begin, end, step = begin[order], end[order], step[order]
    reached = np.maximum.accumulate(np.append(np.iinfo(np.int64).min, end[:-1])) if len(end) else end
    return step.tolist(), np.maximum(end - np.maximum(begin, reached), 0).tolist()

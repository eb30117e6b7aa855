"""When to ask of which run this process is, each time that its process group begins (contract 1)."""

import os
from collections.abc import Iterator
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._launcher import has_servers_run
from otel_dltrace.instrument._loop import loop_of
from otel_dltrace.instrument._torch.groups import numbers_with_rank_0
from otel_dltrace.instrument._torch.store import PATIENCE_S, Start, bind_from_store
from otel_dltrace.model.identity import Bind
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.tracer import Tracer

_LAST_S = 1.0
"""How long the store is asked for the last time, of the 2 s that a process waits at its end."""


class Binding:
    """Binds the process at each start of its process group, once it can know what rank 0 has said.

    Where rank 0 is not traced the others ask in vain, so more and more seldom.

    Args:
        tracer: The tracer to bind.
        turns: Counts the starts that this process has seen, in all its recordings.
    """

    def __init__(self, tracer: Tracer, turns: Iterator[int]) -> None:
        self._tracer, self._turns = tracer, turns
        self._asking: Start | None = None
        self._pid = os.getpid()
        self._starts = self._chances = 0
        self._before: dict[str, int] = {}
        self.store: Any = None
        tracer.leaving.append(self._leave)

    def initialised(self, store: Any, rank: int, size: int) -> None:
        """Know that a process group of *size* has begun, with its default *store*."""
        self._starts += 1
        self.store = store
        if has_servers_run(self._tracer):
            return  # the servers, which know no store of torch, would be of another run
        step = None
        if self._starts > 1:
            loop_of(self._tracer).interrupted()  # the step that is open is of the start before
            step = self._tracer.steps.upcoming
        self._asking = Start(store, rank, size, next(self._turns), step, monotonic_ns(), self._under_way(rank, size))
        self._tracer.is_joining = True
        self._before, self._chances, self._pid = numbers_with_rank_0(), 0, os.getpid()
        on_begin = self._tracer.steps.on_begin
        if rank == 0:
            self.met()
        if self._asking is not None and self.poll not in on_begin:
            on_begin.insert(0, self.poll)  # what rank 0 said comes before what others make of the environment

    def _under_way(self, rank: int, size: int) -> Bind | None:
        """Return the run that MPI has bound this process to, if the first process group has the same ranks."""
        bound = self._tracer.recorder.bound
        if bound is None or self._starts > 1 or self._tracer.recorder.home.get("alone"):
            return None  # a forked child has its parent's
        return bound if (bound.rank, bound.world_size) == (rank, size) else None

    @property
    def is_asking(self) -> bool:
        """Whether it is not settled yet."""
        return self._asking is not None

    def met(self) -> None:
        """Ask the store, unless that is settled: a collective with rank 0 is over, so it has spoken."""
        if self._is_turn():
            self._ask(has_met=True)

    def poll(self) -> None:
        """Ask the store at the begin of a step: rank 0 may have spoken.

        It has if there has been a collective with it, which may have been one that we do not see, such as those with
        which DDP compares models.
        """
        if self._is_turn():
            self._ask(self._has_met())
        if self._asking is None and self.poll in self._tracer.steps.on_begin:
            self._tracer.steps.on_begin.remove(self.poll)

    def _is_turn(self) -> bool:
        """Return whether to take this chance to ask: the 1st, 2nd, 4th, 8th, and so on."""
        if self._asking is None:
            return False
        self._chances += 1
        return not self._chances & (self._chances - 1)

    def _ask(self, has_met: bool, patience_s: float = PATIENCE_S) -> None:
        asking = self._asking
        if asking is None:
            return
        # A forked child has its parent's connection, on which two must not speak, and is no rank of its world.
        if os.getpid() != self._pid or bind_from_store(self._tracer, asking, has_met=has_met, patience_s=patience_s):
            self._asking = None
            self._tracer.is_joining = False

    def _has_met(self) -> bool:
        return any(number > self._before.get(group, 0) for group, number in numbers_with_rank_0().items())

    @guarded
    def _leave(self) -> None:
        """Ask for the last time: what is bound to nothing is a run of its own."""
        if self._asking is not None:
            self._ask(self._has_met(), _LAST_S)

    def destroyed(self) -> None:
        """Let go of the store, which ends with its process group."""
        self._leave()
        self._asking = self.store = None
        self._tracer.is_joining = False

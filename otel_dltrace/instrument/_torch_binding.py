"""Agrees on the job and its generation through the rendezvous store, without a collective (contract 1)."""

import json
import os
import uuid
from collections.abc import Iterator
from datetime import timedelta
from time import monotonic_ns, time
from typing import Any

from otel_dltrace.instrument._launcher import has_servers_run
from otel_dltrace.instrument._loop import loop_of
from otel_dltrace.instrument._sites import log
from otel_dltrace.instrument._torch_groups import numbers_with_rank_0
from otel_dltrace.model.identity import Bind
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.process_id import process_began
from otel_dltrace.record.tracer import Tracer

GENERATION_KEY = "otel_dltrace/generation"
JOB_KEY = "otel_dltrace/job"
STORE_ERRORS = (RuntimeError, ValueError, OSError, KeyError)
"""What stores raise: their own errors are RuntimeErrors; no answer may end training."""
_PATIENCE = timedelta(seconds=2)


def bind_from_store(
    tracer: Tracer,
    store: Any,
    rank: int,
    size: int,
    nth: int = 1,
    step: int | None = None,
    since: int = 0,
    *,
    has_met: bool = True,
) -> bool:
    """Bind this process through *store*; return whether that is settled, one way or the other.

    Rank 0 draws the generation and says it; the others read it without waiting. Torchrun's ranks may find
    the store of an earlier start, with what was said then: so they believe it once a collective has shown that
    rank 0 has spoken, or if it was said after they themselves began, which is all that those have who are in
    no group with rank 0. The number is counted below all prefixes, for the same reason.

    Args:
        tracer: The tracer to bind.
        store: The default store of the process group.
        rank: This process's rank.
        size: The number of ranks.
        nth: How often this process has asked so, in all its recordings.
        step: The first step in it; by default the current one.
        since: When it made it (monotonic ns); by default now.
        has_met: Whether rank 0 has spoken in this start.
    """
    key = f"otel_dltrace/run/{nth}"
    try:
        if rank == 0:
            said = _propose(tracer, store)
            store.set(key, json.dumps(said))
        elif not store.check([key]):
            return False
        else:
            said = json.loads(store.get(key))
            if not has_met and said["at"] < process_began():
                return False
        tracer.recorder.bind(_bind(tracer, said, rank, size), step, since)
    except STORE_ERRORS as error:
        log.debug("the rendezvous store says no job and generation (%s); the environment decides", error)
    return True


def _propose(tracer: Tracer, store: Any) -> dict[str, Any]:
    root = store
    while hasattr(root, "underlying_store"):
        root = root.underlying_store
    before = tracer.recorder.bound
    # A store may be new at each start: then the launcher's count, or our own, goes on.
    earlier = max(tracer.environment.attempt, before.generation_number if before else 0)
    number = max(root.add(GENERATION_KEY, 1), earlier + 1)
    known = tracer.environment.job or (before.job if before else "")
    job = known or root.compare_set(JOB_KEY, "", str(uuid.uuid4())).decode()
    return {"job": job, "job_name": tracer.job_name, "gen": f"{number}.{os.urandom(8).hex()}", "at": time()}


def _bind(tracer: Tracer, said: dict[str, Any], rank: int, size: int) -> Bind:
    there = tracer.environment
    launched = there.launcher != "" and there.world_size == size  # else the ranks were spawned on this host
    return Bind(
        job=said["job"],
        generation=said["gen"],
        job_name=said["job_name"],
        world=tracer.world_name,
        rank=rank,
        local_rank=there.local_rank if launched else rank,
        node_rank=there.node_rank,
        world_size=size,
        local_world_size=there.local_world_size if launched else size,
        attempt=there.attempt,
    )


class Binding:
    """Binds the process at each start of its process group, once rank 0 has spoken.

    Args:
        tracer: The tracer to bind.
        turns: Counts how often this process has been bound, in all its recordings.
    """

    def __init__(self, tracer: Tracer, turns: Iterator[int]) -> None:
        self._tracer, self._turns = tracer, turns
        self._asking: tuple[Any, int, int, int, int | None, int] | None = None
        self._starts = 0
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
        self._asking = (store, rank, size, next(self._turns), step, monotonic_ns())
        self._tracer.is_joining = True
        self._before = numbers_with_rank_0()
        on_begin = self._tracer.steps.on_begin
        if rank == 0:
            self.met()
        if self._asking is not None and self.poll not in on_begin:
            on_begin.insert(0, self.poll)  # what rank 0 said comes before what others make of the environment

    @property
    def is_asking(self) -> bool:
        """Whether it is not settled yet."""
        return self._asking is not None

    def met(self) -> None:
        """Ask the store, unless that is settled: rank 0 has come as far as its first collective."""
        self._ask(has_met=True)

    def _ask(self, has_met: bool) -> None:
        if self._asking is not None and bind_from_store(self._tracer, *self._asking, has_met=has_met):
            self._asking = None
            self._tracer.is_joining = False

    def poll(self) -> None:
        """Ask the store at the begin of a step, if rank 0 may have spoken.

        It has if there has been a collective with it, which may have been one that we do not see, such as those with
        which DDP compares models. Else it is asked in vain where rank 0 is not traced, so more and more seldom.
        """
        steps = self._tracer.steps
        if (has_met := self._has_met()) or not steps.upcoming & (steps.upcoming - 1):
            self._ask(has_met)
        if self._asking is None and self.poll in steps.on_begin:
            steps.on_begin.remove(self.poll)

    def _has_met(self) -> bool:
        return any(number > self._before.get(group, 0) for group, number in numbers_with_rank_0().items())

    @guarded
    def _leave(self) -> None:
        """Ask for the last time: what nobody is bound to is a run of its own. Nobody waits long for it."""
        if self._asking is None:
            return
        store = self._asking[0]
        patience = store.timeout
        store.set_timeout(_PATIENCE)
        try:
            self._ask(self._has_met())
        finally:
            store.set_timeout(patience)

    def destroyed(self) -> None:
        """Let go of the store, which ends with its process group."""
        if self._asking is not None:
            self._ask(self._has_met())
        self._asking = self.store = None
        self._tracer.is_joining = False

"""Agrees on the job and its generation through the rendezvous store, without a collective (contract 1)."""

import json
import os
import uuid
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._launcher import has_servers_run
from otel_dltrace.instrument._loop import loop_of
from otel_dltrace.instrument._sites import log
from otel_dltrace.model.identity import Bind
from otel_dltrace.record.tracer import Tracer

GENERATION_KEY = "otel_dltrace/generation"
JOB_KEY = "otel_dltrace/job"
STORE_ERRORS = (RuntimeError, ValueError, OSError, KeyError)
"""What stores raise: their own errors are RuntimeErrors; no answer may end training."""


def bind_from_store(
    tracer: Tracer, store: Any, rank: int, size: int, nth: int = 1, step: int | None = None, since: int = 0
) -> bool:
    """Bind this process through *store*; return whether that is settled, one way or the other.

    Rank 0 draws the generation and says it; the others read it without waiting, and not before a
    collective has shown that rank 0 has spoken: torchrun's ranks may find the store of an earlier
    start, with what was said then. The number is counted below all prefixes, for the same reason.

    Args:
        tracer: The tracer to bind.
        store: The default store of the process group.
        rank: This process's rank.
        size: The number of ranks.
        nth: How often this process has made its process group.
        step: The first step in it; by default the current one.
        since: When it made it (monotonic ns); by default now.
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
        tracer.recorder.bind(_bind(tracer, said, rank, size), step, since)
    except STORE_ERRORS as error:
        log.debug("the rendezvous store says no job and generation (%s); the environment decides", error)
    return True


def _propose(tracer: Tracer, store: Any) -> dict[str, str]:
    root = store
    while hasattr(root, "underlying_store"):
        root = root.underlying_store
    before = tracer.recorder.bound
    # A store may be new at each start: then the launcher's count, or our own, goes on.
    earlier = max(tracer.environment.attempt, before.generation_number if before else 0)
    number = max(root.add(GENERATION_KEY, 1), earlier + 1)
    known = tracer.environment.job or (before.job if before else "")
    job = known or root.compare_set(JOB_KEY, "", str(uuid.uuid4())).decode()
    return {"job": job, "job_name": tracer.job_name, "gen": f"{number}.{os.urandom(8).hex()}"}


def _bind(tracer: Tracer, said: dict[str, str], rank: int, size: int) -> Bind:
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
    """Binds the process at each start of its process group, once rank 0 has spoken."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._asking: tuple[Any, int, int, int, int | None, int] | None = None
        self._starts = 0
        self._collectives = 0
        self.store: Any = None

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
        self._asking = (store, rank, size, self._starts, step, monotonic_ns())
        self._tracer.is_joining = True
        self._collectives = self._tracer.steps.group_seq()
        on_begin = self._tracer.steps.on_begin
        if rank == 0:
            self.met()
        if self._asking is not None and self.poll not in on_begin:
            on_begin.insert(0, self.poll)  # what rank 0 said comes before what others make of the environment

    def met(self) -> None:
        """Ask the store, unless that is settled: rank 0 has come as far as its first collective."""
        if self._asking is not None and bind_from_store(self._tracer, *self._asking):
            self._asking = None
            self._tracer.is_joining = False

    def poll(self) -> None:
        """Ask the store if there has been a collective since the process group began.

        It may have been one that we do not see, such as those with which DDP compares models.
        """
        if self._asking is not None and self._tracer.steps.group_seq() > self._collectives:
            self.met()
        if self._asking is None and self.poll in self._tracer.steps.on_begin:
            self._tracer.steps.on_begin.remove(self.poll)

    def destroyed(self) -> None:
        """Let go of the store, which ends with its process group."""
        self.poll()
        self._asking = self.store = None
        self._tracer.is_joining = False

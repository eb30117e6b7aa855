"""The rendezvous store: rank 0 says there of which run all ranks are, and the others read it (contract 1)."""

import json
import os
import uuid
from dataclasses import dataclass
from threading import Thread
from time import time
from typing import Any

from otel_dltrace.instrument._sites import log
from otel_dltrace.model.identity import Bind
from otel_dltrace.record.guard import tried
from otel_dltrace.record.process_id import process_began
from otel_dltrace.record.tracer import Tracer

GENERATION_KEY = "otel_dltrace/generation"
JOB_KEY = "otel_dltrace/job"
STORE_ERRORS = (RuntimeError, ValueError, OSError, KeyError)
"""What stores raise: their own errors are RuntimeErrors; no answer may end training."""
PATIENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Start:
    """A start of a process group.

    Attributes:
        store: The default store of the process group.
        rank: This process's rank.
        size: The number of ranks.
        nth: Which start this process has seen so, in all its recordings.
        step: The first step in it; None: the current one.
        since: When it was (monotonic ns); 0: now.
        run: The run that this process is in already, as the same rank of as many: MPI began before, and it goes on.
    """

    store: Any
    rank: int
    size: int
    nth: int = 1
    step: int | None = None
    since: int = 0
    run: Bind | None = None

    @property
    def key(self) -> str:
        """Where rank 0 says of which run it is."""
        return f"otel_dltrace/run/{self.nth}"


def bind_from_store(tracer: Tracer, start: Start, *, has_met: bool = True, patience_s: float = PATIENCE_S) -> bool:
    """Bind this process as *start* has it; return whether that is settled, one way or the other.

    Rank 0 draws the generation and says it; the others read it without waiting. Torchrun's ranks may find
    the store of an earlier start, with what was said then: so they believe it once a collective has shown that
    rank 0 has spoken in this one (*has_met*), or if it was said after they themselves began, which is all that those
    have who are in no group with rank 0. A store that does not answer within *patience_s* seconds is asked no more.
    """
    try:
        said = _say(tracer, start) if start.rank == 0 else _heard(start, patience_s)
        if said is None or not (has_met or said["at"] >= process_began()):
            return False
        tracer.recorder.bind(_bind(tracer, said, start), start.step, start.since)
    except STORE_ERRORS as error:
        log.debug("the rendezvous store says no job and generation (%s); the environment decides", error)
    return True


def _say(tracer: Tracer, start: Start) -> dict[str, Any]:
    run = start.run
    job, job_name, generation = (run.job, run.job_name, run.generation) if run else _drawn(tracer, start)
    said = {"job": job, "job_name": job_name, "gen": generation, "at": time()}
    start.store.set(start.key, json.dumps(said))
    return said


def _drawn(tracer: Tracer, start: Start) -> tuple[str, str, str]:
    """Return the job, its name, and a generation that no other start has."""
    root = start.store
    while hasattr(root, "underlying_store"):
        root = root.underlying_store
    before = tracer.recorder.bound
    # The number is counted below all prefixes, since a store may outlive a start; it may be new at each as well: then
    # the launcher's count, or our own, goes on.
    earlier = max(tracer.environment.attempt, before.generation_number if before else 0)
    number = max(root.add(GENERATION_KEY, 1), earlier + 1)
    known = tracer.environment.job or (before.job if before else "")
    job = known or root.compare_set(JOB_KEY, "", str(uuid.uuid4())).decode()
    return job, tracer.job_name, f"{number}.{os.urandom(8).hex()}"


def _heard(start: Start, patience_s: float) -> dict[str, Any] | None:
    """Return what rank 0 has said, None where it has not yet.

    Raises:
        STORE_ERRORS: The store does not say. It may be frozen, or busy with the call of another thread, and no limit
            of its own would end ours: so the question is another thread's.
    """
    answers: list[Any] = []
    asking = Thread(target=lambda: answers.append(tried(_read, start)), name="otel_dltrace store", daemon=True)
    asking.start()
    asking.join(patience_s)
    if not answers:
        raise TimeoutError(f"no answer within {patience_s} s")
    if isinstance(answers[0], Exception):
        raise answers[0]
    said: dict[str, Any] | None = answers[0]
    return said


def _read(start: Start) -> dict[str, Any] | None:
    said: dict[str, Any] | None = json.loads(start.store.get(start.key)) if start.store.check([start.key]) else None
    return said


def _bind(tracer: Tracer, said: dict[str, Any], start: Start) -> Bind:
    there = tracer.environment
    launched = there.launcher != "" and there.world_size == start.size  # else the ranks were spawned on this host
    return Bind(
        job=said["job"],
        generation=said["gen"],
        job_name=said["job_name"],
        world=tracer.world_name,
        rank=start.rank,
        local_rank=there.local_rank if launched else start.rank,
        node_rank=there.node_rank,
        world_size=start.size,
        local_world_size=there.local_world_size if launched else start.size,
        attempt=there.attempt,
    )

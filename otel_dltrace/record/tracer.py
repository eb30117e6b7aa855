"""What is switched on in this process: its recorder, its steps, and what its users name themselves."""

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, PHASE, STAGES
from otel_dltrace.model.topology import World
from otel_dltrace.record.launch import DrainStarter
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.steps import Steps

AS_STAGE = -1
"""In place of a descriptor: a phase of this name is counted as a stage."""


class Tracer:
    """The live side of one process: its recorder, its steps, its users' own descriptors.

    Attributes:
        job_name: The job's name for people.
        environment: Who the launcher says we are.
        world_name: The world's name, in jobs with several.
        starter: What started the drain, and waits for it at the end.
        span_budget: Spans per trace over OTLP, by which all compute in which trace a rank's step is.
        server_key: The one key of which a parameter server records pushes and pulls; -1: of all.
        horovod_timeline: Returns where the user wants Horovod's own timeline now, "" for nowhere.
        nccl_timing: Returns whether PyTorch, asked now, measures how long collectives of NCCL take.
        is_joining: Whether a process group has begun whose ranks have yet to agree on their run.
        is_followed: Whether what is put in place in the frameworks knows of this recording.
        began_in: The working directory when the recording began, "" if it had been removed.
        metrics: Whether to record what only this process knows of itself.
        loop: What follows the program's training loop, from when there is one.
        leaving: Called when the recording ends: each writes what is under way and nobody has waited for.
    """

    def __init__(
        self,
        recorder: Recorder,
        job_name: str = "job",
        environment: World = World(),  # noqa: B008  -- frozen
        world_name: str = "default",
        starter: DrainStarter | None = None,
        span_budget: int = 0,
        server_key: int = -1,
    ) -> None:
        self.recorder = recorder
        self.job_name, self.environment, self.world_name = job_name, environment, world_name
        self.starter, self.span_budget, self.server_key = starter, span_budget, server_key
        self.began_in = ""
        self.horovod_timeline: Callable[[], str] = str
        self.nccl_timing: Callable[[], bool] = bool
        self.metrics = self.is_joining = self.is_followed = False
        self.steps = Steps(recorder)
        self.loop: Any = None
        self.leaving: list[Callable[[], None]] = []
        self.phases: dict[str, int] = dict.fromkeys(STAGES, AS_STAGE)
        self.turns: dict[str, Iterator[int]] = {}
        self.occurrences: dict[tuple[str, str], Iterator[int]] = {}
        self.operations: dict[tuple[str, str, str], tuple[int, Iterator[int]]] = {}

    def phase_descriptor(self, name: str) -> int:
        """Return the number of the phase *name*; the first call interns it."""
        self.turns.setdefault(name, count(1))
        number = self.phases[name] = self.recorder.intern(Descriptor(PHASE, name))
        return number

    def operation_descriptor(self, name: str, tensor: str, group: str) -> tuple[int, Iterator[int]]:
        """Return the number of a user's own operation, and its sequence numbers from 1.

        Ids know the tensor and not the operation, so a push and a pull of one tensor share a count.
        """
        known = self.operations.get((name, tensor, group))
        if known is None:
            descriptor = Descriptor(COLLECTIVE, name, group=group, tensor=tensor or name, backend="user")
            # setdefault: two threads that come first together must draw from one count.
            numbers = self.occurrences.setdefault((tensor or name, group), count(1))
            known = self.operations[name, tensor, group] = (self.recorder.intern(descriptor), numbers)
        return known


class _Live:
    """The one place that holds what is switched on; `stop()` clears it."""

    tracer: Tracer | None = None
    told: dict[str, Any] | None = None
    """The fields that OpenTelemetry's instrumentors have told so far, where the recording began with one of them."""
    is_refused = False
    """Whether one of them was told what cannot be used: then none begins to record, until the program asks anew."""


live = _Live()

"""Who this process is, as the environment says: its job, its place among the ranks, and what describes both."""

from collections.abc import Mapping
from urllib.parse import unquote

from otel_dltrace.model.identity import Bind, h64
from otel_dltrace.model.semconv import DL_LAUNCHER_SPAN_ID, DL_LAUNCHER_TRACE_ID
from otel_dltrace.model.topology import TORCHRUN, World
from otel_dltrace.record import guard
from otel_dltrace.record.carrier import read_traceparent
from otel_dltrace.settings.config import VARIABLES, Config
from otel_dltrace.settings.program import own_program_name
from otel_dltrace.settings.said import said

_YES = ("y", "yes", "1", "t", "true")
"""What PyTorch takes for a yes."""
RESOURCE_ATTRIBUTES = "OTEL_RESOURCE_ATTRIBUTES"
JOB_NAME = "_OTEL_DLTRACE_JOB_NAME"
"""Set by a launcher of ours for processes that run other programs than the job's own."""
UNDER_RUN = "_OTEL_DLTRACE_UNDER_RUN"
"""Set by our commands that say themselves where the spans are: the id of the run if it drew that, else "1"."""


def environment_bind(config: Config, world: World, job_name: str) -> Bind:
    """Return who the environment says this process is; what it does not say is "" (contract 1)."""
    run = config.run or world.run
    generation = ""
    if run:
        start = ".".join(filter(None, (run, config.launch, world.start)))
        is_id = len(start) == 16 and all(c in "0123456789abcdef" for c in start)
        generation = f"1.{start if is_id else format(h64(start), '016x')}"
    return Bind(
        job=config.job or world.job or run,
        generation=generation,
        job_name=job_name,
        world=config.world,
        role=world.role,
        rank=world.rank,
        local_rank=world.local_rank,
        node_rank=world.node_rank,
        world_size=world.world_size,
        local_world_size=world.local_world_size,
        servers=world.servers,
        attempt=world.attempt,
    )


def is_alone(config: Config, world: World, env: Mapping[str, str]) -> bool:
    """Return whether the run's id does not make this process one of a job: what a script starts may be several.

    So may be the worlds that MPI spawns: Hydra has one environment for all of them, and no name for any. A single rank
    of torchrun's has nobody to agree with.
    """
    if world.is_spawned and not world.run:
        return bool(config.run)
    has_others = world.launcher and (world.launcher != TORCHRUN or world.world_size > 1)
    return not has_others and bool(config.run) and config.run == env.get(UNDER_RUN)


def horovod_timeline(env: Mapping[str, str]) -> str:
    """Return where Horovod, initialised now, writes its own timeline, "" for nowhere."""
    return env.get("HOROVOD_TIMELINE", "")


def nccl_timing(env: Mapping[str, str]) -> bool:
    """Return whether PyTorch measures how long collectives of NCCL take, and keeps the events that it asks for that.

    Without its cache of events, who reads its Flight Recorder may meet one that is gone.
    """
    timing = env.get("TORCH_NCCL_ENABLE_TIMING") or env.get("NCCL_ENABLE_TIMING", "")
    cache = env.get("TORCH_NCCL_CUDA_EVENT_CACHE") or "1"
    return timing.lower() in _YES and cache.lower() in _YES


def job_name_of(env: Mapping[str, str], job: str = "") -> str:
    """Return the job's name for people: the service's, the id that is told (by a program, *job*), or the program's."""
    name = said(env, "OTEL_SERVICE_NAME") or job or said(env, VARIABLES["job"]) or said(env, JOB_NAME)
    return name or own_program_name() or "job"


def resource_of(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``OTEL_RESOURCE_ATTRIBUTES``, and the launcher's span that ``TRACEPARENT`` names.

    What is no pair is left out, and told, as OpenTelemetry's SDK does. A step is a trace of its own, so
    the launcher's span is nobody's parent: it is named.
    """
    for sentence in no_attributes(env):
        guard.say(sentence)
    pairs = (pair.partition("=") for pair in _attributes(env))
    out = {name.strip(): unquote(value.strip()) for name, equals, value in pairs if equals and name.strip()}
    if service := said(env, "OTEL_SERVICE_NAME"):
        out["service.name"] = service
    launcher = read_traceparent(env.get("TRACEPARENT", ""))
    if launcher is not None:
        out |= {DL_LAUNCHER_TRACE_ID: launcher.trace_id, DL_LAUNCHER_SPAN_ID: launcher.span_id}
    return out


def no_attributes(env: Mapping[str, str]) -> list[str]:
    """Return a sentence for each entry of ``OTEL_RESOURCE_ATTRIBUTES`` that is no pair, and so describes nothing."""
    pairs = ((entry, *entry.partition("=")[:2]) for entry in _attributes(env) if entry.strip())
    wrong = [entry.strip() for entry, name, equals in pairs if not equals or not name.strip()]
    return [f"{RESOURCE_ATTRIBUTES}: {entry!r} is not name=value, and is left out" for entry in wrong]


def _attributes(env: Mapping[str, str]) -> list[str]:
    return env.get(RESOURCE_ATTRIBUTES, "").split(",")

"""Who the launcher says this process is, for frameworks that have no store to agree through."""

from otel_dltrace.model.identity import Bind
from otel_dltrace.record.tracer import Tracer

BYTEPS = "byteps"


def launcher_bind(tracer: Tracer) -> Bind | None:
    """Return the bind of the environment; None where it names no job or no run, or the process is bound already."""
    said = tracer.recorder.home.get("bind") or {}
    if tracer.recorder.bound is not None or not (said.get("job") and said.get("generation")):
        return None
    return Bind.read(said)


def world_bind(tracer: Tracer, size: int) -> Bind | None:
    """Return the bind of a rank whose world, by its framework, is of *size*, as `launcher_bind` does.

    Where the launcher says no run, nothing that all ranks know tells this run from another: then each process is
    bound by itself when it ends. So is one whose run may have others of its rank in it.
    """
    is_own = tracer.recorder.home.get("alone") and (size == 1 or tracer.environment.is_spawned)
    return None if is_own else launcher_bind(tracer)


def has_servers_run(tracer: Tracer) -> bool:
    """Return whether this is a process of a push_pull job that was told its run, as the servers were."""
    said = tracer.recorder.home.get("bind") or {}
    return tracer.environment.launcher == BYTEPS and bool(said.get("job") and said.get("generation"))

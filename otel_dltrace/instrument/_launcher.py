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


def has_servers_run(tracer: Tracer) -> bool:
    """Return whether this is a process of a push_pull job that was told its run, as the servers were."""
    said = tracer.recorder.home.get("bind") or {}
    return tracer.environment.launcher == BYTEPS and bool(said.get("job") and said.get("generation"))

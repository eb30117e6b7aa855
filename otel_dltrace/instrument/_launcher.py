"""Who the launcher says this process is, for frameworks that have no store to agree through."""

from otel_dltrace.model.identity import Bind
from otel_dltrace.record.tracer import Tracer


def launcher_bind(tracer: Tracer) -> Bind | None:
    """Return the bind of the environment; None where it names no job or no run, or the process is bound already."""
    said = tracer.recorder.home.get("bind") or {}
    if tracer.recorder.bound is not None or not (said.get("job") and said.get("generation")):
        return None
    return Bind.read(said)

"""What a worker's and a server's records have in common: each computes for itself which trace they are in."""

from otel_dltrace.model.identity import NO_STEP, Bind, trace_id
from otel_dltrace.model.plan import share_of
from otel_dltrace.record.tracer import Tracer

BACKEND = "pushpull"
MOST_WAIT = (1 << 31) - 1


def trace_of(tracer: Tracer, bind: Bind, rank: int, step: int, turn: int) -> int:
    """Return the trace of the spans of worker *rank* in *step*; outside any step in that *turn* of operations."""
    if step == NO_STEP:
        return trace_id(bind, f"ops.{turn}")
    return trace_id(bind, step, share_of(rank, bind.world_size, bind.servers, tracer.span_budget, step).shard)

"""A worker's push_pulls as records: an operation for each tensor, below it the stages of its partitions."""

from typing import TYPE_CHECKING, NamedTuple

from otel_dltrace.model.identity import NO_STEP, Bind, span_id, trace_id
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.plan import share_of
from otel_dltrace.model.semconv import COLLECTIVE, OPERATIONS_PER_TRACE, PHASE, PUSH_PULL, Flag, Level
from otel_dltrace.record.carrier import TRACEPARENT, TRACESTATE, traceparent, tracestate_entry
from otel_dltrace.record.steps import Tracer, open_span

if TYPE_CHECKING:
    from otel_dltrace.model.queue_types import QueueType
    from otel_dltrace.pushpull.trace import RequestSending, StageFinished, TensorCompleted, TensorEnqueued

BACKEND = "pushpull"
# Plain ints: reading a member of an enum costs a tenth of a record.
_COLLECTIVE, _PARTITION = int(Level.COLLECTIVE), int(Level.PARTITION)
_ASYNC, _ERROR = int(Flag.ASYNC), int(Flag.ERROR)
_MOST_WAIT = (1 << 31) - 1
_ERRORS = "otel_dltrace.pushpull.errors"


class _Open(NamedTuple):
    """A push_pull that is under way: what its records have in common."""

    number: int
    step: int
    descriptor: int
    start: int
    size: int
    parent: int
    seq: int


class _Context(NamedTuple):
    """What all requests of a step tell the servers; *part* is the step, or what stands for it where there is none."""

    bind: Bind
    part: int | str
    trace: int
    state: str


class Pushed:
    """Writes what a worker does.

    Args:
        tracer: The live tracer.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer, self._recorder = tracer, tracer.recorder
        self._open: dict[int, _Open] = {}
        self._operations: dict[str, int] = {}
        self._stages: dict[str, dict[QueueType, int]] = {}
        self._sending: dict[tuple[int, int], int] = {}
        self._context: _Context | None = None

    def enqueued(self, event: "TensorEnqueued") -> None:
        """Begin the operation, in the step and below the span of the thread that asked for it."""
        recorder = self._recorder
        descriptor = self._operations.get(event.name) or self._operation(event)
        step, seq, outer = recorder.step, event.round + 1, open_span.get()
        # Outside any step the server names the trace by the round alone, so no phase is above.
        parent = outer.drawn() if outer is not None and outer.step == step != NO_STEP else 0
        number = recorder.begin(
            descriptor, _COLLECTIVE, event.time_ns, event.nbytes, parent, seq, b=-1, flags=_ASYNC, step=step
        )
        if number:
            self._open[event.operation] = _Open(number, step, descriptor, event.time_ns, event.nbytes, parent, seq)

    def finished(self, event: "StageFinished") -> None:
        """Write a stage of a partition."""
        recorder = self._recorder
        if recorder.level < _PARTITION:
            return
        operation = self._open.get(event.operation)
        if operation is None:
            return  # it was enqueued before anybody observed
        try:
            descriptor = self._stages[event.name][event.queue]
        except KeyError:
            descriptor = self._stage(event)
        start = event.started_ns
        recorder.span(
            descriptor,
            _PARTITION,
            start,
            event.finished_ns,
            event.nbytes,
            operation.number,
            operation.seq,
            event.partition,
            min((start - event.enqueued_ns) // 1000, _MOST_WAIT),
            -1 if event.server is None else event.server,
            number=self._sending.pop((event.operation, event.partition), 0) if event.server is not None else 0,
            step=operation.step,
        )

    def completed(self, event: "TensorCompleted") -> None:
        """Write the operation."""
        operation = self._open.pop(event.operation, None)
        if operation is None:
            return
        flags = _ASYNC
        if event.error is not None:
            flags |= _ERROR
            kind = f"{_ERRORS}.{event.error}"
            self._recorder.failure(operation.number, _COLLECTIVE, kind, "", operation.step)
        self._recorder.span(
            operation.descriptor,
            _COLLECTIVE,
            operation.start,
            event.time_ns,
            operation.size,
            operation.parent,
            operation.seq,
            b=-1,
            flags=flags,
            number=operation.number,
            step=operation.step,
        )

    def sending(self, event: "RequestSending") -> None:
        """Tell the server which span its own is caused by: the stage, or the operation where stages are not recorded.

        Nothing is told before the process is bound: there are no ids yet.
        """
        recorder, operation = self._recorder, self._open.get(event.operation)
        ring, bind = recorder.ring, recorder.bound
        if operation is None or ring is None or bind is None:
            return
        number = operation.number
        if recorder.level >= _PARTITION:
            number = self._sending[event.operation, event.partition] = recorder.number()
        nonce = int.from_bytes(ring.nonce, "little")
        context = self._context_of(bind, operation)
        event.metadata[TRACEPARENT] = traceparent(context.trace, span_id(nonce, operation.step, number))
        event.metadata[TRACESTATE] = context.state

    def _context_of(self, bind: Bind, operation: _Open) -> _Context:
        step = operation.step
        part = step if step != NO_STEP else f"ops.{operation.seq // OPERATIONS_PER_TRACE}"
        context = self._context
        if context is None or context.part != part or context.bind is not bind:
            shard = shard_of(self._tracer, bind, bind.rank, step)
            state = tracestate_entry(step, bind.world, bind.rank)
            context = self._context = _Context(bind, part, trace_id(bind, part, shard), state)
        return context

    def _operation(self, event: "TensorEnqueued") -> int:
        descriptor = Descriptor(
            COLLECTIVE, PUSH_PULL, backend=BACKEND, tensor=event.name, key=event.declared_key, dtype=event.dtype
        )
        number = self._operations[event.name] = self._recorder.intern(descriptor)
        return number

    def _stage(self, event: "StageFinished") -> int:
        name = event.queue.name
        descriptor = Descriptor(PHASE, name, backend=BACKEND, tensor=event.name, key=event.key >> 16, queue_type=name)
        stages = self._stages.setdefault(event.name, {})
        number = stages[event.queue] = self._recorder.intern(descriptor)
        return number


def shard_of(tracer: Tracer, bind: Bind, rank: int, step: int) -> int:
    """Return in which of a step's traces the spans of worker *rank* are."""
    if step == NO_STEP:
        return 0
    return share_of(rank, bind.world_size, bind.servers, tracer.span_budget, step).shard

"""A worker's push_pulls as records: an operation for each tensor, below it the stages of its partitions."""

from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple

from otel_dltrace.model.identity import NO_STEP, Bind, mix64, trace_id
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.plan import share_of
from otel_dltrace.model.semconv import COLLECTIVE, OPERATIONS_PER_TRACE, PHASE, PUSH_PULL, WAIT, Flag, Level
from otel_dltrace.record.carrier import TRACEPARENT, TRACESTATE, traceparent, traceparent_head, tracestate_entry
from otel_dltrace.record.steps import Tracer, open_span

if TYPE_CHECKING:
    from otel_dltrace.model.queue_types import QueueType
    from otel_dltrace.pushpull.trace import (
        RequestSending,
        StageFinished,
        TensorCompleted,
        TensorEnqueued,
        WaitFinished,
        WaitStarted,
    )

BACKEND = "pushpull"
# Plain ints: reading a member of an enum costs a tenth of a record.
_COLLECTIVE, _PARTITION = int(Level.COLLECTIVE), int(Level.PARTITION)
_ASYNC, _ERROR = int(Flag.ASYNC), int(Flag.ERROR)
_MOST_WAIT = (1 << 31) - 1
_ERRORS = "otel_dltrace.pushpull.errors"


class _Open(NamedTuple):
    """A push_pull that is under way: what its records have in common.

    *stages* are its tensor's descriptors; *ended* holds when it was complete, as soon as it is.
    """

    number: int
    step: int
    descriptor: int
    start: int
    size: int
    parent: int
    seq: int
    stages: "dict[QueueType, int]"
    ended: list[int]


class _Context(NamedTuple):
    """What all requests of a step tell the servers; where there is none, those of a *turn* of operations.

    *seed* is what the ids of the step's spans are made of, with the ring's *nonce*, but for the span's number.
    """

    bind: Bind
    nonce: bytes
    step: int
    turn: int
    head: str
    state: str
    seed: int


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
        self._waits: dict[tuple[int, int], tuple[_Open, int]] = {}
        self._wait = tracer.recorder.intern(Descriptor(PHASE, WAIT))
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
            stages = self._stages.setdefault(event.name, {})
            self._open[event.operation] = _Open(
                number, step, descriptor, event.time_ns, event.nbytes, parent, seq, stages, []
            )

    def finished(self, event: "StageFinished") -> None:
        """Write a stage of a partition."""
        recorder = self._recorder
        if recorder.level < _PARTITION:
            return
        which, _, _, partition, queue, size, _, server, enqueued, start, end = event
        operation = self._open.get(which)
        if operation is None:
            return  # it was enqueued before anybody observed
        number = 0
        if server is None:
            server = -1
        else:
            number = self._sending.pop((which, partition), 0)
        wait = (start - enqueued) // 1000
        # By position, and as few calls as can be: this is done for each stage of each partition.
        recorder.span(
            operation.stages.get(queue) or self._stage(operation, event),
            _PARTITION,
            start,
            end,
            size,
            operation.number,
            operation.seq,
            partition,
            wait if wait < _MOST_WAIT else _MOST_WAIT,  # noqa: FURB136  -- `min` is a call
            server,
            0,
            0,
            number,
            operation.step,
        )

    def completed(self, event: "TensorCompleted") -> None:
        """Write the operation."""
        operation = self._open.pop(event.operation, None)
        if operation is None:
            return
        operation.ended.append(event.time_ns)
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

    def wait_started(self, event: "WaitStarted") -> None:
        """Remember that the program waits for a push_pull."""
        operation = self._open.get(event.operation)
        if operation is not None:
            self._waits[event.operation, get_ident()] = (operation, event.time_ns)

    def wait_finished(self, event: "WaitFinished") -> None:
        """Write how long the program was blocked: a child of what it waited for, and over when that was.

        It goes on somewhat later, when the machine has a core for it: a viewer would find the child outside its parent.
        """
        operation, start = self._waits.pop((event.operation, get_ident()), (None, 0))
        if operation is None:
            return
        end = min([event.time_ns, *operation.ended])
        if end > start:
            self._recorder.phase(self._wait, start, end, parent=operation.number, step=operation.step)

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
        step = operation.step
        turn = operation.seq // OPERATIONS_PER_TRACE if step == NO_STEP else 0
        context = self._context
        if (
            context is None
            or (context.step, context.turn) != (step, turn)
            or context.bind is not bind
            or context.nonce is not ring.nonce  # a forked child has another
        ):
            context = self._context_of(bind, ring.nonce, step, turn)
        metadata = event.metadata
        metadata[TRACEPARENT] = traceparent(context.head, mix64(context.seed ^ number) or 1)
        metadata[TRACESTATE] = context.state

    def _context_of(self, bind: Bind, nonce: bytes, step: int, turn: int) -> _Context:
        part = step if step != NO_STEP else f"ops.{turn}"
        head = traceparent_head(trace_id(bind, part, shard_of(self._tracer, bind, bind.rank, step)))
        state = tracestate_entry(step, bind.world, bind.rank)
        seed = int.from_bytes(nonce, "little") ^ step << 32
        self._context = context = _Context(bind, nonce, step, turn, head, state, seed)
        return context

    def _operation(self, event: "TensorEnqueued") -> int:
        descriptor = Descriptor(
            COLLECTIVE, PUSH_PULL, backend=BACKEND, tensor=event.name, key=event.declared_key, dtype=event.dtype
        )
        number = self._operations[event.name] = self._recorder.intern(descriptor)
        return number

    def _stage(self, operation: _Open, event: "StageFinished") -> int:
        name = event.queue.name
        descriptor = Descriptor(PHASE, name, backend=BACKEND, tensor=event.name, key=event.key >> 16, queue_type=name)
        number = operation.stages[event.queue] = self._recorder.intern(descriptor)
        return number


def shard_of(tracer: Tracer, bind: Bind, rank: int, step: int) -> int:
    """Return in which of a step's traces the spans of worker *rank* are."""
    if step == NO_STEP:
        return 0
    return share_of(rank, bind.world_size, bind.servers, tracer.span_budget, step).shard

"""A worker's push_pulls as records: an operation for each tensor, below it the stages of its partitions."""

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from otel_dltrace.instrument._pushpull.records import BACKEND, MOST_WAIT, trace_of
from otel_dltrace.model.identity import NO_STEP, Bind, mix64
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import COLLECTIVE, OPERATIONS_PER_TRACE, PHASE, PUSH_PULL, WAIT, Flag, Level
from otel_dltrace.record.carrier import TRACEPARENT, TRACESTATE, traceparent, traceparent_head, tracestate_entry
from otel_dltrace.record.guard import failed
from otel_dltrace.record.operation import open_span
from otel_dltrace.record.packing import SPANS, pack_span
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer

if TYPE_CHECKING:
    from otel_dltrace.model.queue_types import QueueType
    from otel_dltrace.pushpull.errors import PushPullError

# Plain ints: reading a member of an enum costs a tenth of a record.
_COLLECTIVE, _PHASE, _PARTITION = int(Level.COLLECTIVE), int(Level.PHASE), int(Level.PARTITION)
_ASYNC, _ERROR = int(Flag.ASYNC), int(Flag.ERROR)
_STAGE = SPANS[_PARTITION]
_error = struct.error
_AT_ONCE = 16


class _Tensor(NamedTuple):
    """What the push_pulls of one tensor have in common; *stages* are its descriptors."""

    name: str
    declared_key: int
    descriptor: int
    stages: "dict[QueueType, int]"


class _Context:
    """What all requests of a step tell the servers; where there is none, those of a *turn* of operations.

    A request of a partition takes the number of its span, and what it tells, from those that are *ready*.
    """

    __slots__ = ("bind", "head", "nonce", "ready", "seed", "state", "step", "turn")

    def __init__(self, bind: Bind, nonce: bytes, step: int, turn: int, trace: int) -> None:
        self.bind, self.nonce, self.step, self.turn = bind, nonce, step, turn
        self.head, self.state = traceparent_head(trace), tracestate_entry(step, bind.world, bind.rank)
        # What the ids of the step's spans are made of, but for the span's number.
        self.seed = int.from_bytes(nonce, "little") ^ step << 32
        self.ready: list[tuple[int, dict[str, str]]] = []

    def metadata(self, number: int) -> dict[str, str]:
        """Return what tells a server that the span *number* is above its own."""
        span = mix64(self.seed ^ number) or 1
        return {TRACEPARENT: traceparent(self.head, span), TRACESTATE: self.state}

    def next(self, recorder: Recorder) -> tuple[int, dict[str, str]]:
        """Return the number of a new span of *recorder*, and what `metadata` says of it; make some ready for the next.

        To make many one after another costs little more than one between two stages: see `_Pushed`.
        """
        numbers = [recorder.number() for _ in range(_AT_ONCE)]
        first, *others = [(number, self.metadata(number)) for number in numbers]
        self.ready += others
        return first


class Worker:
    """Follows the push_pulls of a worker.

    Args:
        tracer: The live tracer.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.tracer, self.recorder = tracer, tracer.recorder
        self.wait = tracer.recorder.intern(Descriptor(PHASE, WAIT))
        self._tensors: dict[str, _Tensor] = {}
        self._context: _Context | None = None

    def started(
        self, name: str, declared_key: int, round_: int, nbytes: int, dtype: str, start: int
    ) -> "_Pushed | None":
        """Begin the operation, in the step and below the span of the thread that asked for it."""
        recorder = self.recorder
        tensor = self._tensors.get(name) or self._tensor(name, declared_key, dtype)
        step, outer = recorder.step, open_span.get()
        # Outside any step the server names the trace by the round alone, so no phase is above.
        parent = outer.drawn() if outer is not None and outer.step == step != NO_STEP else 0
        seq = round_ + 1
        number = recorder.begin(tensor.descriptor, _COLLECTIVE, start, nbytes, parent, seq, 0, -1, _ASYNC, step)
        return _Pushed(self, tensor, number, step, parent, seq, nbytes, start) if number else None

    def stage(self, tensor: _Tensor, queue: "QueueType") -> int:
        """Return a new descriptor of a stage of *tensor*."""
        name = queue.name
        descriptor = Descriptor(
            PHASE, name, backend=BACKEND, tensor=tensor.name, key=tensor.declared_key, queue_type=name
        )
        number = tensor.stages[queue] = self.recorder.intern(descriptor)
        return number

    def context(self, step: int, seq: int) -> _Context | None:
        """Return what the requests of operation *seq* of *step* tell; None before the process is bound: no ids yet."""
        ring, bind = self.recorder.ring, self.recorder.bound
        if ring is None or bind is None:
            return None
        turn = seq // OPERATIONS_PER_TRACE if step == NO_STEP else 0
        context = self._context
        if (
            context is None
            or (context.step, context.turn) != (step, turn)
            or context.bind is not bind
            or context.nonce is not ring.nonce  # a forked child has another
        ):
            trace = trace_of(self.tracer, bind, bind.rank, step, turn)
            context = self._context = _Context(bind, ring.nonce, step, turn, trace)
        return context

    def _tensor(self, name: str, declared_key: int, dtype: str) -> _Tensor:
        descriptor = Descriptor(COLLECTIVE, PUSH_PULL, backend=BACKEND, tensor=name, key=declared_key, dtype=dtype)
        tensor = self._tensors[name] = _Tensor(name, declared_key, self.recorder.intern(descriptor), {})
        return tensor


class _Pushed:
    """Writes one push_pull.

    Between two stages little of us is in the processor's caches: each function that is called costs a microsecond
    there, not the tenth of one that it costs in a loop. So what is done for each partition is flat.
    """

    __slots__ = (
        "_context",
        "_end",
        "_metadata",
        "_number",
        "_parent",
        "_recorder",
        "_sending",
        "_seq",
        "_size",
        "_stages",
        "_start",
        "_step",
        "_tensor",
        "_worker",
        "follows_stages",
    )

    def __init__(
        self, worker: Worker, tensor: _Tensor, number: int, step: int, parent: int, seq: int, size: int, start: int
    ) -> None:
        self._worker, self._recorder = worker, worker.recorder
        self._tensor, self._stages = tensor, tensor.stages
        self._number, self._step, self._parent, self._seq = number, step, parent, seq
        self._size, self._start, self._end = size, start, 0
        self._sending: dict[int, int] = {}
        self._context: _Context | None = None
        self._metadata: dict[str, str] | None = None
        self.follows_stages = worker.recorder.level >= _PARTITION

    def request_sending(self, partition: int) -> Mapping[str, str]:
        """Tell the server which span its own is caused by: the stage, or the operation where no stage is recorded."""
        if self._metadata is not None:  # the operation's: that of all its requests
            return self._metadata
        try:
            context = self._context
            if context is None:
                context = self._context = self._worker.context(self._step, self._seq)
                if context is None:
                    return {}
            if not self.follows_stages:
                self._metadata = context.metadata(self._number)
                return self._metadata
            try:
                number, metadata = context.ready.pop()
            except IndexError:
                number, metadata = context.next(self._recorder)
            self._sending[partition] = number
        except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
            failed("push_pull", broken)
            return {}
        return metadata

    def stage_finished(
        self, partition: int, queue: "QueueType", nbytes: int, server: int | None, enqueued: int, started: int, end: int
    ) -> None:
        """Write a stage of a partition, as `Recorder.span` does, which takes over what is not usual."""
        try:
            descriptor = self._stages.get(queue) or self._worker.stage(self._tensor, queue)
            recorder, number, wait = self._recorder, 0, (started - enqueued) // 1000
            if server is None:
                server = -1
            else:
                number = self._sending.pop(partition, 0)
            try:
                lane = recorder.local.lane
            except AttributeError:
                lane = recorder.new_lane()
            if not number:
                number = next(lane.numbers, 0) or recorder.next_number(lane)
            chunk = lane.chunk
            slots, lease, buffer, _ = chunk
            offset = next(slots, 0)
            if offset and recorder.level >= _PARTITION and lane.chunk is chunk:
                try:
                    pack_span(
                        buffer,
                        offset,
                        number,
                        self._step,
                        descriptor,
                        _STAGE,
                        started,
                        end,
                        nbytes,
                        self._number,
                        self._seq,
                        wait,
                        server,
                        partition,
                        lease,
                    )
                except _error:
                    if not recorder.spoil(offset, lease):
                        return
                else:
                    return
            where = (self._number, self._seq, partition, min(wait, MOST_WAIT), server, 0, 0, number, self._step)
            recorder.span(descriptor, _PARTITION, started, end, nbytes, *where)
        except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
            failed("push_pull", broken)

    def waited(self, start: int, end: int) -> None:
        """Write how long the program was blocked: a child of what it waited for, and over when that was.

        It goes on somewhat later, when the machine has a core for it: a viewer would find the child outside its parent.
        """
        try:
            if 0 < self._end < end:
                end = self._end
            if end > start:
                self._recorder.span(
                    self._worker.wait, _PHASE, start, end, 0, self._number, 0, 0, 0, 0, 0, 0, 0, self._step
                )
        except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
            failed("push_pull", broken)

    def completed(self, end: int, error: "PushPullError | None") -> None:
        """Write the operation; one that failed may have begun just after all did."""
        try:
            self._end = end = max(end, self._start)
            recorder, number, step, flags = self._recorder, self._number, self._step, _ASYNC
            if error is not None:
                flags |= _ERROR
                recorder.error(number, _COLLECTIVE, error, step)
            recorder.span(
                self._tensor.descriptor,
                _COLLECTIVE,
                self._start,
                end,
                self._size,
                self._parent,
                self._seq,
                0,
                0,
                -1,
                flags,
                0,
                number,
                step,
            )
        except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
            failed("push_pull", broken)

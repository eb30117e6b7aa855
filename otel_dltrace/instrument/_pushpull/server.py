"""A server's pushes and pulls as records, each below the worker's span that caused it."""

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from otel_dltrace.instrument._pushpull.records import BACKEND, MOST_WAIT, trace_of
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import OPERATIONS_PER_TRACE, PHASE, Flag, Level
from otel_dltrace.model.server_keys import first_key
from otel_dltrace.record.carrier import TRACEPARENT, TRACESTATE, read_tracestate, span_below, traceparent_head
from otel_dltrace.record.packing import PARENTS, SPANS, pack_amend_parent, pack_span
from otel_dltrace.record.ring_file import AMEND_PARENT
from otel_dltrace.record.tracer import Tracer

if TYPE_CHECKING:
    from otel_dltrace.pushpull.errors import PushPullError
    from otel_dltrace.pushpull.wire import Request

_PARTITION = int(Level.PARTITION)  # plain ints, as in the worker's file
_ERROR = int(Flag.ERROR)
_SPAN, _PARENT = SPANS[_PARTITION], PARENTS[_PARTITION]
_SPAN_BELOW = _SPAN | Flag.REMOTE << 16
_error = struct.error
_MOST_KNOWN = 1024  # senders: a step has one for each worker
_FIRST_WORKER = 9
"""ps-lite numbers workers 9, 11, 13 ..., and so do the names in BytePS's server profile."""


class _Sender(NamedTuple):
    """A worker in one of its steps: what its requests have in common."""

    head: str
    trace: bytes
    step: int
    rank: int


class Server:
    """Follows the requests that a server gets; where a key is asked for, those of that one alone.

    Args:
        tracer: The live tracer.
    """

    def __init__(self, tracer: Tracer) -> None:
        self.recorder = tracer.recorder
        self.binds = tracer.recorder.names.binds
        self.descriptors: dict[tuple[str, str, int, int], int] = {}
        self.senders: dict[tuple[str, int, int], _Sender] = {}
        self._tracer, self._asked = tracer, tracer.server_key

    def answered(  # noqa: C901
        self,
        kind: str,
        request: "Request",
        metadata: Mapping[str, str],
        start: int,
        waited: int,
        end: int,
        error: "PushPullError | None",
    ) -> None:
        """Write *request*, and which span is above it; flat, as what a worker writes of a stage (see `_Pushed`)."""
        recorder, key = self.recorder, request.key
        if recorder.level < _PARTITION or (self._asked >= 0 and not self._is_asked_for(key)):
            return
        descriptor = self.descriptors.get((kind, request.name, key >> 16, request.worker))
        if descriptor is None:
            descriptor = self.descriptor(kind, request)
        seq, wait, head = request.round + 1, waited // 1000, _SPAN
        state, turn = metadata.get(TRACESTATE, ""), seq // OPERATIONS_PER_TRACE
        sender = self.senders.get((state, turn, len(self.binds))) or self.sender(state, turn)
        try:
            lane = recorder.local.lane
        except AttributeError:
            lane = recorder.new_lane()
        number = next(lane.numbers, 0) or recorder.next_number(lane)
        if sender is not None:
            span = span_below(sender.head, metadata.get(TRACEPARENT, ""))
            if span is not None:
                head = _SPAN_BELOW
                chunk = lane.chunk
                slots, lease, buffer, _ = chunk
                offset = next(slots, 0)
                if offset and lane.chunk is chunk:  # no field of it can be too large
                    pack_amend_parent(
                        buffer,
                        offset,
                        number,
                        sender.step,
                        0,
                        _PARENT,
                        sender.trace,
                        span,
                        sender.step,
                        sender.rank,
                        AMEND_PARENT,
                        lease,
                    )
                else:
                    recorder.remote_parent(number, _PARTITION, sender.trace, span, sender.step, sender.rank)
        if error is not None:
            head |= _ERROR << 16
            recorder.error(number, _PARTITION, error, NO_STEP)
        chunk = lane.chunk
        slots, lease, buffer, _ = chunk
        offset = next(slots, 0)
        if offset and lane.chunk is chunk:
            try:
                pack_span(
                    buffer,
                    offset,
                    number,
                    NO_STEP,
                    descriptor,
                    head,
                    start,
                    end,
                    request.nbytes,
                    0,
                    seq,
                    wait,
                    request.rank,
                    key & 0xFFFF,
                    lease,
                )
            except _error:
                if not recorder.spoil(offset, lease):
                    return
            else:
                return
        where = (0, seq, key & 0xFFFF, min(wait, MOST_WAIT), request.rank, head >> 16, 0, number, NO_STEP)
        recorder.span(descriptor, _PARTITION, start, end, request.nbytes, *where)

    def _is_asked_for(self, key: int) -> bool:
        """Return whether *key* is the one that is asked for: as it is, or as this server's profile has it."""
        asked, bind = self._asked, self.recorder.bound
        return key == asked or (bind is not None and key + first_key(bind.rank, bind.servers) == asked)

    def descriptor(self, kind: str, request: "Request") -> int:
        """Return a new descriptor of *request*."""
        name, key, worker = request.name, request.key >> 16, request.worker
        activity = f"{kind}-{_FIRST_WORKER + 2 * worker}"
        descriptor = Descriptor(PHASE, kind, backend=BACKEND, tensor=name, key=key, activity=activity)
        number = self.descriptors[kind, name, key, worker] = self.recorder.intern(descriptor)
        return number

    def sender(self, state: str, turn: int) -> _Sender | None:
        """Return who of our own run says *state*, known by that until the next bind: another's ids would be no ids."""
        bind, said = self.recorder.bound, read_tracestate(state)
        if said is None or bind is None or said.world != bind.world:
            return None
        trace = trace_of(self._tracer, bind, said.rank, said.step, turn)
        if len(self.senders) >= _MOST_KNOWN:
            self.senders.clear()
        known = _Sender(traceparent_head(trace), trace.to_bytes(16, "big"), said.step, said.rank)
        self.senders[state, turn, len(self.binds)] = known
        return known

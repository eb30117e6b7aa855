"""A server's pushes and pulls as records, each below the worker's span that caused it."""

from typing import TYPE_CHECKING, NamedTuple

from otel_dltrace.instrument._pushpull_worker import BACKEND, shard_of
from otel_dltrace.model.identity import NO_STEP, Bind, trace_id
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import OPERATIONS_PER_TRACE, PHASE, Flag, Level
from otel_dltrace.record.carrier import TRACEPARENT, TRACESTATE, read_tracestate, span_below, traceparent_head
from otel_dltrace.record.steps import Tracer

if TYPE_CHECKING:
    from otel_dltrace.pushpull.trace import ServerRequestFinished, ServerRequestStarted

_PARTITION = int(Level.PARTITION)  # plain ints, as in the worker's file
_REMOTE, _ERROR = int(Flag.REMOTE), int(Flag.ERROR)
_MOST_WAIT = (1 << 31) - 1
_MOST_KNOWN = 1024  # senders: a step has one for each worker
_ERRORS = "otel_dltrace.pushpull.errors"
_FIRST_WORKER = 9
"""ps-lite numbers workers 9, 11, 13 ..., and so do the names in BytePS's server profile."""


class _Sender(NamedTuple):
    """A worker in one of its steps: what its requests have in common."""

    head: str
    trace: bytes
    step: int
    rank: int


class Served:
    """Writes what a server answers; where a key is asked for, that one alone.

    Args:
        tracer: The live tracer.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer, self._recorder = tracer, tracer.recorder
        self._descriptors: dict[tuple[str, str, int, int], int] = {}
        self._senders: dict[tuple[str, int], _Sender] = {}
        self._bind: Bind | None = None

    def finished(self, event: "ServerRequestFinished") -> None:
        """Write a request."""
        request, _, waited, end, error = event
        kind, name, key, round_, worker, rank, size, metadata, start = request
        recorder, asked = self._recorder, self._tracer.server_key
        if recorder.level < _PARTITION or asked not in (-1, key):
            return
        number, seq, flags = recorder.number(), round_ + 1, 0
        sender = self._sender(metadata.get(TRACESTATE, ""), seq // OPERATIONS_PER_TRACE)
        span = None if sender is None else span_below(sender.head, metadata.get(TRACEPARENT, ""))
        if sender is not None and span is not None:
            flags = _REMOTE
            recorder.remote_parent(number, _PARTITION, sender.trace, span, sender.step, sender.rank)
        if error is not None:
            flags |= _ERROR
            recorder.failure(number, _PARTITION, f"{_ERRORS}.{error}", "", NO_STEP)
        wait = waited // 1000
        recorder.span(
            self._descriptors.get((kind, name, key >> 16, worker)) or self._descriptor(request),
            _PARTITION,
            start,
            end,
            size,
            0,
            seq,
            key & 0xFFFF,
            wait if wait < _MOST_WAIT else _MOST_WAIT,  # noqa: FURB136  -- `min` is a call
            rank,
            flags,
            0,
            number,
            NO_STEP,
        )

    def _sender(self, state: str, turn: int) -> _Sender | None:
        """Return who of our own run says *state*: another's ids would be no ids here."""
        bind = self._recorder.bound
        if bind is not self._bind:
            self._bind = bind
            self._senders.clear()
        return self._senders.get((state, turn)) or self._new_sender(state, turn)

    def _new_sender(self, state: str, turn: int) -> _Sender | None:
        bind, said = self._bind, read_tracestate(state)
        if said is None or bind is None or said.world != bind.world:
            return None
        part = said.step if said.step != NO_STEP else f"ops.{turn}"
        trace = trace_id(bind, part, shard_of(self._tracer, bind, said.rank, said.step))
        if len(self._senders) >= _MOST_KNOWN:
            self._senders.clear()
        known = _Sender(traceparent_head(trace), trace.to_bytes(16, "big"), said.step, said.rank)
        self._senders[state, turn] = known
        return known

    def _descriptor(self, request: "ServerRequestStarted") -> int:
        activity = f"{request.kind}-{_FIRST_WORKER + 2 * request.worker}"
        key = request.key >> 16
        descriptor = Descriptor(PHASE, request.kind, backend=BACKEND, tensor=request.name, key=key, activity=activity)
        number = self._recorder.intern(descriptor)
        self._descriptors[request.kind, request.name, key, request.worker] = number
        return number

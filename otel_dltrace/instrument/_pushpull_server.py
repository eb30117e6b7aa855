"""A server's pushes and pulls as records, each below the worker's span that caused it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from otel_dltrace.instrument._pushpull_records import BACKEND, MOST_WAIT, trace_of
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import OPERATIONS_PER_TRACE, PHASE, Flag, Level
from otel_dltrace.model.server_keys import first_key
from otel_dltrace.record.carrier import TRACEPARENT, TRACESTATE, read_tracestate, span_below, traceparent_head
from otel_dltrace.record.guard import failed
from otel_dltrace.record.tracer import Tracer

if TYPE_CHECKING:
    from otel_dltrace.pushpull.errors import PushPullError
    from otel_dltrace.pushpull.wire import Request

_PARTITION = int(Level.PARTITION)  # plain ints, as in the worker's file
_REMOTE, _ERROR = int(Flag.REMOTE), int(Flag.ERROR)
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
        self._tracer = tracer

    def started(self, kind: str, request: "Request", metadata: Mapping[str, str], start: int) -> "_Answered | None":
        """Return who writes *request* when it is answered, None where it is not asked for."""
        if self.recorder.level < _PARTITION or (self._tracer.server_key >= 0 and not self._is_asked_for(request.key)):
            return None
        return _Answered(self, kind, request, metadata, start)

    def _is_asked_for(self, key: int) -> bool:
        """Return whether *key* is the one that is asked for: as it is, or as this server's profile has it."""
        asked, bind = self._tracer.server_key, self.recorder.bound
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


class _Answered:
    """Writes one request."""

    __slots__ = ("_kind", "_metadata", "_request", "_server", "_start")

    def __init__(self, server: Server, kind: str, request: "Request", metadata: Mapping[str, str], start: int) -> None:
        self._server, self._kind, self._request, self._metadata, self._start = server, kind, request, metadata, start

    def finished(self, sent_nbytes: int, waited: int, end: int, error: "PushPullError | None") -> None:  # noqa: ARG002
        """Write it, and which span is above it."""
        try:
            server, request, metadata = self._server, self._request, self._metadata
            recorder, kind, key, seq = server.recorder, self._kind, request.key, request.round + 1
            descriptor = server.descriptors.get((kind, request.name, key >> 16, request.worker))
            if descriptor is None:
                descriptor = server.descriptor(kind, request)
            wait = waited // 1000
            number, flags = recorder.number(), 0
            state, turn = metadata.get(TRACESTATE, ""), seq // OPERATIONS_PER_TRACE
            sender = server.senders.get((state, turn, len(server.binds))) or server.sender(state, turn)
            span = None if sender is None else span_below(sender.head, metadata.get(TRACEPARENT, ""))
            if sender is not None and span is not None:
                flags = _REMOTE
                recorder.remote_parent(number, _PARTITION, sender.trace, span, sender.step, sender.rank)
            if error is not None:
                flags |= _ERROR
                recorder.error(number, _PARTITION, error, NO_STEP)
            recorder.span(
                descriptor,
                _PARTITION,
                self._start,
                end,
                request.nbytes,
                0,
                seq,
                key & 0xFFFF,
                wait if wait < MOST_WAIT else MOST_WAIT,  # noqa: FURB136  -- `min` is a call
                request.rank,
                flags,
                0,
                number,
                NO_STEP,
            )
        except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
            failed("push_pull", broken)

"""A server's pushes and pulls as records, each below the worker's span that caused it."""

from functools import lru_cache
from typing import TYPE_CHECKING

from otel_dltrace.instrument._pushpull_worker import BACKEND, shard_of
from otel_dltrace.model.identity import NO_STEP, Bind, trace_id
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import OPERATIONS_PER_TRACE, PHASE, Flag, Level
from otel_dltrace.record.carrier import Remote, read_remote
from otel_dltrace.record.steps import Tracer

if TYPE_CHECKING:
    from otel_dltrace.pushpull.trace import ServerRequestFinished, ServerRequestStarted

_PARTITION = int(Level.PARTITION)  # plain ints, as in the worker's file
_REMOTE, _ERROR = int(Flag.REMOTE), int(Flag.ERROR)
_MOST_WAIT = (1 << 31) - 1
_ERRORS = "otel_dltrace.pushpull.errors"
_FIRST_WORKER = 9
"""ps-lite numbers workers 9, 11, 13 ..., and so do the names in BytePS's server profile."""


class Served:
    """Writes what a server answers; where a key is asked for, that one alone.

    Args:
        tracer: The live tracer.
    """

    def __init__(self, tracer: Tracer) -> None:
        self._tracer, self._recorder = tracer, tracer.recorder
        self._requests: dict[int, ServerRequestStarted] = {}
        self._descriptors: dict[tuple[str, str, int, int], int] = {}
        self._trace_of = lru_cache(maxsize=64)(self._trace)

    def started(self, event: "ServerRequestStarted") -> None:
        """Remember a request until it is answered."""
        asked = self._tracer.server_key
        if self._recorder.level >= _PARTITION and asked in (-1, event.key):
            self._requests[event.request] = event

    def finished(self, event: "ServerRequestFinished") -> None:
        """Write a request."""
        begun = self._requests.pop(event.request, None)
        if begun is None:
            return
        recorder, flags = self._recorder, 0
        number, seq = recorder.number(), begun.round + 1
        remote = self._remote(begun, seq)
        if remote is not None:
            flags |= _REMOTE
            recorder.remote_parent(number, _PARTITION, remote)
        if event.error is not None:
            flags |= _ERROR
            recorder.failure(number, _PARTITION, f"{_ERRORS}.{event.error}", "", NO_STEP)
        recorder.span(
            self._descriptor(begun),
            _PARTITION,
            begun.time_ns,
            event.time_ns,
            begun.nbytes,
            seq=seq,
            partition=begun.key & 0xFFFF,
            a=min(event.waited_ns // 1000, _MOST_WAIT),
            b=begun.rank,
            flags=flags,
            number=number,
            step=NO_STEP,
        )

    def _remote(self, begun: "ServerRequestStarted", seq: int) -> Remote | None:
        """Return the worker's span, if it is one of our own run: another's ids would be no ids here."""
        remote, bind = read_remote(begun.metadata), self._recorder.bound
        if remote is None or bind is None or remote.world != bind.world:
            return None
        part = remote.step if remote.step != NO_STEP else f"ops.{seq // OPERATIONS_PER_TRACE}"
        return remote if int(remote.trace_id, 16) == self._trace_of(bind, part, remote.rank) else None

    def _trace(self, bind: Bind, part: int | str, rank: int) -> int:
        step = part if isinstance(part, int) else NO_STEP
        return trace_id(bind, part, shard_of(self._tracer, bind, rank, step))

    def _descriptor(self, begun: "ServerRequestStarted") -> int:
        known = (begun.kind, begun.name, begun.key >> 16, begun.worker)
        number = self._descriptors.get(known)
        if number is None:
            kind, tensor, key, worker = known
            activity = f"{kind}-{_FIRST_WORKER + 2 * worker}"
            descriptor = Descriptor(PHASE, kind, backend=BACKEND, tensor=tensor, key=key, activity=activity)
            number = self._descriptors[known] = self._recorder.intern(descriptor)
        return number

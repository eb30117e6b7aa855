"""Named trace points: what a push_pull is doing, told to one observer, for one ``if`` when there is none.

An observer is any callable that takes an event; it is called on the thread where the event happens, between
two stages, so it has to be quick and must not raise. One that comes while a push_pull is under way is told of ends
whose beginnings it has not seen. Times are ``time.monotonic_ns``.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from otel_dltrace.model.queue_types import QueueType


@dataclass(frozen=True, slots=True)
class TensorEnqueued:
    """A push_pull begins, on the thread that asked for it; `operation` names it in every later event."""

    operation: int
    name: str
    declared_key: int
    round: int
    partitions: int
    nbytes: int
    dtype: str
    priority: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class TensorCompleted:
    """The last partition of a push_pull is done, or the push_pull failed: then `error` names the exception."""

    operation: int
    name: str
    time_ns: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StageStarted:
    """A partition left the queue of a stage: all it waited for is there. It came there at `enqueued_ns`."""

    operation: int
    name: str
    key: int
    partition: int
    queue: QueueType
    nbytes: int
    round: int
    server: int | None
    enqueued_ns: int
    started_ns: int


@dataclass(frozen=True, slots=True)
class StageFinished(StageStarted):
    """A partition is through with a stage."""

    finished_ns: int


@dataclass(frozen=True, slots=True)
class RequestSending:
    """A request is about to leave for a server; what the observer puts into `metadata` goes along with it.

    gRPC's rules hold: keys in lower case, values of printable ASCII.
    """

    operation: int
    key: int
    partition: int
    queue: QueueType
    server: int
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServerRequestStarted:
    """A server got a request; `metadata` is what the worker's observer had put in. `request` names it later on."""

    request: int
    kind: str
    """``push`` or ``pull``."""
    name: str
    key: int
    round: int
    worker: int
    rank: int
    """Global rank of the process that sent it."""
    nbytes: int
    """Size of the dense partition."""
    metadata: dict[str, str]
    time_ns: int


@dataclass(frozen=True, slots=True)
class ServerRequestFinished:
    """A server has answered a request; a pull waited `waited_ns` of the time for the pushes of others."""

    request: int
    kind: str
    key: int
    round: int
    rank: int
    sent_nbytes: int
    waited_ns: int
    time_ns: int
    error: str | None = None


Event = (
    TensorEnqueued
    | TensorCompleted
    | StageStarted
    | StageFinished
    | RequestSending
    | ServerRequestStarted
    | ServerRequestFinished
)
Observer = Callable[[Event], None]

observer: Observer | None = None


def observe(new: Observer | None) -> Observer | None:
    """Have *new* told of every event in this process from now on; return the observer before it."""
    global observer
    before, observer = observer, new
    return before

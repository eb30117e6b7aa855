"""Named trace points: what a push_pull is doing, told to one observer, for one ``if`` when there is none.

An observer is any callable that takes an event; it is called on the thread where the event happens, between
two stages, so it has to be quick and must not raise. Events are named tuples, the cheapest values there are. One that
comes while a push_pull is under way is told of ends whose beginnings it has not seen. Times are ``time.monotonic_ns``.

Where an event is told for each partition it is made by ``tuple.__new__``: that takes a third of the time.
"""

from collections.abc import Callable
from typing import NamedTuple

from otel_dltrace.model.queue_types import QueueType


class TensorEnqueued(NamedTuple):
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


class TensorCompleted(NamedTuple):
    """The last partition of a push_pull is done, or the push_pull failed: then `error` names the exception."""

    operation: int
    name: str
    time_ns: int
    error: str | None = None


class WaitStarted(NamedTuple):
    """Somebody waits for a push_pull that is not done yet; `WaitFinished` follows on the same thread."""

    operation: int
    time_ns: int


class WaitFinished(NamedTuple):
    """The push_pull is done or has failed, and whoever waited goes on."""

    operation: int
    time_ns: int


class StageFinished(NamedTuple):
    """A partition is through with a stage: it came into its queue, left it when all it waited for was there, ended."""

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
    finished_ns: int


class RequestSending(NamedTuple):
    """A request is about to leave for a server; what the observer puts into `metadata` goes along with it.

    gRPC's rules hold: keys in lower case, values of printable ASCII.
    """

    operation: int
    key: int
    partition: int
    queue: QueueType
    server: int
    metadata: dict[str, str]


class ServerRequestStarted(NamedTuple):
    """A server got a request; `metadata` is what the worker's observer had put in."""

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


class ServerRequestFinished(NamedTuple):
    """A server has answered `request`; a pull waited `waited_ns` of the time for the pushes of others."""

    request: ServerRequestStarted
    sent_nbytes: int
    waited_ns: int
    time_ns: int
    error: str | None = None


Event = (
    TensorEnqueued
    | TensorCompleted
    | WaitStarted
    | WaitFinished
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

"""Named trace points: what a push_pull is doing, told to one observer, for one ``if`` when there is none.

Who observes is asked at the beginning of each push_pull, and of each request that a server gets, and answers with
what follows it, or with None; so nobody is told of an end whose beginning it has not seen. All are called on the
thread where it happens, between two stages: they have to be quick and must not raise. Times are ``time.monotonic_ns``.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from otel_dltrace.model.queue_types import QueueType
from otel_dltrace.pushpull.wire import Request


class Partition(Protocol):
    """A partition that is through with all its stages, or with none more since its push_pull has failed.

    Attributes:
        partition: Its number within its tensor.
        nbytes: Its size.
        server: Who is asked in the stages ``PUSH`` and ``PULL``; None if nobody is.
        times: When it came into the queue of its first stage; then for each stage when it left that, as all it waited
            for was there, and when it was done, and so in the next one's queue.
    """

    partition: int
    nbytes: int
    server: int | None

    @property
    def times(self) -> Sequence[int]:
        """See above."""

    @property
    def stages(self) -> Sequence[QueueType]:
        """All that it goes through, in their order."""


class PushPull(Protocol):
    """Follows one push_pull on a worker."""

    @property
    def follows_stages(self) -> bool:
        """Whether it is told of stages; asked at the beginning, since to time them costs more than all the rest."""

    def request_sending(self, partition: int, queue: QueueType) -> Mapping[str, str]:
        """Return what goes along, as metadata, with the request that the stage *queue* is about to send to a server.

        gRPC's rules hold: keys in lower case, values of printable ASCII.
        """

    def partitions_finished(self, partitions: deque[Partition]) -> None:
        """Take *partitions* out, several in a row, before `completed`: one at a time costs twice as much.

        Other threads may put more in, or take some out, at the same time.
        """

    def waited(self, start: int, end: int) -> None:
        """Somebody had to wait for the push_pull, and goes on now that it is done or has failed."""

    def completed(self, end: int, error: str | None) -> None:
        """The last partition is done, or the push_pull failed: then *error* names the exception."""


class Served(Protocol):
    """Follows one request on a server."""

    def finished(self, sent_nbytes: int, waited: int, end: int, error: str | None) -> None:
        """It was answered; a pull waited for *waited* ns of it until the last worker had pushed."""


class Observer(Protocol):
    """Is told what this process begins."""

    def push_pull_started(
        self, name: str, declared_key: int, round_: int, nbytes: int, dtype: str, start: int
    ) -> PushPull | None:
        """A push_pull begins, on the thread that asked for it."""

    def request_started(self, kind: str, request: Request, metadata: Mapping[str, Any], start: int) -> Served | None:
        """A server got a ``push`` or ``pull``; *metadata* is what the worker's observer had put in, and gRPC's own."""


observer: Observer | None = None


def observe(new: Observer | None) -> Observer | None:
    """Have *new* told of all that begins in this process from now on; return the observer before it."""
    global observer
    before, observer = observer, new
    return before

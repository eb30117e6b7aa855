"""Named trace points: what a push_pull is doing, told to one observer, for one ``if`` when there is none.

Who observes is asked at the beginning of each push_pull, and answers with what follows it, or with None; so nobody is
told of an end whose beginning it has not seen. Of a request to a server it is told once, when that is over. All are
called on the thread where it happens, between two stages: they have to be quick and must not raise. Times are
``time.monotonic_ns``.
"""

from collections.abc import Mapping
from typing import Any, Protocol

from otel_dltrace.model.queue_types import QueueType
from otel_dltrace.pushpull.errors import PushPullError
from otel_dltrace.pushpull.wire import Request


class PushPull(Protocol):
    """Follows one push_pull on a worker."""

    @property
    def follows_stages(self) -> bool:
        """Whether it is told of stages; asked at the beginning, since to time them costs more than all the rest."""

    def request_sending(self, partition: int) -> Mapping[str, str]:
        """Return what goes along, as metadata, with the request that is about to leave for a server.

        gRPC's rules hold: keys in lower case, values of printable ASCII.
        """

    def stage_finished(
        self, partition: int, queue: QueueType, nbytes: int, server: int | None, enqueued: int, started: int, end: int
    ) -> None:
        """A partition is through with a stage: it came into its queue, left it when all it waited for was there, ended.

        *server* is who was asked, in a stage that asks one. Requests under way end with a push_pull that fails, other
        stages have no end then. One that was over by then may be told of while, or just after, `completed` is.
        """

    def waited(self, start: int, end: int) -> None:
        """Somebody had to wait for the push_pull, and goes on now that it is done or has failed."""

    def completed(self, end: int, error: PushPullError | None) -> None:
        """The last partition is done, or the push_pull failed: then with *error*, and when the job did."""


class Observer(Protocol):
    """Is told what this process does."""

    def push_pull_started(
        self, name: str, declared_key: int, round_: int, nbytes: int, dtype: str, start: int
    ) -> PushPull | None:
        """A push_pull begins, on the thread that asked for it."""

    def request_answered(
        self,
        kind: str,
        request: Request,
        metadata: Mapping[str, Any],
        start: int,
        waited: int,
        end: int,
        error: PushPullError | None,
    ) -> None:
        """A ``push`` or ``pull`` was answered by this server, or with *error* will not be.

        *metadata* is what the worker's observer had put in, and gRPC's own. A pull waited *waited* ns of the time for
        the last worker's push.
        """


observer: Observer | None = None


def observe(new: Observer | None) -> Observer | None:
    """Have *new* told of all that begins in this process from now on; return the observer before it."""
    global observer
    before, observer = observer, new
    return before

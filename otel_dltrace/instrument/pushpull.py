"""The push_pulls of our own parameter server: operations and their stages on workers, requests on servers."""

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from otel_dltrace.instrument._launcher import BYTEPS, launcher_bind
from otel_dltrace.instrument._pushpull.server import Server
from otel_dltrace.instrument._pushpull.worker import Worker
from otel_dltrace.instrument._sites import Attachment, Row, Undo
from otel_dltrace.record.guard import failed
from otel_dltrace.record.tracer import Tracer, live

if TYPE_CHECKING:
    from otel_dltrace.pushpull.errors import PushPullError
    from otel_dltrace.pushpull.trace import PushPull
    from otel_dltrace.pushpull.wire import Request


class Observer:
    """Has push_pulls and requests followed by the live tracer's writers; none of ours ever raises there."""

    def __init__(self) -> None:
        self._tracer: Tracer | None = None
        self._worker: Worker
        self._server: Server

    def push_pull_started(
        self, name: str, declared_key: int, round_: int, nbytes: int, dtype: str, start: int
    ) -> "PushPull | None":
        """Follow a push_pull of this worker."""
        try:
            tracer = live.tracer
            if tracer is None:
                return None
            if tracer is not self._tracer:
                self._follow(tracer)
            return self._worker.started(name, declared_key, round_, nbytes, dtype, start)
        except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
            failed("push_pull", broken)
            return None

    def request_answered(
        self,
        kind: str,
        request: "Request",
        metadata: Mapping[str, str],
        start: int,
        waited: int,
        end: int,
        error: "PushPullError | None",
    ) -> None:
        """Write a request to this server."""
        try:
            tracer = live.tracer
            if tracer is None:
                return
            if tracer is not self._tracer:
                self._follow(tracer)
            self._server.answered(kind, request, metadata, start, waited, end, error)
        except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
            failed("push_pull", broken)

    def _follow(self, tracer: Tracer) -> None:
        """Write for *tracer* from now on: a new one has new writers."""
        bind_by_launcher(tracer)
        self._worker, self._server, self._tracer = Worker(tracer), Server(tracer), tracer


def bind_by_launcher(tracer: Tracer) -> None:
    """Bind a process of a push_pull job, if its environment says which run it is: servers know no store of torch."""
    bind = launcher_bind(tracer)
    if bind is not None and tracer.environment.launcher == BYTEPS:
        tracer.recorder.bind(bind)


def _attach(module: ModuleType) -> Undo:
    before = module.observe(Observer())
    return lambda: module.observe(before)


ROWS: tuple[Row, ...] = (Attachment("otel_dltrace.pushpull.trace", _attach),)

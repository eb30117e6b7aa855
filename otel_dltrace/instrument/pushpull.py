"""The push_pulls of our own parameter server: operations and their stages on workers, requests on servers."""

from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING

from otel_dltrace.instrument._launcher import BYTEPS, launcher_bind
from otel_dltrace.instrument._pushpull_server import Server
from otel_dltrace.instrument._pushpull_worker import Worker
from otel_dltrace.instrument._sites import Attachment, Row, Undo
from otel_dltrace.record.guard import failed
from otel_dltrace.record.tracer import Tracer, live

if TYPE_CHECKING:
    from otel_dltrace.pushpull.trace import PushPull, Served
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
            if not self._follows():
                return None
            return self._worker.started(name, declared_key, round_, nbytes, dtype, start)
        except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
            failed("push_pull", broken)
            return None

    def request_started(
        self, kind: str, request: "Request", metadata: Mapping[str, str], start: int
    ) -> "Served | None":
        """Follow a request to this server."""
        try:
            return self._server.started(kind, request, metadata, start) if self._follows() else None
        except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
            failed("push_pull", broken)
            return None

    def _follows(self) -> bool:
        """Return whether there is a tracer; a new one has new writers."""
        tracer = live.tracer
        if tracer is not None and tracer is not self._tracer:
            bind_by_launcher(tracer)
            self._worker, self._server, self._tracer = Worker(tracer), Server(tracer), tracer
        return tracer is not None


def bind_by_launcher(tracer: Tracer) -> None:
    """Bind a process of a push_pull job, if its environment says which run it is: servers know no store of torch."""
    bind = launcher_bind(tracer)
    if bind is not None and tracer.environment.launcher == BYTEPS:
        tracer.recorder.bind(bind)


def _attach(module: ModuleType) -> Undo:
    before = module.observe(Observer())
    return lambda: module.observe(before)


ROWS: tuple[Row, ...] = (Attachment("otel_dltrace.pushpull.trace", _attach),)

"""The push_pulls of our own parameter server: operations and their stages on workers, requests on servers."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._launcher import launcher_bind
from otel_dltrace.instrument._pushpull_server import Served
from otel_dltrace.instrument._pushpull_worker import Pushed
from otel_dltrace.instrument._sites import Attachment, Row, Undo
from otel_dltrace.record.guard import failed
from otel_dltrace.record.steps import Tracer, live

_LAUNCHER = "byteps"

Handler = Callable[[Any], None]


class Observer:
    """What pushpull tells its events to: each kind has its handler, and none of ours ever raises there.

    Args:
        module: ``otel_dltrace.pushpull.trace``, whose classes the events are of.
    """

    def __init__(self, module: ModuleType) -> None:
        self._module: Any = module
        self._tracer: Tracer | None = None
        self._handlers: dict[type, Handler] = {}

    def take(self, event: object) -> None:
        """Record *event*."""
        tracer = live.tracer
        if tracer is None:
            return
        try:
            if tracer is not self._tracer:
                self._follow(tracer)
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event)
        except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
            failed("push_pull", broken)

    def _follow(self, tracer: Tracer) -> None:
        bind_by_launcher(tracer)
        worker, server, trace = Pushed(tracer), Served(tracer), self._module
        self._handlers = {
            trace.TensorEnqueued: worker.enqueued,
            trace.RequestSending: worker.sending,
            trace.StageFinished: worker.finished,
            trace.TensorCompleted: worker.completed,
            trace.WaitStarted: worker.wait_started,
            trace.WaitFinished: worker.wait_finished,
            trace.ServerRequestFinished: server.finished,
        }
        self._tracer = tracer


def bind_by_launcher(tracer: Tracer) -> None:
    """Bind a process of a push_pull job, if its environment says which run it is: servers know no store of torch."""
    bind = launcher_bind(tracer)
    if bind is not None and tracer.environment.launcher == _LAUNCHER:
        tracer.recorder.bind(bind)


def _attach(module: ModuleType) -> Undo:
    before = module.observe(Observer(module).take)
    return lambda: module.observe(before)


ROWS: tuple[Row, ...] = (Attachment("otel_dltrace.pushpull.trace", _attach),)

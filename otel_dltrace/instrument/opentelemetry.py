"""Joins the user's own OpenTelemetry spans to the training step that is current (contract 3).

At a step boundary the step becomes the current span of the thread that begins it, unless a span
of the user is current there: that one stays, and gets a link to the step; where it uncovers an
earlier step at its end, the current one takes that one's place. Everywhere else - in
other threads, in tasks and in contexts that still hold an earlier step - the step is current for
the moment in which the SDK starts a span. So it becomes the parent of that span, and nothing of
ours is left behind. Nothing is joined before the process is bound: ids are not known yet.
"""

import sys
from contextvars import Token
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._sites import Args, Attachment, Kwargs, Row, Site, Undo
from otel_dltrace.model.identity import Bind, rank_step_id, trace_id
from otel_dltrace.model.plan import share_of
from otel_dltrace.model.semconv import DL_STEP
from otel_dltrace.record.carrier import TRACESTATE_KEY, tracestate_value
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.tracer import Tracer, live


@dataclass(frozen=True, slots=True)
class _Api:
    """What the program has loaded: ``opentelemetry.trace``, ``.context``, and our class of span over it."""

    trace: Any
    context: Any
    step_span: Any


_api: _Api | None = None
_current: Any = None
"""The latest step as a span of the API."""


def step_of(span: Any) -> int | None:
    """Return the ordinal of the step that *span*, made by us, stands for; None for anybody else's span."""
    return span.step if _api is not None and type(span) is _api.step_span else None


def open_step() -> int | None:
    """Return the ordinal of the step that this process is in, whichever thread asks."""
    tracer = live.tracer
    return tracer.recorder.step if tracer is not None and tracer.steps.is_open else None


def _span_of(api: _Api, tracer: Tracer) -> Any:
    """Return the current step as a span of the API; None outside any step, and before the process is bound."""
    global _current  # noqa: PLW0603  -- the step is the process's, as its tracer is
    recorder = tracer.recorder
    bind, step, span = recorder.bound, recorder.step, _current
    if bind is None or not tracer.steps.is_open:
        return None
    if span is None or span.step != step or span.bind is not bind:
        _current = span = api.step_span(bind, step, tracer.span_budget)
    return span


@lru_cache(maxsize=1)
def _api_of(module: ModuleType) -> _Api:
    """Return the API, and a step as a span of it: one that has ids, while all else is recorded elsewhere."""
    api: Any = module

    class StepSpan(api.NonRecordingSpan):  # type: ignore[misc]  # known once the program has loaded it
        def __init__(self, bind: Bind, step: int, budget: int) -> None:
            self.bind, self.step, self._budget = bind, step, budget
            self._made: Any = None

        def get_span_context(self) -> Any:
            """Return the ids, hashed when somebody first asks for them: most steps hold no span of the user."""
            if self._made is None:
                self._made = _context_of(api, self.bind, self.step, self._budget)
            return self._made

        def __repr__(self) -> str:
            return f"StepSpan({self.get_span_context()!r})"

    return _Api(api, sys.modules["opentelemetry.context"], StepSpan)


def _context_of(api: Any, bind: Bind, step: int, budget: int) -> Any:
    shard = share_of(bind.rank, bind.world_size, bind.servers, budget, step).shard
    return api.SpanContext(
        trace_id(bind, step, shard),
        rank_step_id(bind, step),
        is_remote=False,
        # Always sampled: with 0 the user's spans below it would vanish, and the step itself always goes out.
        trace_flags=api.TraceFlags(api.TraceFlags.SAMPLED),
        trace_state=api.TraceState([(TRACESTATE_KEY, tracestate_value(step, bind.world, bind.rank))]),
    )


def follow(tracer: Tracer) -> None:
    """Have the steps of *tracer* be current spans, if the program has loaded the API: most have not."""
    if _api is not None and step_begins not in tracer.steps.on_begin:
        tracer.steps.on_begin.append(step_begins)


@guarded
def step_begins() -> None:
    """Make the step that has begun the current span, where no span of the user is current."""
    tracer, api = live.tracer, _api
    span = None if tracer is None or api is None else _span_of(api, tracer)
    if tracer is None or api is None or span is None:
        return
    current = api.trace.get_current_span()
    if step_of(current) is None and current.get_span_context().is_valid:
        # Spans that take no links (ddtrace's) inherit a method that only warns.
        if current.is_recording() and type(current).add_link is not api.trace.Span.add_link:
            current.add_link(span.get_span_context(), {DL_STEP: tracer.recorder.step})
        return
    # Never undone by its token: what was current before may have ended by then, and would stay for ever.
    api.context.attach(api.trace.set_span_in_context(span))


@guarded
def step_left() -> None:
    """Make no span current where a step of ours is; one of the user stays."""
    api = _api
    if api is not None and step_of(api.trace.get_current_span()) is not None:
        api.context.attach(api.trace.set_span_in_context(api.trace.INVALID_SPAN))


def _span_begins(args: Args, kwargs: Kwargs) -> "tuple[_Api, Token[Any]] | None":
    """Make the current step current while the SDK starts a span, unless it is or the user chose the parent."""
    tracer, api = live.tracer, _api
    chosen = args[2] if len(args) > 2 else kwargs.get("context")
    if tracer is None or api is None or chosen is not None:
        return None
    current = api.trace.get_current_span()
    span = _span_of(api, tracer)
    if current is span:
        return None
    if step_of(current) is not None:
        span = api.trace.INVALID_SPAN if span is None else span
    elif span is None or current.get_span_context().is_valid:
        return None
    return api, api.context.attach(api.trace.set_span_in_context(span))


def _span_begun(attached: "tuple[_Api, Token[Any]]", _result: object) -> None:
    api, token = attached
    api.context.detach(token)


def _span_leaves(_args: Args, _kwargs: Kwargs) -> _Api | None:
    tracer = live.tracer
    return _api if tracer is not None and tracer.steps.trains_here() else None


def _span_left(api: _Api, _result: object) -> None:
    """Make the current step current where what a span of the user has uncovered is an earlier one.

    A step that began inside that span could not be: the program's logs and what it injects
    would go on naming the step before.
    """
    tracer, current = live.tracer, api.trace.get_current_span()
    if tracer is None or step_of(current) is None:
        return
    span = _span_of(api, tracer)
    if current is not span:
        api.context.attach(api.trace.set_span_in_context(api.trace.INVALID_SPAN if span is None else span))


def _attach(module: ModuleType) -> Undo:
    global _api  # noqa: PLW0603  -- what the process has loaded
    _api = _api_of(module)
    if live.tracer is not None:
        follow(live.tracer)

    def detach() -> None:
        global _api  # noqa: PLW0603
        step_left()
        _api = None
        if live.tracer is not None and step_begins in live.tracer.steps.on_begin:
            live.tracer.steps.on_begin.remove(step_begins)

    return detach


ROWS: tuple[Row, ...] = (
    Attachment("opentelemetry.trace", _attach),
    Site(
        "opentelemetry.sdk.trace",
        "Tracer.start_span",
        begin=_span_begins,
        finish=_span_begun,
        fail=_span_begun,
    ),
    Site("opentelemetry.context", "detach", begin=_span_leaves, finish=_span_left),
)

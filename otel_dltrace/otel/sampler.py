"""Samples users' own spans as the steps around them are sent: in full, or not at all."""

from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    ParentBased,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)
from opentelemetry.trace import Link, SpanKind, get_current_span
from opentelemetry.trace.span import TraceState
from opentelemetry.util.types import Attributes

from otel_dltrace.instrument.opentelemetry import open_step, step_of
from otel_dltrace.model.numbers import share
from otel_dltrace.model.plan import Window
from otel_dltrace.settings.config import Config

_SHARE = "OTEL_TRACES_SAMPLER_ARG"


class StepSampler(Sampler):
    """Samples the outermost span of the user in a step if the window holds that step, the rest as their parents.

    Args:
        window: The steps that go out in full.
        outside: Decides for spans outside any step.
    """

    def __init__(self, window: Window, outside: Sampler = ALWAYS_ON) -> None:
        self._window = window
        self._outside = ParentBased(outside)

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        """Decide by the step that the span begins in, whichever thread it begins on."""
        step = _step_around(parent_context)
        sampler: Sampler = self._outside
        if step is not None:
            sampler = ALWAYS_ON if step in self._window else ALWAYS_OFF
        return sampler.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        """Return what it is called in the SDK's own messages."""
        return f"StepSampler{{{self._window}}}"


def _step_around(parent_context: Context | None) -> int | None:
    """Return the step whose spans' decision is still to be made here; None where a parent's holds."""
    parent = get_current_span(parent_context)
    step = step_of(parent)
    if step is None and not parent.get_span_context().is_valid:
        return open_step()  # not bound yet, or begun apart from the step on purpose
    return step


def step_sampler(argument: str | None = None) -> Sampler:
    """Return the sampler that ``OTEL_TRACES_SAMPLER=dltrace_step`` names.

    Args:
        argument: ``OTEL_TRACES_SAMPLER_ARG``: the share of traces outside any step, by default all.

    Raises:
        ConfigError: It is no share, or one of our own variables cannot be used.
    """
    window = Window.parse(Config.from_env().steps)
    return StepSampler(window, TraceIdRatioBased(share({_SHARE: argument or ""}, _SHARE)))

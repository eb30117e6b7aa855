"""Whether this process is traced, and which sources, as the environment says."""

from collections.abc import Iterable, Mapping

from otel_dltrace.record import guard
from otel_dltrace.settings import byteps
from otel_dltrace.settings.config import SWITCH, truth
from otel_dltrace.settings.said import said

INSTRUMENTOR_PREFIX = "dltrace_"
"""Before the name of a source it is the name of the instrumentor that traces it."""
SDK_DISABLED = "OTEL_SDK_DISABLED"


def is_switched_on(env: Mapping[str, str]) -> bool:
    """Return whether *env* asks for tracing; where it says nothing, whether BytePS's own variables do.

    Raises:
        ConfigError: ``OTEL_DLTRACE`` is neither true nor false.
    """
    switch = said(env, SWITCH)
    return (truth(SWITCH, switch) if switch else byteps.asks(env)) and not is_sdk_disabled(env)


def is_sdk_disabled(env: Mapping[str, str]) -> bool:
    """Return whether ``OTEL_SDK_DISABLED`` is ``true``; OpenTelemetry takes every other value for false, and warns."""
    disabled = said(env, SDK_DISABLED)
    if disabled.lower() not in ("", "true", "false"):
        guard.say(f"{SDK_DISABLED}={disabled!r} disables nothing; OpenTelemetry accepts only true", SDK_DISABLED)
    return disabled.lower() == "true"


def is_switched_off(env: Mapping[str, str]) -> bool:
    """Return whether *env* forbids tracing, whoever else asks for it.

    Raises:
        ConfigError: ``OTEL_DLTRACE`` is neither true nor false.
    """
    return not is_switched_on({**env, SWITCH: said(env, SWITCH) or "1"})


def enabled_sources(sources: Iterable[str], env: Mapping[str, str]) -> list[str]:
    """Return those of *sources* whose instrumentor ``OTEL_PYTHON_DISABLED_INSTRUMENTATIONS`` does not name."""
    disabled = {name.strip() for name in env.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "").split(",")}
    return [source for source in sources if not disabled & {"*", INSTRUMENTOR_PREFIX + source}]

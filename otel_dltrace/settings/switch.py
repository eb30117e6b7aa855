"""Whether this process is traced, and which sources, as the environment says."""

from collections.abc import Iterable, Mapping

from otel_dltrace.record import guard
from otel_dltrace.settings import byteps
from otel_dltrace.settings.config import SWITCH, truth

INSTRUMENTOR_PREFIX = "dltrace_"
"""Before the name of a source it is the name of the instrumentor that traces it."""
_SDK_DISABLED = "OTEL_SDK_DISABLED"


def is_switched_on(env: Mapping[str, str]) -> bool:
    """Return whether *env* asks for tracing; where it says nothing, whether BytePS's own variables do.

    Raises:
        ConfigError: ``OTEL_DLTRACE`` is neither true nor false.
    """
    said = env.get(SWITCH, "").strip()
    return (truth(SWITCH, said) if said else byteps.asks(env)) and not _is_sdk_disabled(env)


def _is_sdk_disabled(env: Mapping[str, str]) -> bool:
    """Return whether ``OTEL_SDK_DISABLED`` is ``true``; OpenTelemetry takes every other value for false, and warns."""
    said = env.get(_SDK_DISABLED, "").strip()
    if said.lower() not in ("", "true", "false"):
        guard.say(f"{_SDK_DISABLED}={said!r} disables nothing; OpenTelemetry knows true alone", _SDK_DISABLED)
    return said.lower() == "true"


def is_switched_off(env: Mapping[str, str]) -> bool:
    """Return whether *env* forbids tracing, whoever else asks for it.

    Raises:
        ConfigError: ``OTEL_DLTRACE`` is neither true nor false.
    """
    is_said = bool(env.get(SWITCH, "").strip())
    return not is_switched_on({**env, SWITCH: env[SWITCH] if is_said else "1"})


def enabled_sources(sources: Iterable[str], env: Mapping[str, str]) -> list[str]:
    """Return those of *sources* whose instrumentor ``OTEL_PYTHON_DISABLED_INSTRUMENTATIONS`` does not name."""
    disabled = {name.strip() for name in env.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "").split(",")}
    return [source for source in sources if not disabled & {"*", INSTRUMENTOR_PREFIX + source}]

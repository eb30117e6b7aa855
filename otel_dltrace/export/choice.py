"""Which exporters spans go to, and when, as OpenTelemetry's variables say; standard library only, for training."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.numbers import milliseconds

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

TRACES, METRICS = "TRACES", "METRICS"
"""The signals, as they stand in the names of variables."""
DELAY_S = 5.0
"""That of the SDK's `BatchSpanProcessor`."""
OTLP, NONE = "otlp", "none"


def exporters(env: Mapping[str, str], signal: str = TRACES) -> "tuple[EntryPoint, ...]":
    """Return the exporters besides OTLP that *env* names for *signal*, a list with commas, in its order.

    Raises:
        ConfigError: No package that is installed has an exporter of a name.
    """
    names = [name for name in _names(env, signal) if name not in (OTLP, NONE)]
    return tuple(_find(names, signal)) if names else ()


def names_otlp(env: Mapping[str, str], signal: str = TRACES) -> bool:
    """Return whether *env* lets *signal* go out over OTLP: it names that, or nothing."""
    names = _names(env, signal)
    return not names or OTLP in names


def delay_s(env: Mapping[str, str]) -> float:
    """Return how many seconds records may wait to be passed on together, as ``OTEL_BSP_SCHEDULE_DELAY`` says in ms.

    Raises:
        ConfigError: It says none.
    """
    return milliseconds(env, "OTEL_BSP_SCHEDULE_DELAY", 1000 * DELAY_S) / 1000


def _variable(signal: str) -> str:
    return f"OTEL_{signal}_EXPORTER"


def _names(env: Mapping[str, str], signal: str) -> list[str]:
    names = (name.strip() for name in env.get(_variable(signal), "").split(","))
    return list(dict.fromkeys(NONE if name.lower() == NONE else name for name in names if name))


def _find(names: Iterable[str], signal: str) -> "Iterator[EntryPoint]":
    """Yield the entry points in which packages, the SDK's own too, offer the exporters *names*."""
    # Imported here, since it costs the start of a program some ms.
    from importlib.metadata import entry_points

    installed: dict[str, EntryPoint] = {}
    for point in entry_points(group=f"opentelemetry_{signal.lower()}_exporter"):
        installed.setdefault(point.name, point)  # the first counts, as in the SDK
    for name in names:
        if name not in installed:
            there = ", ".join(sorted({*installed, OTLP, NONE}))
            raise ConfigError(f"{_variable(signal)}: no exporter called {name!r} is installed; available: {there}")
        yield installed[name]

"""Which exporters ``OTEL_TRACES_EXPORTER`` names; standard library only, since the training process checks it."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from otel_dltrace.model.errors import ConfigError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

VARIABLE = "OTEL_TRACES_EXPORTER"
GROUP = "opentelemetry_traces_exporter"
"""The entry points in which packages, the SDK's own too, offer their span exporters."""
OTLP, NONE = "otlp", "none"


def exporters(env: Mapping[str, str]) -> "tuple[EntryPoint, ...]":
    """Return the exporters besides OTLP that *env* names, a list with commas, in its order.

    Raises:
        ConfigError: No package that is installed has an exporter of a name.
    """
    names = [name for name in _names(env) if name not in (OTLP, NONE)]
    return tuple(_find(names)) if names else ()


def names_otlp(env: Mapping[str, str]) -> bool:
    """Return whether *env* lets spans go out over OTLP: it names that, or nothing."""
    names = _names(env)
    return not names or OTLP in names


def _names(env: Mapping[str, str]) -> list[str]:
    names = (name.strip() for name in env.get(VARIABLE, "").split(","))
    return list(dict.fromkeys(NONE if name.lower() == NONE else name for name in names if name))


def _find(names: Iterable[str]) -> "Iterator[EntryPoint]":
    # Imported here, since it costs the start of a program some ms.
    from importlib.metadata import entry_points

    installed: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        installed.setdefault(point.name, point)  # the first counts, as in the SDK
    for name in names:
        if name not in installed:
            there = ", ".join(sorted({*installed, OTLP, NONE}))
            raise ConfigError(f"{VARIABLE}: no exporter called {name!r} is installed; there are {there}")
        yield installed[name]

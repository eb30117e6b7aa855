"""Distributed tracing of distributed deep-learning training over OpenTelemetry."""

import otel_dltrace.instrument  # noqa: F401  -- see below
from otel_dltrace._version import __version__

TYPE_CHECKING = False  # as `typing` has it, which would be half of what this import costs
if TYPE_CHECKING:
    from otel_dltrace.configure.recording import flush, start, stop
    from otel_dltrace.configure.sources import instrument, uninstrument
    from otel_dltrace.record.blocks import operation, phase, step
    from otel_dltrace.settings.config import Config

__all__ = [
    "Config",
    "__version__",
    "flush",
    "instrument",
    "operation",
    "phase",
    "start",
    "step",
    "stop",
    "uninstrument",
]
_ROOMS = {
    "Config": "settings.config",
    "flush": "configure.recording",
    "instrument": "configure.sources",
    "operation": "record.blocks",
    "phase": "record.blocks",
    "start": "configure.recording",
    "step": "record.blocks",
    "stop": "configure.recording",
    "uninstrument": "configure.sources",
}

# The room of that name is imported above, so that no later import puts it in the place of the function; who reloads us
# has it imported already.
globals().pop("instrument", None)


def __getattr__(name: str) -> object:
    """Return a public name, loaded when it is first asked for: most processes that import us never do."""
    if name not in __all__:
        raise AttributeError(f"module 'otel_dltrace' has no attribute {name!r}")
    from importlib import import_module

    value: object = getattr(import_module(f"otel_dltrace.{_ROOMS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the public names."""
    return list(__all__)

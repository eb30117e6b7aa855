"""Tracing of frameworks, switched on and off: by the program, by the environment, or by an instrumentor."""

import os
from typing import Any

from otel_dltrace.configure.recording import start
from otel_dltrace.model.errors import DltraceError
from otel_dltrace.record import guard
from otel_dltrace.settings.config import Config
from otel_dltrace.settings.switch import enabled_sources, is_switched_off, is_switched_on


def instrument(config: Config | None = None, **fields: Any) -> None:
    """Trace the frameworks that this program has imported or will import, and begin to record as `start` does."""
    from otel_dltrace.instrument import registry

    start(config, **fields)
    registry.instrument()


def uninstrument() -> None:
    """Give the frameworks their own functions back, the same objects; recording goes on until `stop`."""
    from otel_dltrace.instrument import registry

    registry.uninstrument()


@guard.guarded
def autostart() -> None:
    """Do what ``OTEL_DLTRACE`` asks for; a bad value is one sentence, and the program goes on untraced."""
    try:
        if is_switched_on(os.environ):
            from otel_dltrace.instrument import registry

            start()
            registry.instrument(enabled_sources(registry.TABLES, os.environ))
    except DltraceError as error:
        guard.say(f"{error}; tracing is off")


@guard.guarded
def instrument_source(source: str, **fields: Any) -> None:
    """Trace *source*, as its instrumentor asks for it; a bad value is one sentence, as in `autostart`.

    Args:
        source: Its name.
        fields: Those of `Config` that differ from what the environment says.
    """
    try:
        if not is_switched_off(os.environ):
            from otel_dltrace.instrument import registry

            start(**fields)
            registry.instrument([source])
    except DltraceError as error:
        guard.say(f"{error}; tracing is off")


def uninstrument_source(source: str) -> None:
    """Trace *source* no longer; the others go on."""
    from otel_dltrace.instrument import registry

    registry.uninstrument([source])

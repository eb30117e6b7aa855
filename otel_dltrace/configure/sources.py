"""Tracing of frameworks, switched on and off: by the program, by the environment, or by an instrumentor."""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from otel_dltrace.configure.recording import end_recording, start
from otel_dltrace.model.errors import ConfigError, DltraceError
from otel_dltrace.record import guard
from otel_dltrace.record.tracer import live
from otel_dltrace.settings.config import Config
from otel_dltrace.settings.switch import enabled_sources, is_switched_off, is_switched_on

_EXTRAS = {"torch": "torch", "mpi4py": "mpi", "horovod": "horovod", "opentelemetry": "otel"}
"""What to install for a framework, where that is one of our extras."""


def instrument(config: Config | str | None = None, *frameworks: str, **fields: Any) -> None:
    """Trace the frameworks that this program has imported or will import, and begin to record as `start` does.

    ``instrument()`` traces all of them, ``instrument("torch", "mpi4py")`` these alone.

    Args:
        config: What to record, as for `start`; or the first of the frameworks.
        frameworks: Packages, such as ``torch`` and ``horovod``, or sources, such as ``torch_ddp``; by default all.
        fields: Those of `Config` that are to differ, as for `start`.

    Raises:
        ConfigError: A value of these cannot be used; a framework that is asked for is not installed, or none of ours.
            It is a `ValueError`.
    """
    from otel_dltrace.instrument import registry

    if isinstance(config, str):
        frameworks = (config, *frameworks)
        config = None
    sources = _sources_of(registry.TABLES, frameworks) if frameworks else registry.TABLES
    start(config, **fields)
    if live.tracer is not None:
        registry.instrument(enabled_sources(sources, os.environ))


def _sources_of(tables: Mapping[str, Sequence[Any]], frameworks: Sequence[str]) -> set[str]:
    """Return the sources that belong to *frameworks*, each of which is installed."""
    packages = {source: {row.module.partition(".")[0] for row in rows} for source, rows in tables.items()}
    sources: set[str] = set()
    for name in frameworks:
        found = {source for source, roots in packages.items() if name in (source, *roots)}
        if not found:
            known = set(tables).union(*packages.values()) - sys.stdlib_module_names - {"otel_dltrace"}
            raise ConfigError(f"{name!r} cannot be traced; choose from {', '.join(sorted(known))}")
        package = name if name not in tables else min(packages[name])
        if importlib.util.find_spec(package) is None:
            raise ConfigError(f"{name!r} was asked for, but {package} is not installed: {_cure(package)}")
        sources |= found
    return sources


def _cure(package: str) -> str:
    extra = _EXTRAS.get(package)
    return f"pip install '.[{extra}]' in otel-dltrace's folder" if extra else f"pip install {package}"


def uninstrument() -> None:
    """Give the frameworks their own functions back, the same objects; the step that is open ends.

    What the program itself records goes on until `stop`.
    """
    from otel_dltrace.instrument import registry

    registry.uninstrument()
    _leave_step()


@guard.guarded
def _leave_step() -> None:
    """End the step that is open: nobody would see its end."""
    tracer = live.tracer
    if tracer is not None and tracer.loop is not None and not tracer.steps.marked:
        tracer.loop.interrupted()


@guard.guarded
def autostart() -> None:
    """Do what ``OTEL_DLTRACE`` asks for; a bad value is one sentence, and the program goes on untraced."""
    try:
        if is_switched_on(os.environ):
            from otel_dltrace.instrument import registry

            start()
            if live.tracer is not None:
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
        is_refused = live.is_refused and live.tracer is None
        if not (is_refused or is_switched_off(os.environ)):
            from otel_dltrace.instrument import registry

            _start_as_told(fields)
            if live.tracer is not None:
                registry.instrument([source])
    except DltraceError as error:
        if live.told is not None:  # what instrumentors are told is one configuration, which cannot be used
            end_recording()
        live.is_refused = live.tracer is None  # else the next one, which is told nothing, would trace all the same
        guard.say(f"{error}; tracing is off" if live.is_refused else f"{error}; tracing stays as it is")


def _start_as_told(fields: dict[str, Any]) -> None:
    """Begin to record; what instrumentors are told one after another is one configuration, until they contradict."""
    told, tracer = live.told or {}, live.tracer
    is_ours = tracer is not None and live.told is not None and tracer.recorder.ring is None
    if is_ours and all(told.get(name, value) == value for name, value in fields.items()):
        fields = {**told, **fields}
        if fields != told:
            end_recording()  # nothing has been recorded yet
    start(**fields)
    if live.tracer not in (None, tracer):
        live.told = fields


def uninstrument_source(source: str) -> None:
    """Trace *source* no longer; the others go on."""
    from otel_dltrace.instrument import registry

    live.is_refused = False  # it may be instrumented again, with other options
    registry.uninstrument([source])

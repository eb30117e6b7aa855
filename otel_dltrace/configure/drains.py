"""The drain that a configuration asks for, wired to its outlets and its metrics."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from otel_dltrace.export.choice import DELAY_S, delay_s, exporters
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.plan import Window
from otel_dltrace.record import guard
from otel_dltrace.record.launch import DrainThread
from otel_dltrace.record.ring import RingWriter
from otel_dltrace.settings.config import Config

if TYPE_CHECKING:
    from otel_dltrace.export.drain import Drain

METRICS_PART = 10
"""Metrics may fill the tenth part of a host's quota."""


def drain_for(config: Config, home: str | None, orphans_only: bool = False, in_thread: bool = False) -> "Drain":
    """Return the drain that *config*, ``OTEL_*_EXPORTER`` and the ``OTEL_EXPORTER_OTLP_*`` variables describe.

    Args:
        config: What goes out, and where run directories are made.
        home: Its name; None to serve every ring.
        orphans_only: Serve only rings whose writer is gone, each where its own writer wanted it.
        in_thread: It is a thread of the training process: no metrics are sampled or sent there.

    Raises:
        ConfigError: One of these variables cannot be used.
    """
    from otel_dltrace.export.drain import Drain
    from otel_dltrace.export.metrics.metering import Metering
    from otel_dltrace.export.otlp.settings import OtlpSettings
    from otel_dltrace.export.serving import Serving

    others, settings = exporters(os.environ), OtlpSettings.from_env(os.environ)
    serving = Serving(
        config.rings,
        None if home is None else Path(config.directory),
        home,
        orphans_only,
        Window.parse(config.steps),
        config.span_budget,
        quota=config.quota,
        delay=delay(),
    )
    sampled = config.metrics and not (orphans_only or in_thread)
    quota = config.quota // METRICS_PART
    metering = Metering(None if in_thread else metric_settings(), sampled, serving.window, quota, serving.delay)
    if settings is None and not others:
        return Drain(serving, metering=metering)
    from otel_dltrace.export.outgoing.outlets import outlets_of

    return Drain(serving, outlets_of(others, settings), metering)


def check_outlets(*, certificates: bool = False) -> bool:
    """Return whether an exporter is asked for, of spans or of metrics, that may print where the program does.

    Nothing of the drain is loaded for it: what is to be traced waits for us.

    Args:
        certificates: Look at those for OTLP, too, which takes somewhat longer.

    Raises:
        ConfigError: A variable that is for spans cannot be used: the drain would stumble unseen.
    """
    others = exporters(os.environ)
    if any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ):
        from otel_dltrace.export.otlp.settings import OtlpSettings

        settings = OtlpSettings.from_env(os.environ)
        if certificates and settings is not None:
            from otel_dltrace.export.otlp.transport import check_certificates

            check_certificates(settings)
    delay()
    metrics = metric_settings()
    return bool(others or (metrics and metrics.exporters))


def drain_in_thread(config: Config) -> Callable[[RingWriter], DrainThread | None]:
    """Return what begins to drain a ring of our own in a thread, as *config* says."""

    def begin(ring: RingWriter) -> DrainThread | None:
        from otel_dltrace.export.drain_thread import start_drain_thread

        if config.metrics:
            guard.say("the drain is a thread of this process, so the host is not sampled and no metrics are sent")
        return start_drain_thread(make, ring)

    def make() -> "Drain":
        drain = drain_for(config, None, in_thread=True)
        if drain.outlet is not None:
            drain.outlet.patience = 0.0  # the program's end waits for us
        return drain

    return begin


def delay() -> float:
    """Return how many seconds records may wait; where the environment says it wrong the default, after a sentence."""
    try:
        return delay_s(os.environ)
    except ConfigError as error:
        guard.say(str(error))
        return DELAY_S


def metric_settings() -> MetricSettings | None:
    """Return where metrics go; None, after one sentence, where the environment says it wrong: spans go on."""
    try:
        return MetricSettings.from_env(os.environ)
    except ConfigError as error:
        guard.say(f"{error}; no metrics are sent")
        return None

"""Distributed tracing of distributed deep-learning training over OpenTelemetry."""

from otel_dltrace._version import __version__
from otel_dltrace.configure import Config, flush, instrument, start, stop, uninstrument
from otel_dltrace.record.steps import operation, phase, step

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

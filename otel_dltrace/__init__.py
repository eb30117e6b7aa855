"""Distributed tracing of distributed deep-learning training over OpenTelemetry."""

from otel_dltrace._version import __version__
from otel_dltrace.configure import flush, instrument, start, stop, uninstrument
from otel_dltrace.record.blocks import operation, phase, step
from otel_dltrace.settings import Config

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

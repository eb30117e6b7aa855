"""The names of all variables that act on us, or on the OpenTelemetry SDK beside us."""

from importlib.metadata import entry_points

from otel_dltrace.settings.known import OWN

_OTLP = (
    "ENDPOINT",
    "PROTOCOL",
    "HEADERS",
    "TIMEOUT",
    "COMPRESSION",
    "CERTIFICATE",
    "CLIENT_KEY",
    "CLIENT_CERTIFICATE",
    "INSECURE",
)
_SIGNALS = ("", "TRACES_", "METRICS_", "LOGS_")
CHROME_NUMBERS = ("OTEL_EXPORTER_CHROME_TRACE_MAX_BYTES", "OTEL_EXPORTER_CHROME_TRACE_MAX_FILES")
OBEYED = frozenset(
    {
        *(f"OTEL_EXPORTER_OTLP_{signal}{name}" for signal in _SIGNALS for name in _OTLP),
        *CHROME_NUMBERS,
        "OTEL_EXPORTER_CHROME_TRACE_FILE",
        "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE",
        "OTEL_EXPORTER_PROMETHEUS_HOST",
        "OTEL_EXPORTER_PROMETHEUS_PORT",
        "OTEL_SDK_DISABLED",
        "OTEL_SERVICE_NAME",
        "OTEL_RESOURCE_ATTRIBUTES",
        "OTEL_TRACES_EXPORTER",
        "OTEL_METRICS_EXPORTER",
        "OTEL_BSP_SCHEDULE_DELAY",
        "OTEL_METRIC_EXPORT_INTERVAL",
        "OTEL_METRIC_EXPORT_TIMEOUT",
        "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS",
    }
)
"""Variables of OpenTelemetry that we obey; those of other signals are there since they are no mistake."""
_YOURS = "for your own OpenTelemetry spans"
OF_THE_SDK = {
    "OTEL_PYTHON_ID_GENERATOR": _YOURS,
    "OTEL_TRACES_SAMPLER": _YOURS,
    "OTEL_TRACES_SAMPLER_ARG": _YOURS,
    "OTEL_EXPERIMENTAL_RESOURCE_DETECTORS": _YOURS,
    "OTEL_CONFIG_FILE": f"{_YOURS}, and in it instrumentation/development for what we record; "
    "OTEL_EXPORTER_OTLP_* say where ours go, not the file",
}
"""Those by which our plugins serve the user's own spans, or are told what to do, and what each is for."""


def known_to_opentelemetry() -> frozenset[str]:
    """Return the variables that OpenTelemetry's installed packages say they read."""
    names: set[str] = set()
    for point in entry_points(group="opentelemetry_environment_variables"):
        try:
            module = point.load()
        except ImportError:
            continue
        names.update(name for name in vars(module).values() if isinstance(name, str) and name.startswith("OTEL_"))
    return frozenset(names) - OWN

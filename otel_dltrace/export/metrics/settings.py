"""What the environment says about where metrics go, checked once; cheap to import, for the training process does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from otel_dltrace.export.choice import METRICS, exporters
from otel_dltrace.model.numbers import milliseconds

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from otel_dltrace.export.otlp.settings import OtlpSettings

INTERVAL, TIMEOUT = "OTEL_METRIC_EXPORT_INTERVAL", "OTEL_METRIC_EXPORT_TIMEOUT"


@dataclass(frozen=True)
class MetricSettings:
    """Where metrics go and how often; made by `from_env`.

    Attributes:
        otlp: Where to over OTLP; None where nothing goes out that way.
        exporters: The other ways out.
        interval_ms: The time between two exports.
        timeout_ms: How long one may take.
    """

    otlp: "OtlpSettings | None"
    exporters: "tuple[EntryPoint, ...]"
    interval_ms: float
    timeout_ms: float

    @property
    def where(self) -> str:
        """The OTLP endpoint, fit for messages; "" for none."""
        return self.otlp.where if self.otlp else ""

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "MetricSettings | None":
        """Return what *env* asks for; None where it names neither an endpoint nor an exporter.

        Raises:
            ConfigError: A value cannot be used.
        """
        others, otlp = exporters(env, METRICS), None
        if any(name.startswith("OTEL_EXPORTER_OTLP_") for name in env):
            from otel_dltrace.export.otlp.settings import OtlpSettings

            otlp = OtlpSettings.from_env(env, METRICS)
        if otlp is None and not others:
            return None
        interval, timeout = milliseconds(env, INTERVAL, 60_000), milliseconds(env, TIMEOUT, 30_000)
        return cls(otlp, others, interval, timeout)

"""One instrumentor for each source, so that each can be disabled by name."""

from collections.abc import Collection
from typing import Any, ClassVar

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor

from otel_dltrace.configure.sources import instrument_source, uninstrument_source

_OF_OPENTELEMETRY = {
    *("tracer_provider", "meter_provider", "logger_provider", "event_logger_provider"),
    *("skip_dep_check", "raise_exception_on_conflict"),
}
"""What OpenTelemetry passes to every instrumentor; all else is a field of our configuration, or meant to be."""


class SourceInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # its module is not typed
    """Traces one source; ``opentelemetry-instrument`` then does what ``OTEL_DLTRACE=1`` does.

    Spans take our own way out, so a tracer provider is of no use to it. ``instrument()`` takes the
    fields of `Config`, where they are to be others than the environment says; so does ``OTEL_CONFIG_FILE``.
    It names no class for them to OpenTelemetry, which would pass the defaults of what the file does not say.
    """

    source: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ("torch >= 2.4",)

    def instrumentation_dependencies(self) -> Collection[str]:
        """Return the framework that is traced."""
        return self.needs

    def _instrument(self, **kwargs: Any) -> None:
        instrument_source(self.source, **{k: value for k, value in kwargs.items() if k not in _OF_OPENTELEMETRY})

    def _uninstrument(self, **_kwargs: Any) -> None:
        uninstrument_source(self.source)


class TorchTrainingInstrumentor(SourceInstrumentor):
    """Steps and their stages."""

    source = "torch_training"


class TorchDdpInstrumentor(SourceInstrumentor):
    """The gradient buckets of DistributedDataParallel."""

    source = "torch_ddp"


class TorchDistributedInstrumentor(SourceInstrumentor):
    """Collectives and point-to-point calls."""

    source = "torch_distributed"


class TorchFsdpInstrumentor(SourceInstrumentor):
    """The all-gathers and reduce-scatters of FSDP2."""

    source = "torch_fsdp"


class TorchDeviceInstrumentor(SourceInstrumentor):
    """The times of CUDA devices."""

    source = "torch_device"


class AccelerateInstrumentor(SourceInstrumentor):
    """Transfers, shared metrics and checkpoints of Hugging Face Accelerate."""

    source = "accelerate"
    needs = ("accelerate >= 1",)


class LightningInstrumentor(SourceInstrumentor):
    """Transfers, shared metrics and checkpoints of Lightning, under both of its names."""

    source = "lightning"
    needs = ()


class ProcessInstrumentor(SourceInstrumentor):
    """Garbage collections, where metrics are on."""

    source = "process"
    needs = ()


class BytepsInstrumentor(SourceInstrumentor):
    """The push_pulls of BytePS's PyTorch plugin."""

    source = "byteps"
    needs = ("byteps >= 0.2",)


class HorovodInstrumentor(SourceInstrumentor):
    """The operations of Horovod's PyTorch plugin."""

    source = "horovod"
    needs = ("horovod >= 0.28.1",)


class PushpullInstrumentor(SourceInstrumentor):
    """The push_pulls of our own parameter server, on workers and servers."""

    source = "pushpull"
    needs = ()


class Mpi4pyInstrumentor(SourceInstrumentor):
    """The MPI calls of a program that uses mpi4py."""

    source = "mpi4py"
    needs = ("mpi4py >= 4",)


class OpenTelemetryInstrumentor(SourceInstrumentor):
    """The user's own spans, joined to the step."""

    source = "opentelemetry"
    needs = ("opentelemetry-api >= 1.30",)

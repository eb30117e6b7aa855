"""What the OpenTelemetry SDK costs in the same places: a span per call, with six attributes, encoded and dropped.

The places are those that our own tables trace in the jobs of `_jobs`: a batch, forward, backward,
the optimizer, each collective and each wait for one. DDP's all-reduces run in C++, where an
instrumentation of the SDK sees nothing; so that both write as many, backward makes a span for each.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch.distributed as dist
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from otel_dltrace.instrument._sites import replace, resolve

ATTRIBUTES: dict[str, str | int] = {
    "dl.step": 17,
    "dl.rank": 3,
    "dl.comm.operation": "all_reduce",
    "dl.comm.backend": "gloo",
    "dl.comm.group.size": 2,
    "dl.comm.size": 1_048_576,
}
C10D = "torch.distributed.distributed_c10d"
COLLECTIVES = (
    "all_reduce",
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "Work.wait",
)
STAGES = (
    ("torch.utils.data.dataloader", "_BaseDataLoaderIter.__next__"),
    ("benchmarks._jobs", "Training.forward"),
    ("torch.optim.sgd", "SGD.step"),
)
BATCH = 512
"""Spans that wake the processor's thread; the default."""

Function = Callable[..., Any]


class Encoder(SpanExporter):
    """Does what an OTLP exporter does before it touches the network, and drops the bytes."""

    def __init__(self) -> None:
        self.exported = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Encode *spans*."""
        encode_spans(spans).SerializeToString()
        self.exported += len(spans)
        return SpanExportResult.SUCCESS


class SdkSpans:
    """Spans of the SDK around the calls of a job.

    The processor is as it is by default but for two things: its queue holds whatever comes, so that
    no span is dropped, and its thread wakes up for full batches alone, so that it never works while
    another mode runs; what is not a full batch waits for the next block.
    """

    def __init__(self) -> None:
        self.exporter = Encoder()
        self.ended = 0
        provider = TracerProvider()
        provider.add_span_processor(
            BatchSpanProcessor(self.exporter, max_queue_size=1 << 20, schedule_delay_millis=3_600_000)
        )
        self._tracer = provider.get_tracer("benchmarks")
        self._collectives = 0
        self._inside = threading.local()
        self._undos: list[Callable[[], None]] = []

    def install(self) -> None:
        """Put a span around every place."""
        for module, name in STAGES:
            self._put(module, name, self._around)
        self._put("torch.autograd", "backward", self._around_backward)
        for name in COLLECTIVES:
            self._put(C10D, name, self._around_collective)

    def remove(self) -> None:
        """Put back what was there."""
        while self._undos:
            self._undos.pop()()

    def settle(self) -> None:
        """Wait until the processor's thread has exported all full batches."""
        while self.exporter.exported < self.ended // BATCH * BATCH:
            time.sleep(0.0005)

    def _put(self, module: str, dotted: str, around: Callable[[str, Function], Function]) -> None:
        loaded = sys.modules.get(module)
        found = loaded and resolve(loaded, dotted)
        if found:
            holder, name, original = found
            wrapper = around(name, original)
            self._undos += [replace(at, name, original, wrapper) for at in _holders(holder, name, original)]

    def _spanned(self, name: str, original: Function, args: Any, kwargs: Any) -> Any:
        try:
            with self._tracer.start_as_current_span(name) as span:
                for key, value in ATTRIBUTES.items():
                    span.set_attribute(key, value)
                return original(*args, **kwargs)
        finally:
            self.ended += 1

    def _around(self, name: str, original: Function) -> Function:
        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self._spanned(name, original, args, kwargs)

        return wrapper

    def _around_collective(self, name: str, original: Function) -> Function:
        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._inside, "call", False):  # an older name, or the wait of a synchronous call
                return original(*args, **kwargs)
            self._collectives += name != "wait"
            self._inside.call = True
            try:
                return self._spanned(name, original, args, kwargs)
            finally:
                self._inside.call = False

        return wrapper

    def _around_backward(self, name: str, original: Function) -> Function:
        @wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            before = _sequence_number() - self._collectives
            result = self._spanned(name, original, args, kwargs)
            for _ in range(_sequence_number() - self._collectives - before):
                self._spanned("all_reduce", _nothing, (), {})
            return result

        return wrapper


def _holders(holder: Any, name: str, original: Function) -> Iterator[Any]:
    """Return *holder* and the modules of torch that have imported *original* from it by *name*."""
    yield holder
    for module_name, module in list(sys.modules.items()):
        is_alias = module is not holder and getattr(module, "__dict__", {}).get(name) is original
        if is_alias and module_name.startswith("torch."):
            yield module


def _sequence_number() -> int:
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group())


def _nothing() -> None:
    return None

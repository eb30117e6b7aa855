"""What only the training process knows of itself: its garbage collections, and its peak of memory."""

import gc
import resource
import sys
from time import monotonic_ns
from types import ModuleType

from otel_dltrace.instrument._sites import Attachment, Row, Undo
from otel_dltrace.model.metrics import DL_GC_PAUSE, DL_PROCESS_MEMORY_PEAK, GC_GENERATION, record_descriptor
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import GC, PHASE, Level
from otel_dltrace.record.guard import failed
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live

_PHASE, _STEP = int(Level.PHASE), int(Level.STEP)
_RSS_UNIT = 1 if sys.platform == "darwin" else 1024
EVERY_NS = 500_000_000
"""How often the peak of memory is asked for, at the end of a step: as often as the drain samples."""


class Pauses:
    """Records each garbage collection of a process whose metrics are on.

    The interpreter runs no second collection while it calls us, in whatever thread: there is one start.
    """

    def __init__(self) -> None:
        self._start = 0
        self._recorder: Recorder | None = None
        self._span = 0
        self._values: dict[int, int] = {}

    def __call__(self, moment: str, found: dict[str, int]) -> None:
        """Know that a collection starts or has stopped; the interpreter prints what we raise, so nothing is."""
        if moment == "start":
            self._start = monotonic_ns()
            return
        start, self._start = self._start, 0
        tracer = live.tracer
        # The first record makes the ring: not for a launcher or a compile worker, which do nothing but collect.
        if not start or tracer is None or not tracer.metrics or tracer.recorder.ring is None:
            return
        try:
            self._record(tracer.recorder, start, monotonic_ns(), found["generation"])
        except Exception as broken:  # noqa: BLE001  -- what `guarded` does, without its frame
            failed("gc", broken)

    def _record(self, recorder: Recorder, start: int, end: int, generation: int) -> None:
        if self._recorder is not recorder:
            self._recorder, self._values = recorder, {}
            self._span = recorder.intern(Descriptor(PHASE, GC))
        value = self._values.get(generation)
        if value is None:
            descriptor = record_descriptor(DL_GC_PAUSE, {GC_GENERATION: generation})
            value = self._values[generation] = recorder.intern(descriptor)
        # It holds up all threads: it hangs below the step, not below what happened to be open in this one.
        recorder.span(self._span, _PHASE, start, end, b=generation)
        recorder.counter(value, _STEP, end, end - start)


def _attach(module: ModuleType) -> Undo:
    pauses = Pauses()
    module.callbacks.append(pauses)

    def detach() -> None:
        if pauses in module.callbacks:
            module.callbacks.remove(pauses)

    return detach


def follow_memory(tracer: Tracer) -> None:
    """Have each step of *tracer* record its peak of memory, if that has risen."""
    steps, recorder = tracer.steps, tracer.recorder
    before, asked, peak, descriptor = steps.on_end, 0, 0, -1

    def ended() -> None:
        nonlocal asked, peak, descriptor
        before()
        now = monotonic_ns()
        # A launcher ends no step of its own, and must not make a ring to say so.
        if now - asked < EVERY_NS or recorder.ring is None:
            return
        asked = now
        size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _RSS_UNIT
        if size != peak:
            if descriptor < 0:
                descriptor = recorder.intern(record_descriptor(DL_PROCESS_MEMORY_PEAK))
            recorder.counter(descriptor, _STEP, now, size)
            peak = size

    steps.on_end = ended


ROWS: tuple[Row, ...] = (Attachment(gc.__name__, _attach),)

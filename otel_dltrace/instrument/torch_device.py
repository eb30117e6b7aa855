"""Times of CUDA devices (and of AMD's, which PyTorch calls the same), from events."""

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._device_clock import Event
from otel_dltrace.instrument._device_times import DeviceMarks
from otel_dltrace.instrument._loop import joins
from otel_dltrace.instrument._sites import Attachment, Row, Undo
from otel_dltrace.model.semconv import Level
from otel_dltrace.record.tracer import Tracer, live


class Cuda:
    """The devices that *cuda*, the module ``torch.cuda``, knows; nothing here initialises or synchronises them.

    *is_used* tells whether the process has a context on one: to ask for anything makes one, of hundreds of MB.
    """

    def __init__(self, cuda: Any, is_used: Callable[[int], bool]) -> None:
        self._cuda, self._is_used = cuda, is_used
        self._aside: dict[int, Any] = {}
        self._models: set[int] = set()
        self._open: set[int] = set()

    def is_open(self) -> bool:
        """Return whether events may be used now: the program uses a device, and captures no graph."""
        return bool(self._cuda.is_initialized()) and not self._cuda.is_current_stream_capturing()

    def meet(self, model: set[int]) -> None:
        """Know that a *model* is on these devices."""
        self._models |= model
        self._open.clear()

    def index(self) -> int | None:
        """Return which device is the current one; None where the program does not use it, or has its models elsewhere.

        A program may say of each tensor on which device it is, and leave the first one current, which idles.
        """
        index = int(self._cuda.current_device())
        if index in self._open:
            return index
        if (self._models and index not in self._models) or not self._is_used(index):
            return None
        self._open.add(index)
        return index

    def event(self) -> Event:
        """Return a new event."""
        event: Event = self._cuda.Event(enable_timing=True)
        return event

    def aside(self, index: int) -> Any:
        """Return a stream of the device *index* in which nothing else runs."""
        stream = self._aside.get(index)
        if stream is None:
            stream = self._aside[index] = self._cuda.Stream(index)
        return stream


def _attach(module: ModuleType) -> Undo | None:
    if not module._is_compiled():  # this PyTorch knows no such device
        return None
    cuda = Cuda(module, getattr(sys.modules["torch"]._C, "_cuda_hasPrimaryContext", lambda _index: True))

    def follow(tracer: Tracer) -> None:
        if tracer.recorder.level >= Level.COLLECTIVE and tracer.steps.device is None:
            tracer.steps.device = DeviceMarks(tracer.recorder, cuda)

    joins.append(follow)
    if live.tracer is not None:
        follow(live.tracer)

    def detach() -> None:
        joins.remove(follow)
        if live.tracer is not None:
            live.tracer.steps.device = None

    return detach


ROWS: tuple[Row, ...] = (Attachment("torch.cuda", _attach),)

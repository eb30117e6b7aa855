"""What is known of the communication of one process: its works, its messages, its descriptors."""

import threading
from itertools import count
from typing import Any

from otel_dltrace.instrument._torch.binding import Binding
from otel_dltrace.instrument._torch.calls import Call
from otel_dltrace.instrument._torch.groups import HOST_BACKENDS, backend_of, group_of, is_counted, name_of
from otel_dltrace.instrument._torch.naming import tensor_name
from otel_dltrace.instrument._torch.p2p import Messages
from otel_dltrace.instrument._torch.recorder import recorded_of
from otel_dltrace.instrument._torch.works import Works
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import PHASE, WAIT, Source
from otel_dltrace.record.steps import nothing
from otel_dltrace.record.tracer import Tracer

_turns = count(1)


class _Local(threading.local):
    running: Any = None
    """The call of this thread that is under way (`_torch.running`)."""


class Comm:
    """The communication of the process that *tracer* follows."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self.binding = Binding(tracer, _turns)
        self.works = Works(tracer, tracer.recorder.intern(Descriptor(PHASE, WAIT)))
        self.messages = Messages()
        self.local = _Local()
        self._descriptors: dict[tuple[Any, ...], tuple[int, int, bool]] = {}
        self._groups: dict[str, Any] = {}
        self.recorded = recorded_of(tracer)
        before = tracer.steps.on_end
        self._at_end = None if before is nothing else before
        tracer.steps.on_end = self._step_ends  # last: another thread may be ending a step

    def _step_ends(self) -> None:
        """Look at what is under way; between two kernels it costs microseconds even to find that nothing is."""
        if self.recorded.expected:
            self.recorded.step_ends()
        if self.works.unwatched or self.works.finished:
            self.works.step_ends()
        if self._at_end is not None:
            self._at_end()

    def group_of(self, named: Any) -> Any:
        """Return the process group that a call names."""
        if not isinstance(named, str):
            return group_of(named)
        group = self._groups.get(named)
        if group is None:
            group = group_of(named)
            if group is not None:
                self._groups[named] = group
        return group

    def describe(self, call: Call, group: Any, tensor: Any, asked: Any) -> tuple[int, int, bool]:
        """Return the descriptor for *call* in *group*, the source of its ends, and whether it is counted.

        It is with *tensor*, or on the device that is *asked* for without one.
        """
        # What is no tensor is for the call itself to refuse.
        device, dtype = getattr(tensor, "device", asked), getattr(tensor, "dtype", None)
        name = tensor_name.get()
        key = (call.span, group, device, dtype, name)
        known = self._descriptors.get(key)
        if known is None:
            backend = "" if group is None else backend_of(group, device)
            descriptor = Descriptor(
                call.kind,
                call.span,
                group="" if group is None else name_of(group),
                group_size=0 if group is None else group.size(),
                backend=backend,
                tensor=name,
                dtype="" if dtype is None else str(dtype).removeprefix("torch."),
            )
            source = Source.HOST_DONE if backend in HOST_BACKENDS else Source.HOST_ISSUE
            counted = group is not None and is_counted(group, backend)
            known = self._descriptors[key] = (self.tracer.recorder.intern(descriptor), source, counted)
        return known

    def forget(self, group: Any = None) -> None:
        """Let go of *group* (default: of all), which is being destroyed."""
        if group is None:
            self.works.leave()
        else:
            self.works.flush()
        self._descriptors.clear()  # it holds groups
        self._groups.clear()
        self.messages.forget("" if group is None else group.group_name)

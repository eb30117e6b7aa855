"""The communication hook that sees a model's gradient buckets begin and end.

It calls the program's own hook, or does what DDP does without one: divide, then sum in C++.
"""

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._torch.buckets import describe
from otel_dltrace.instrument._torch.callbacks import called, writers
from otel_dltrace.instrument._torch.calls import bytes_of
from otel_dltrace.instrument._torch.groups import HOST_BACKENDS, backend_of, is_counted, sequence_number
from otel_dltrace.instrument._torch.root_hooks import none_yet
from otel_dltrace.model.semconv import Flag, Level
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.operation import Operation, open_span
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import live

Program = Callable[[Any], Any]
"""A hook of the program's, with its state: takes a bucket, returns a future."""


class _Launched:
    """A bucket under way."""

    __slots__ = ("end", "operation", "seq")

    def __init__(self, operation: Operation) -> None:
        self.operation, self.seq, self.end = operation, 0, 0

    def done(self, _future: object) -> None:
        # Here runs a thread of the backend, whose Python state is new at each call: others write it.
        self.end = monotonic_ns()
        _done.append(self)

    def summed(self, future: Any) -> Any:
        self.done(future)
        return future.value()[0]


_done: deque[_Launched] = deque()
joined: "weakref.WeakKeyDictionary[Any, Any]" = weakref.WeakKeyDictionary()
"""By reducer: the work that counts the ranks that have not joined, where gradients are divided by that."""


class BucketHook:
    """The hook of one model. C++ owns it, out of sight of Python's collector: it holds the model weakly.

    Attributes:
        program: The program's own hook, if there is one.
        model: Whose buckets they are; returns None until that is known.
        launched: How many buckets it has recorded in this backward.
        in_place: Whether gradients from the last backward are added to, inside the buckets.
    """

    def __init__(self, program: Program | None = None) -> None:
        self.program = program
        self.model: Callable[[], Any] = none_yet
        self.launched = 0
        self.in_place = False
        self._backend, self._is_counted = "", False
        self._recorder: Recorder | None = None
        self._descriptors: dict[tuple[Any, ...], int] = {}

    def __call__(self, _state: object, bucket: Any) -> Any:
        """Launch *bucket* and return its future."""
        span = self._begin(bucket)
        if self.program is None:
            return self._average(bucket, span)
        if span is None:
            return self.program(bucket)
        token = open_span.set(span.operation)  # what the program's hook calls is inside of it
        try:
            future = self.program(bucket)
        except BaseException as error:
            guarded(span.operation.close)(error=error)
            raise
        finally:
            open_span.reset(token)
        guarded(self._watch)(future, span)
        return future

    def meet(self, model: Any) -> None:
        """Know that the buckets are those of *model*."""
        self.model = weakref.ref(model)
        self._backend = backend_of_model(model)
        self._is_counted = is_counted(model.process_group, self._backend)

    @guarded
    def _begin(self, bucket: Any) -> _Launched | None:
        tracer = live.tracer
        if tracer is None or tracer.recorder.level < Level.PARTITION or self._backend not in HOST_BACKENDS:
            return None
        if self._recorder is not tracer.recorder:
            self._recorder = tracer.recorder
            self._descriptors.clear()
        buffer, plain = bucket.buffer(), self.program is None
        key = (bucket.index(), buffer.dtype, plain)
        number = self._descriptors.get(key)
        if number is None:
            group = self.model().process_group
            number = describe(self._recorder, group, self._backend, key[0], buffer.dtype, plain)
            self._descriptors[key] = number
        self.launched += 1
        return _Launched(Operation(self._recorder, number, bytes_of(buffer), flags=Flag.ASYNC))

    def _average(self, bucket: Any, span: _Launched | None) -> Any:
        """Do as DDP does without a hook; the future must resolve to an object of Python."""
        model, buffer = self.model(), bucket.buffer()
        divisor = _present(model.reducer) or model.process_group.size()
        # As C++ does, to the bit: it multiplies where it copies gradients into the bucket.
        if self.in_place or buffer.is_sparse:
            buffer.div_(divisor)
        else:
            buffer.mul_(1 / divisor)
        future = model.reducer._run_allreduce_hook(bucket)
        if span is None:
            return called(future.then, partial(_first), model.process_group)
        span.seq = sequence_number(model.process_group) if self._is_counted else 0
        return called(future.then, span.summed, model.process_group)

    def _watch(self, future: Any, span: _Launched) -> None:
        called(future.add_done_callback, span.done, self.model().process_group)


def _first(future: Any) -> Any:
    return future.value()[0]


def _present(reducer: Any) -> int:
    """Return how many ranks have not joined, where gradients are divided by that; else 0."""
    work = joined.get(reducer)
    return 0 if work is None else int(work.get_future().wait()[0].item())


def backend_of_model(model: Any) -> str:
    """Return the backend that reduces the gradients of *model*."""
    return backend_of(model.process_group, model._module_parameters[0].device)


def flush() -> None:
    """Write the buckets that are done."""
    while _done:
        span = _done.popleft()
        span.operation.close(span.seq, end=span.end)


writers.append(flush)

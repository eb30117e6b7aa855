"""Hooks on the modules of a PyTorch program, and the forward that they time."""

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._loop import loop_of
from otel_dltrace.record.guard import failed
from otel_dltrace.record.tracer import live


def compiling() -> bool:
    """Return whether a graph is being compiled: ``torch.compiler.is_compiling`` in fewer frames."""
    compiler = sys.modules["torch"].compiler
    return bool(compiler.is_dynamo_compiling() or getattr(compiler, "_is_compiling_flag", False))


def none_yet() -> None:
    """Return nothing, as a reference to what is gone does."""


def _is_grad_enabled() -> bool:
    return bool(sys.modules["torch"].is_grad_enabled())


def graph_task() -> int:
    """Return the graph that the engine is running in this thread, -1 for none."""
    return int(sys.modules["torch"]._C._current_graph_task_id())


class _Here(threading.local):
    """The forward of this thread, as the hooks find it and leave it."""

    running: Any = None
    """The root whose forward is running: one that was interrupted has not said so."""
    since = 0
    has_gradients = False
    """Whether it has gradients, and so is of a training step."""
    around: tuple[Callable[[], Any], int] = (none_yet, 0)
    """What returns the root whose forward was running when an optimizer began to step, and since when it ran.

    It goes on behind that, as where Lightning's DDP has the whole training step in its forward, or was interrupted.
    """

    def leave(self) -> None:
        """Know that an optimizer begins to step while the forward is running."""
        if self.has_gradients:
            self.around = weakref.ref(self.running), self.since
        self.running = None


class Forward:
    """The forwards of roots.

    Attributes:
        here: That of this thread.
        latest: Returns the root that ran last, while it lives.
        is_grad_enabled: Torch's own; until there is a root, what looks for it.
        graph_task: Returns the graph that the engine is running in this thread, -1 for none; likewise.
    """

    def __init__(self) -> None:
        self.is_grad_enabled: Callable[[], bool] = _is_grad_enabled
        self.graph_task: Callable[[], int] = graph_task
        self.forget()

    def forget(self) -> None:
        """Begin as if nothing had run."""
        self.latest: Callable[[], Any] = none_yet
        self.here = _Here()


class _Hook:
    """A hook that a saved or copied model leaves behind: its copy is a function of Python that does nothing.

    Hooks look first whether a graph is being compiled: inside one this is a constant, and all below
    it is not traced.
    """

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


def is_hook(hook: Any) -> bool:
    """Return whether *hook*, of some module, is ours or what a copy of the module has in its place."""
    return isinstance(hook, _Hook) or isinstance(getattr(hook, "__self__", None), nullcontext)


def number_behind(module: Any) -> None:
    """Have torch give our next hooks numbers behind those of *module*, which one from a file has of another process.

    A hook of the same number would take the place of the program's.
    """
    handles = sys.modules["torch"].utils.hooks.RemovableHandle
    last = max(chain(module._forward_pre_hooks, module._forward_hooks), default=-1)
    handles.next_id = max(handles.next_id, last + 1)


class Search(_Hook):
    """Looks for roots: called before every module's forward, it has *meet* look at it."""

    __slots__ = ("_meet",)

    def __init__(self, meet: Callable[[Any, Any], None]) -> None:
        self._meet = meet

    def __call__(self, module: Any, args: Any) -> None:
        if not compiling():
            self._meet(module, args)


class _Timed(_Hook):
    """A hook of every step. It is flat, looks itself as `compiling` does, and has its own `try` instead of `guarded`.

    Between two kernels Python's code is cold, and every frame costs microseconds.
    """

    __slots__ = ("_compiler", "_forward", "_is_traced")

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self._compiler = sys.modules["torch"].compiler
        self._is_traced: Callable[[], bool] = self._compiler.is_dynamo_compiling


class Before(_Timed):
    """Is called before a root's forward: one inside another's says nothing."""

    __slots__ = ()

    def __call__(self, module: Any, args: Any) -> None:
        if self._is_traced() or getattr(self._compiler, "_is_compiling_flag", False):
            return
        forward = self._forward
        here = forward.here
        if (here.running is not None and here.running is not module) or "_is_replica" in module.__dict__:
            return  # DataParallel's replicas have its hooks, each in a thread of its own
        here.running, tracer = None, live.tracer
        if tracer is None or forward.graph_task() != -1:  # in a backward it is a recomputation
            return
        try:
            loop = tracer.loop or loop_of(tracer)
            here.has_gradients, here.since = forward.is_grad_enabled(), monotonic_ns()
            loop.forward_begins(here.since, args, training=here.has_gradients)
            here.running, forward.latest = module, weakref.ref(module)
        except Exception as broken:  # noqa: BLE001  -- see above
            failed("forward", broken)


class After(_Timed):
    """Is called after a root's forward, also after one that raised."""

    __slots__ = ()

    def __call__(self, module: Any, _args: Any = (), _result: Any = None) -> None:
        if self._is_traced() or getattr(self._compiler, "_is_compiling_flag", False):
            return
        here = self._forward.here
        if here.running is module:
            end = monotonic_ns()
            here.running, tracer = None, live.tracer
            try:
                if tracer is not None:
                    loop = tracer.loop or loop_of(tracer)
                    loop.forward_ended(here.since, end, training=here.has_gradients)
            except Exception as broken:  # noqa: BLE001  -- see above
                failed("forward", broken)
        elif here.running is None and here.around[0]() is module:
            self._went_on(here, monotonic_ns())

    def _went_on(self, here: _Here, end: int) -> None:
        """Know of the end of a forward within which optimizers have stepped: what is in other stages is not its own."""
        since, here.around, tracer = here.around[1], (none_yet, 0), live.tracer
        try:
            if tracer is not None:
                loop_of(tracer).forward_ended(tracer.steps.within(since), end)
        except Exception as broken:  # noqa: BLE001  -- see above
            failed("forward", broken)

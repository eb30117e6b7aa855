"""Which model has which communication hook, where the ends of gradient buckets are asked for.

A hook costs a few percent of a step of many small buckets, so it is for the level ``partition``.
A model takes one hook, once and for good: the program's own goes inside ours, whenever it comes.
Only on backends whose works end when the work is done: elsewhere a hook would see no more than
the launch, which `torch_ddp` has for nothing.
"""

import sys
import weakref
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._sites import Args, Attachment, Kwargs, Row, Site, Undo, put
from otel_dltrace.instrument._torch.buckets import said_by, tell_of_hook
from otel_dltrace.instrument._torch.groups import HOST_BACKENDS
from otel_dltrace.instrument._torch.hook import BucketHook, backend_of_model, flush, joined
from otel_dltrace.model.semconv import Level
from otel_dltrace.record.tracer import live

_hooks: "weakref.WeakKeyDictionary[Any, BucketHook]" = weakref.WeakKeyDictionary()
_left_alone: "weakref.WeakSet[Any]" = weakref.WeakSet()


def meet(model: Any) -> None:
    """See that the buckets of *model* have a hook, before its backward."""
    reducer = model.reducer
    if reducer in _left_alone:
        return
    hook = _hooks.get(reducer)
    if hook is None:
        if backend_of_model(model) not in HOST_BACKENDS or "comm_hook" in said_by(model):
            _left_alone.add(reducer)  # it has a hook in C++, or one from before we came
            return
        hook = BucketHook()
        sys.modules["torch._C._distributed_c10d"]._register_comm_hook(reducer, None, hook)
        _hooks[reducer] = hook
    if hook.model() is None:
        hook.meet(model)
    gradient = model._module_parameters[0].grad if model.gradient_as_bucket_view else None
    hook.in_place = gradient is not None and gradient._is_view()


def recorded(model: Any) -> bool:
    """Return whether a hook has recorded the buckets of the backward of *model* that has just ended."""
    hook = _hooks.get(model.reducer)
    if hook is None:
        return False
    launched, hook.launched = hook.launched, 0
    return launched > 0


# -- the program's own hooks -------------------------------------------------------------------------


def _register(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def register(reducer: Any, state: Any, comm_hook: Any) -> None:
        program, hook, tracer = partial(comm_hook, state), _hooks.get(reducer), live.tracer
        if hook is not None and hook.program is None:
            hook.program = program
        elif hook is None and tracer is not None and tracer.recorder.level >= Level.PARTITION:
            hook = BucketHook(program)
            original(reducer, state, hook)
            _hooks[reducer] = hook
        else:
            original(reducer, state, comm_hook)  # it refuses a second one
        tell_of_hook()

    return register


def _register_builtin(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def register(reducer: Any, comm_hook_type: Any) -> None:
        hook = _hooks.get(reducer)
        if hook is None or hook.program is not None:
            original(reducer, comm_hook_type)
        elif comm_hook_type.name == "FP16_COMPRESS":  # the other one averages, as we do
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            hook.program = partial(fp16_compress_hook, hook.model().process_group)
        tell_of_hook()

    return register


def _attach(module: ModuleType) -> Undo:
    wrappers = (("_register_comm_hook", _register), ("_register_builtin_comm_hook", _register_builtin))
    undos = [put(module, name, wrapper) for name, wrapper in wrappers]

    def detach() -> None:
        flush()
        for undo in undos:
            if undo is not None:  # a torch built without distributed has none
                undo()

    return detach


def _forward_begins(args: Args, kwargs: Kwargs) -> None:
    reducer, work, static = (*args, *kwargs.values())
    joined[reducer] = None if static else work


ROWS: tuple[Row, ...] = (
    Attachment("torch.distributed", _attach),
    Site("torch.distributed", "Reducer._set_forward_pass_work_handle", begin=_forward_begins, level=Level.PARTITION),
)

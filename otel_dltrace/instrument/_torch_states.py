"""Leaves models that are saved or copied as they are: hooks of ours are no part of their state."""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._sites import Attachment, Row, Undo, replace, resolve
from otel_dltrace.instrument._torch_root_hooks import is_hook
from otel_dltrace.record.guard import guarded

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_CALLED = "_forward_hooks_always_called"
"""By the same numbers, which hooks are called also where the forward raised."""


def _attach_to(name: str) -> Callable[[ModuleType], Undo]:
    def attach(module: ModuleType) -> Undo:
        found = resolve(module, f"{name}.__getstate__")
        if found is None:  # older: what `_Hook` leaves behind is in the copy
            return lambda: None
        holder, attribute, original = found
        return replace(holder, attribute, original, _traced(original))

    return attach


def _traced(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def __getstate__(module: Any) -> Any:  # noqa: N807  -- what it stands for
        state = original(module)
        _leave_out_ours(state)
        return state

    return __getstate__


@guarded
def _leave_out_ours(state: Any) -> None:
    """Have *state*, a copy of a module's attributes, hold hooks of the program alone; the module keeps its own."""
    for name in _HOOKS:
        ours = [number for number, hook in state[name].items() if is_hook(hook)]
        for table in (name, _CALLED) if ours else ():
            state[table] = state[table].copy()
            for number in ours:
                state[table].pop(number, None)


STATES: tuple[Row, ...] = (
    Attachment("torch.nn.modules.module", _attach_to("Module")),
    # They have one of their own.
    Attachment("torch.nn.modules.rnn", _attach_to("RNNBase")),
    Attachment("torch.nn.parallel.distributed", _attach_to("DistributedDataParallel")),
    Attachment("torch._dynamo.eval_frame", _attach_to("OptimizedModule")),
)

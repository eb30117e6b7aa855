"""Leaves `torch.jit.script` and CUDA graphs as they are: hooks of ours are no part of a model that is made one."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._sites import Args, Attachment, Kwargs, Row, Site, Undo, put
from otel_dltrace.instrument._torch.root_hooks import Forward, is_hook


def _attach(module: ModuleType) -> Undo | None:
    return put(module, "get_hook_stubs", _traced)


def _traced(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def get_hook_stubs(nn_module: Any) -> Any:
        with _without_hooks(nn_module):
            return original(nn_module)

    return get_hook_stubs


@contextmanager
def _without_hooks(module: Any) -> Iterator[None]:
    """Take our hooks from *module* while it is looked at: each would be compiled, or the module refused for it."""
    tables = [(table, list(table.items())) for table in (module._forward_hooks, module._forward_pre_hooks)]
    for table, hooks in tables:
        for number, hook in hooks:
            if is_hook(hook):
                del table[number]
    try:
        yield
    finally:
        for table, hooks in tables:  # the same tables in the same order: handles remove by them
            table.clear()
            table.update(hooks)


def graphs(forward: Forward) -> Site:
    """Return the row for what makes CUDA graphs of modules: it refuses hooks, and runs them in no step's *forward*."""

    def begin(_args: Args, _kwargs: Kwargs) -> object:
        forward.here.running = making = object()
        return making

    def over(_making: object, _result: object) -> None:
        forward.here.running = None

    return Site("torch.cuda.graphs", "make_graphed_callables", begin, over, over, around=_graphed)


def _graphed(traced: Callable[..., Any], _original: Callable[..., Any]) -> Callable[..., Any]:
    """Return *traced* for modules without our hooks, which are on them also when nothing is traced any more."""

    @wraps(traced)
    def make_graphed_callables(callables: Any, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for one in callables if isinstance(callables, tuple) else (callables,):
                if isinstance(one, sys.modules["torch"].nn.Module):
                    stack.enter_context(_without_hooks(one))
            return traced(callables, *args, **kwargs)

    return make_graphed_callables


SCRIPT: tuple[Row, ...] = (Attachment("torch.jit._recursive", _attach),)

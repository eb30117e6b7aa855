"""Leaves `torch.jit.script` as it is: hooks of ours are no part of a model that is scripted."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._sites import Attachment, Row, Undo, replace
from otel_dltrace.instrument._torch_root_hooks import is_hook


def _attach(module: ModuleType) -> Undo:
    original = vars(module).get("get_hook_stubs")
    return (lambda: None) if original is None else replace(module, "get_hook_stubs", original, _traced(original))


def _traced(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def get_hook_stubs(nn_module: Any) -> Any:
        with _without_hooks(nn_module):
            return original(nn_module)

    return get_hook_stubs


@contextmanager
def _without_hooks(module: Any) -> Iterator[None]:
    """Take our hooks from *module* while it is looked at: each would be compiled, and has no source for that."""
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


SCRIPT: tuple[Row, ...] = (Attachment("torch.jit._recursive", _attach),)

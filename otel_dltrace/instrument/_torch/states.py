"""Leaves models that are saved or copied as they are: hooks of ours are no part of their state."""

import copy
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from otel_dltrace.instrument._by_identity import ByIdentity
from otel_dltrace.instrument._sites import Attachment, Row, put
from otel_dltrace.instrument._torch.root_hooks import is_hook
from otel_dltrace.record.guard import guarded

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_ALWAYS = "_forward_hooks_always_called"
"""Says by their numbers which hooks are called also where the forward raised."""
_SHALLOW = getattr(copy.copy, "__code__", None)
_twins: ByIdentity[Any] = ByIdentity()
"""For a table with hooks of ours the one that is saved: the same for the module and for a handle of it."""


def _ours(hooks: Any) -> set[int]:
    """Return the numbers of our hooks among the *hooks* of a module; another one may have hooks of the same numbers."""
    return {number for number, hook in hooks.items() if is_hook(hook)}


def _theirs(table: Any, ours: set[int]) -> Any:
    """Return *table*, which a module goes on with, or what is in its place without what is *ours*."""
    kept = [(number, hook) for number, hook in table.items() if number not in ours]
    if len(kept) == len(table):
        return table
    twin = _twins.get(table, None)
    if twin is None:
        twin = _twins[table] = type(table)()
    if list(twin.items()) != kept:
        twin.clear()
        twin.update(kept)
    return twin


@guarded
def _module_state(state: Any) -> None:
    if isinstance(state, dict):
        ours = {name: _ours(state[name]) for name in _HOOKS if state.get(name)}
        if state.get(_ALWAYS):
            ours[_ALWAYS] = ours.get("_forward_hooks", set())
        state.update({name: _theirs(state[name], numbers) for name, numbers in ours.items()})


@guarded
def _handle_state(state: Any) -> Any:
    table, number, *further = state
    if table is None:
        return None
    ours = _ours(table)
    return _theirs(table, ours), number, *(tuple(one and _theirs(one, ours) for one in tables) for tables in further)


def _states_of(module: str, name: str, change: Callable[[Any], Any]) -> Attachment:
    """Return the row for the state of the class *name*; older ones have none: what `_Hook` leaves is in the copy."""
    return Attachment(module, lambda loaded: put(loaded, f"{name}.__getstate__", partial(_changed, change)))


def _changed(change: Callable[[Any], Any], original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return *original* with its result changed, in place or by another one, but for shallow copies: they share all."""

    @wraps(original)
    def __getstate__(one: Any) -> Any:  # noqa: N807  -- what it stands for
        state = original(one)
        if sys._getframe(1).f_code is _SHALLOW:
            return state
        return change(state) or state

    return __getstate__


STATES: tuple[Row, ...] = (
    _states_of("torch.nn.modules.module", "Module", _module_state),
    # They have one of their own.
    _states_of("torch.nn.modules.rnn", "RNNBase", _module_state),
    _states_of("torch.nn.parallel.distributed", "DistributedDataParallel", _module_state),
    _states_of("torch._dynamo.eval_frame", "OptimizedModule", _module_state),
    _states_of("torch.utils.hooks", "RemovableHandle", _handle_state),
)

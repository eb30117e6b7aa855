"""A weak dictionary by identity: objects of programs may have no hash, or be equal to others."""

import weakref
from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class ByIdentity(Generic[Value]):
    """Holds a value for each of some objects, for as long as that lives."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Any], Value]] = {}

    def __setitem__(self, one: Any, value: Value) -> None:
        """Hold *value* for *one*."""
        number, held = id(one), self._held
        held[number] = weakref.ref(one, lambda _: held.pop(number, None)), value

    def get(self, one: Any, default: Value) -> Value:
        """Return what is held for *one*."""
        found = self._held.get(id(one))
        return default if found is None else found[1]

    def pop(self, one: Any, default: Value) -> Value:
        """Return what is held for *one*, and hold it no more."""
        found = self._held.pop(id(one), None)
        return default if found is None else found[1]

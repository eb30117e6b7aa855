"""What several analyses ask of the same table or batch is computed once."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from otel_dltrace.model.arrays import Column

T = TypeVar("T")


def once(compute: Callable[[T], Column]) -> Callable[[T], Column]:
    """Return *compute* with its result for a value kept on that value, read-only, since others get the same array."""
    name = f"{compute.__module__}.{compute.__qualname__}"  # with a dot in it, as no attribute has

    @wraps(compute)
    def known(value: T) -> Column:
        kept = vars(value)
        if name not in kept:
            kept[name] = compute(value)
            kept[name].flags.writeable = False
        found: Column = kept[name]
        return found

    return known

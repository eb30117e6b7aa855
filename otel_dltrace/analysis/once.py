"""What several analyses ask of the same table or batch is computed once."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from otel_dltrace.model.arrays import Column

T = TypeVar("T")


def once(compute: Callable[[T], Column]) -> Callable[[T], Column]:
    """Return *compute*, whose result for a value stays with the value; it cannot be changed, for others have it too."""
    name = f"{compute.__module__}.{compute.__qualname__}"  # which is no attribute's

    @wraps(compute)
    def known(value: T) -> Column:
        kept = vars(value)
        if name not in kept:
            kept[name] = compute(value)
            kept[name].flags.writeable = False
        found: Column = kept[name]
        return found

    return known

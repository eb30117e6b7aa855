"""How many optimizers the process has: where it is one, each of its steps ends a cycle (contract 4)."""

from typing import Any

from otel_dltrace.instrument._by_identity import ByIdentity

_seen: ByIdentity[bool] = ByIdentity()
"""Those that live, and whether we saw how they were made: there may be others from before us."""


def made(optimizer: Any) -> None:
    """Know that the program has made *optimizer*."""
    _seen[optimizer] = True


def stepped(optimizer: Any) -> None:
    """Know that *optimizer* has stepped, which may be older than we are."""
    _seen.setdefault(optimizer, False)


def is_one() -> bool:
    """Return whether there is one optimizer, certainly."""
    return _seen.values() == [True]

"""Whether the process has had one optimizer alone, or none: then each of its steps, or each backward, ends a cycle.

All ranks have to answer alike, so it does not matter which ones still live: each rank's garbage is collected at its own
moment.
"""

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _Seen:
    """What the process has seen of optimizers."""

    first: Callable[[], Any] | None = None
    """Returns the first one that was made, while it lives; None: there was none yet."""
    are_several: bool = False


_seen = _Seen()


def made(optimizer: Any) -> None:
    """Know that the program has made *optimizer*."""
    if _seen.first is None:
        _seen.first = weakref.ref(optimizer)
    stepped(optimizer)


def stepped(optimizer: Any) -> None:
    """Know that *optimizer* has stepped: one from before us may not be the only one."""
    if _seen.first is None or _seen.first() is not optimizer:
        _seen.are_several = True


def is_one() -> bool:
    """Return whether the process has had one optimizer, certainly."""
    return _seen.first is not None and not _seen.are_several


def are_none() -> bool:
    """Return whether the process has had no optimizer of torch's, certainly: it updates its parameters itself."""
    if _seen.first is not None or _seen.are_several:
        return False
    optim = sys.modules.get("torch.optim")
    return optim is None or not _was_made_of(optim.Optimizer)


def _was_made_of(kind: Any) -> bool:
    """Return whether an optimizer of *kind* was made, also before us: torch has then put its profiler around `step`."""
    return hasattr(kind.step, "hooked") or any(map(_was_made_of, kind.__subclasses__()))

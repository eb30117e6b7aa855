"""The one place that swallows our own errors: training never pays for tracing."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
_said: set[str] = set()


def say(sentence: str) -> None:
    """Print one sentence on standard error, the same one only once."""
    if sentence in _said:
        return
    _said.add(sentence)
    try:
        print(f"otel_dltrace: {sentence}", file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass  # standard error is closed: there is nobody to tell


def failed(where: str, error: BaseException) -> None:
    """Tell once that tracing gave up at *where*; the program goes on untraced there."""
    say(f"{where} failed and is not traced ({type(error).__name__}: {error})")


def guarded(function: Callable[P, R]) -> Callable[P, R | None]:
    """Return *function* with our own errors told once instead of raised; it returns None then."""

    @wraps(function)
    def never_raises(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            failed(function.__qualname__, error)
            return None

    return never_raises

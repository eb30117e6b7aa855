"""The one place that swallows our own errors: training never pays for tracing."""

import sys
from _signal import getsignal  # type: ignore[import-not-found]  # that of `signal` makes enums: 30 us, not 2
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from signal import NSIG
from types import CodeType
from typing import ParamSpec, TypeVar

from otel_dltrace.model.text import harmless

P = ParamSpec("P")
R = TypeVar("R")
_said: set[str] = set()


def say(sentence: str, key: str = "") -> None:
    """Print one sentence on standard error, only once for each *key* (default: the sentence)."""
    key = key or sentence
    if key in _said or sys.stderr is None:  # closed from the start: `print` would take standard output instead
        return
    _said.add(key)
    with suppress(Exception):  # closed, or interrupted by the handler we run in: nobody to tell
        print(f"otel_dltrace: {harmless(sentence)}", file=sys.stderr, flush=True)


def said_of(about: str) -> str:
    """Return a sentence that was said here and has *about* in it, "" if none was."""
    return next((sentence for sentence in tuple(_said) if about in sentence), "")


def failed(where: str, error: BaseException) -> None:
    """Tell once that tracing gave up at *where*; the program goes on untraced there.

    Raises:
        BaseException: *error*, if it is not ours; see `pass_on`.
    """
    pass_on(error)
    kind = type(error).__name__
    say(f"{where} failed and is not traced ({kind}: {text_of(error)})", f"{where} {kind}")


def pass_on(error: BaseException) -> None:
    """Raise *error* again where a signal's handler of the program raised it, which interrupted what we did."""
    handlers = {_code_of(handler) for number in range(1, NSIG) if callable(handler := getsignal(number))}
    at = error.__traceback__
    while at is not None:
        if at.tb_frame.f_code in handlers:
            raise error
        at = at.tb_next


def _code_of(handler: object) -> CodeType | None:
    """Return the code that *handler* is; None if it is not written in Python."""
    while isinstance(handler, partial):
        handler = handler.func
    called = getattr(handler, "__func__", handler)  # a method
    code = getattr(called, "__code__", None) or getattr(type(called).__call__, "__code__", None)
    return code if isinstance(code, CodeType) else None


def text_of(error: BaseException) -> str:
    """Return the message of *error*; nothing where even that raises."""
    try:
        return str(error)
    except Exception:
        return ""


def guarded(function: Callable[P, R]) -> Callable[P, R | None]:
    """Return *function* with our own errors told once instead of raised; it returns None then."""

    @wraps(function)
    def never_raises(*args: P.args, **kwargs: P.kwargs) -> R | None:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            failed(getattr(function, "__qualname__", repr(function)), error)
            return None

    return never_raises


def tried(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> "R | Exception":
    """Return what *function*, somebody else's code, returns, or the error that it raises."""
    try:
        return function(*args, **kwargs)
    except Exception as error:
        pass_on(error)
        return error

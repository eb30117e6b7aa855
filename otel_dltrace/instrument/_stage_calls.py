"""Calls that are a stage by themselves, in torch and in the frameworks on top of it."""

import os
import sys
from collections.abc import Callable
from functools import partial, wraps
from threading import get_ident
from time import monotonic_ns
from typing import Any

from otel_dltrace.instrument._loop import loop_of
from otel_dltrace.instrument._sites import Args, Attachment, Kwargs, Site, always, put, wrap
from otel_dltrace.model.semconv import DEVICE_STAGES
from otel_dltrace.record.device import Mark
from otel_dltrace.record.tracer import live

Piece = tuple[str, int, Mark | None]
_running: set[str] = set()
"""The stages whose calls are running in the thread that trains: a call inside one of them is the same piece."""
os.register_at_fork(after_in_child=_running.clear)  # the parent's calls


def _begins(stage: str, is_one: Callable[[Args, Kwargs], bool], args: Args, kwargs: Kwargs) -> Piece | None:
    assert live.tracer is not None
    loop = loop_of(live.tracer)
    if stage in _running or get_ident() != loop.home or not is_one(args, kwargs):
        return None
    mark = loop.steps.mark() if stage in DEVICE_STAGES else None
    _running.add(stage)
    return stage, monotonic_ns(), mark


def _ended(piece: Piece, _result: object) -> None:
    end = monotonic_ns()
    stage, start, mark = piece
    _running.discard(stage)
    assert live.tracer is not None
    loop_of(live.tracer).piece(stage, start, end, mark)


def _outside_graphs(traced: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return *traced* for calls outside of a graph that is being compiled, *original* for those inside."""
    compiling = sys.modules["torch"].compiler.is_compiling

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) if compiling() else traced(*args, **kwargs)

    return call


def stage_site(
    module: str, name: str, stage: str, *, in_graphs: bool = False, is_one: Callable[[Args, Kwargs], bool] = always
) -> Site:
    """Return the row for a function of which every call is a piece of *stage*, with all calls inside it.

    One that is used *in_graphs* that are compiled stays there as it is; it is not one of torch's own. Where not every
    call is one, *is_one* tells by its arguments.
    """
    around = _outside_graphs if in_graphs else None
    return Site(module, name, partial(_begins, stage, is_one), _ended, _ended, around=around)


def stage_call(module: str, name: str, stage: str) -> Attachment:
    """Return the row for the calls of a function that *module* has imported by *name*; others are not traced."""
    around = partial(wrap, stage_site(module, name, stage))
    return Attachment(module, lambda loaded: put(loaded, name, around))

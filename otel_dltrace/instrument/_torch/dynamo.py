"""Leaves `torch.compile` as it is: what it knows of collectives it knows of the traced ones, and it skips our code."""

import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from otel_dltrace.instrument import _sites
from otel_dltrace.instrument._sites import Attachment, Row, Undo
from otel_dltrace.instrument._torch.calls import FUNCTIONAL
from otel_dltrace.instrument._torch.groups import c10d
from otel_dltrace.record.blocks import IN_GRAPH, ask_in_graph

_PACKAGE = __name__.partition(".")[0]


def _remap(module: ModuleType) -> Undo:
    """Have the table of functions that may stand in a graph know the traced and the bare ones alike."""
    remaps = getattr(module, "traceable_collective_remaps", {})
    added = {}
    for function, functional in remaps.items():
        traced = getattr(c10d(), function.__name__, None)
        if _is_ours(function):
            added[function.__wrapped__] = functional
        elif _is_ours(traced):
            added[traced] = functional
    remaps.update(added)

    def undo() -> None:
        for function in added:
            if _is_ours(function):
                remaps.pop(function, None)

    return undo


def _is_ours(function: Any) -> bool:
    return getattr(function, "__globals__", {}).get("__name__") == _sites.__name__


def _skip(module: ModuleType) -> None:
    """Have frames of ours run as they are between two graphs; inside one they are looked into."""
    skip = getattr(module, "skip_code", None)
    if skip is not None:
        for name, ours in sys.modules.copy().items():
            if name.partition(".")[0] == _PACKAGE and isinstance(ours, ModuleType):
                for code in _codes_of(ours):
                    skip(code)


def _codes_of(module: ModuleType) -> Iterator[CodeType]:
    for value in vars(module).copy().values():
        members = vars(value).values() if isinstance(value, type) else (value,)
        for member in members:
            if isinstance(member, FunctionType) and member.__code__.co_filename == module.__file__:
                yield from _nested(member.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


_is_told = False


def _tell_blocks(module: ModuleType) -> None:
    """Have the blocks that a program marks know that they are in a graph; what torch has been told it cannot forget."""
    global _is_told  # noqa: PLW0603  -- it raises if it is told twice
    substitute = getattr(module, "substitute_in_graph", None)  # from 2.6 on
    if substitute is not None and not _is_told:
        _is_told = True
        substitute(ask_in_graph, skip_signature_check=True)(_in_graph)


def _in_graph() -> object:
    return IN_GRAPH


BLOCKS = Attachment("torch._dynamo", _tell_blocks)

DYNAMO: tuple[Row, ...] = (
    Attachment(FUNCTIONAL, _remap),
    Attachment("torch._dynamo.eval_frame", _skip),
)

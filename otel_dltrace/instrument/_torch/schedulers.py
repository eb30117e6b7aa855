"""The steps of learning-rate schedulers: torch's own, and those of classes that programs derive from them."""

from collections.abc import Iterator
from inspect import isfunction
from sys import modules
from time import monotonic_ns
from types import ModuleType

from otel_dltrace.instrument._loop import loop_of
from otel_dltrace.instrument._sites import Args, Attachment, Kwargs, Row, Site, Undo, replace, wrap
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.tracer import live

MODULE = "torch.optim.lr_scheduler"
_MADE_BY = ("LRScheduler", "SequentialLR", "ChainedScheduler", "ReduceLROnPlateau")
"""Torch's classes through whose constructors schedulers are made, unless a program's leaves them out."""
STEPS = (*_MADE_BY, "CosineAnnealingWarmRestarts")
"""Those that have a ``step`` of their own."""

_stepping: list[object] = []
_met: dict[type, Undo] = {}
"""The programs' classes whose ``step`` has a site around it."""


def _step_begins(args: Args, _kwargs: Kwargs) -> int | None:
    if _stepping:
        return None  # chained schedulers step one another, and derived ones those they are derived from
    _stepping.append(args[0])
    return monotonic_ns()


def _step_ended(start: int, _result: object) -> None:
    _stepping.clear()
    assert live.tracer is not None
    loop_of(live.tracer).scheduler_ended(start, monotonic_ns())


def _stepped_at_first(_span: int, _result: object) -> None:
    """Leave out the first step, which a constructor takes itself."""
    _stepping.clear()


def _site(name: str) -> Site:
    return Site(MODULE, f"{name}.step", begin=_step_begins, finish=_step_ended, fail=_step_ended)


# -- derived classes --------------------------------------------------------------------------------


def _meet(cls: type) -> None:
    """Put a site around each ``step`` that *cls* has, or inherits, from a program's schedulers."""
    for one in cls.__mro__:
        step = vars(one).get("step")
        if isfunction(step) and one.__module__ != MODULE and one not in _met and _is_scheduler(one):
            _met[one] = replace(one, "step", step, wrap(_site(one.__qualname__), step))


def _is_scheduler(cls: type) -> bool:
    return issubclass(cls, modules[MODULE].LRScheduler)


def _made(args: Args, _kwargs: Kwargs) -> None:
    _meet(type(args[0]))


def _attach(module: ModuleType) -> Undo:
    for cls in _below(module.LRScheduler):
        guarded(_meet)(cls)

    def detach() -> None:
        while _met:
            _met.popitem()[1]()

    return detach


def _below(cls: type) -> Iterator[type]:
    derived: type
    for derived in cls.__subclasses__():
        yield derived
        yield from _below(derived)


def _constructor(name: str) -> Site:
    return Site(MODULE, f"{name}.__init__", begin=_made)


ROWS: tuple[Row, ...] = (
    *map(_site, STEPS),
    *map(_constructor, _MADE_BY),
    Site(
        MODULE,
        "LRScheduler._initial_step",
        begin=_step_begins,
        finish=_stepped_at_first,
        fail=_stepped_at_first,
    ),
    Attachment(MODULE, _attach),
)

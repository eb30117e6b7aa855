"""A site: one function of a framework, what to do around it; put in place and taken away here alone."""

import logging
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial, wraps
from types import ModuleType
from typing import Any

from otel_dltrace.model.semconv import Level
from otel_dltrace.record.guard import failed, guarded, pass_on
from otel_dltrace.record.tracer import live

log = logging.getLogger("otel_dltrace")

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Undo = Callable[[], object]
began: dict[str, int] = {}
"""When the import of a watched module began (monotonic ns): some do their work in it."""
_NEVER = 1 << 30
"""Above every level."""


def always(_args: Args, _kwargs: Kwargs) -> bool:
    """Answer yes, whatever the arguments: every call is traced."""
    return True


def _leave(_span: Any, _result: Any) -> None:
    """Do nothing with a result, or with an error."""


class Gate:
    """From which level on a site is traced: its wrappers ask, since a program keeps those that it imported by name."""

    __slots__ = ("level",)

    def __init__(self, level: int) -> None:
        self.level = level


class Uncalled:
    """What a class has in place of a method, and nobody calls: *traced* is called for it.

    It is told by its class: a function of the program's may have an attribute of any name.
    """

    __slots__ = ("traced",)

    def __init__(self, traced: Callable[..., Any]) -> None:
        self.traced = traced


@dataclass(frozen=True, slots=True)
class Site:
    """One function or method, and what is called before and after it.

    Attributes:
        module: The module that defines it; the site is put in place when that has been loaded.
        name: Its dotted name there, such as ``Work.wait``.
        begin: Called first, with its arguments; returns a span of any kind, or None to trace nothing.
        finish: Called with the span and the result.
        fail: Called with the span and the error that leaves the function.
        level: The level from which on it is traced.
        since: The framework's first version that has it, such as ``2.8``; "" for all that are supported.
        until: The first version that has it no more; "" if there is none yet.
        around: Makes, of the traced function and the bare one, what is put in place, where that is not the traced one.
        gate: Lets its wrappers trace, while it is in place.
    """

    module: str
    name: str
    begin: Callable[[Args, Kwargs], Any]
    finish: Callable[[Any, Any], None] = _leave
    fail: Callable[[Any, BaseException], None] = _leave
    level: int = Level.STEP
    since: str = ""
    until: str = ""
    around: Callable[[Callable[..., Any], Callable[..., Any]], Any] | None = None
    gate: Gate = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Let its wrappers trace from its level on."""
        object.__setattr__(self, "gate", Gate(int(self.level)))


@dataclass(frozen=True, slots=True)
class Attachment:
    """Something else that is put in place: *attach* gets the module, returns how to undo it, None for not at all."""

    module: str
    attach: Callable[[ModuleType], Undo | None]


Row = Site | Attachment


def install(rows: Iterable[Row], module: ModuleType, *, aliases: bool) -> list[Undo]:
    """Put the *rows* of *module* in place; return what takes them away, to be called last one first.

    A row for another version of the framework is skipped; so is one for this version whose function
    is not there, with a word in the log.

    Args:
        rows: The rows of this module.
        module: The module, loaded.
        aliases: Look for the functions in the other modules of the package as well, which may have
            imported them by name; needless while nobody else has seen the module.
    """
    undos: list[Undo] = []
    wrappers: dict[int, tuple[Any, Any]] = {}
    for row in rows:
        if isinstance(row, Attachment):
            undo = guarded(row.attach)(module)  # the rest is traced where one of these finds another version
            if undo is not None:
                undos.append(undo)
            continue
        if not applies(row):
            continue
        found = resolve(module, row.name)
        if found is None:
            log.debug("%s.%s is not there and not traced", row.module, row.name)
            continue
        holder, name, original = found
        wrapper = wrap(row, original)
        undos.append(replace(holder, name, original, wrapper))
        undos.append(_open(row))
        if holder is module:
            wrappers[id(original)] = (original, wrapper)
    package = module.__name__.partition(".")[0]
    if aliases and wrappers:
        undos += _replace_aliases(package, wrappers)
    if wrappers:  # who imports one from now on holds the wrapper
        traced = {id(wrapper): (wrapper, original) for original, wrapper in wrappers.values()}
        undos.append(partial(_replace_aliases, package, traced))
    return undos


def _open(site: Site) -> Undo:
    """Have the wrappers of *site* trace, also those that a program has kept; return what ends that."""
    site.gate.level = int(site.level)
    return partial(setattr, site.gate, "level", _NEVER)


def applies(site: Site) -> bool:
    """Return whether *site* is for the framework's installed version; one that is not known has everything."""
    framework = sys.modules.get(site.module.partition(".")[0])
    here = version_of(framework)
    return not here or (
        (not site.since or here >= _version(site.since)) and (not site.until or here < _version(site.until))
    )


def version_of(framework: ModuleType | None) -> tuple[int, ...]:
    """Return the version of *framework* as numbers, none where it says none."""
    return _version(getattr(framework, "__version__", ""))


def _version(text: str) -> tuple[int, ...]:
    numbers = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def resolve(module: ModuleType, dotted: str) -> tuple[Any, str, Any] | None:
    """Return (holder, attribute, object) for the *dotted* name in *module*, or None where it is not.

    The object is the one in the holder's own ``__dict__``: what `getattr` makes of it is not what
    has to be put back.
    """
    holder: Any = module
    *path, name = dotted.split(".")
    for part in path:
        holder = getattr(holder, part, None)
    original = getattr(holder, "__dict__", {}).get(name)
    return None if original is None else (holder, name, original)


def put(module: ModuleType, dotted: str, make: Callable[[Any], Any]) -> Undo | None:
    """Put what *make* makes of the object with the *dotted* name in *module* in its place, if it is there."""
    found = resolve(module, dotted)
    if found is None:
        return None
    holder, name, original = found
    return replace(holder, name, original, make(original))


def replace(holder: Any, name: str, original: Any, wrapper: Any) -> Undo:
    """Put *wrapper* in the place of *original*; return what puts that back."""
    setattr(holder, name, wrapper)

    def restore() -> None:
        # Who patched it after us keeps their patch; our wrapper inside it passes calls through.
        if vars(holder).get(name) is wrapper:
            setattr(holder, name, original)

    return restore


def _replace_aliases(package: str, wrappers: dict[int, tuple[Any, Any]]) -> list[Undo]:
    undos = []
    # Copied at one stroke: a list of the items may set off a garbage collection, and that may import something.
    for module_name, module in sys.modules.copy().items():
        if module_name.partition(".")[0] != package or not isinstance(module, ModuleType):
            continue
        for name, value in vars(module).copy().items():
            original, wrapper = wrappers.get(id(value), (None, None))
            if original is value and wrapper is not None:
                undos.append(replace(module, name, original, wrapper))
    return undos


def _end_failed(name: str, broken: Exception) -> None:
    if live.tracer is not None:
        failed(name, broken)
    else:  # tracing was stopped within the call, and there is nobody to tell
        pass_on(broken)


def wrap(site: Site, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return *original* with the site around it; with tracing off, or the site away, calls are passed through."""
    call = original.traced if isinstance(original, Uncalled) else original
    begin, finish, fail, gate, name = site.begin, site.finish, site.fail, site.gate, site.name

    # Inlines what `guarded` does: between two kernels Python's code is cold, and every frame costs microseconds.
    @wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        tracer = live.tracer
        if tracer is None or tracer.recorder.level < gate.level:
            return call(*args, **kwargs)
        try:
            span = begin(args, kwargs)
        except Exception as broken:  # noqa: BLE001  -- see above
            failed(name, broken)
            span = None
        if span is None:
            return call(*args, **kwargs)
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            try:
                fail(span, error)
            except Exception as broken:  # noqa: BLE001  -- see above
                _end_failed(name, broken)
            raise
        try:
            finish(span, result)
        except Exception as broken:  # noqa: BLE001  -- see above
            _end_failed(name, broken)
        return result

    return wrapper if site.around is None else site.around(wrapper, original)

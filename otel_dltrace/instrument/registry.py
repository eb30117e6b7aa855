"""Which frameworks are traced, and the watch for the moment at which the program imports one."""

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from time import monotonic_ns
from types import ModuleType
from typing import Any

from otel_dltrace.instrument import (
    accelerate,
    byteps,
    horovod,
    lightning,
    mpi4py,
    opentelemetry,
    process,
    pushpull,
    torch_ddp,
    torch_device,
    torch_distributed,
    torch_fsdp,
    torch_training,
)
from otel_dltrace.instrument._sites import Row, Undo, began, install
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.tracer import live

TABLES: dict[str, tuple[Row, ...]] = {
    "torch_training": torch_training.ROWS,
    "torch_ddp": torch_ddp.ROWS,
    "torch_distributed": torch_distributed.ROWS,
    "torch_fsdp": torch_fsdp.ROWS,
    "torch_device": torch_device.ROWS,
    "accelerate": accelerate.ROWS,
    "lightning": lightning.ROWS,
    "torch_world": torch_distributed.WORLD,
    "byteps": byteps.ROWS,
    "horovod": horovod.ROWS,
    "pushpull": pushpull.ROWS,
    "opentelemetry": opentelemetry.ROWS,
    "mpi4py": mpi4py.ROWS,
    "process": process.ROWS,
}
"""The sources by name; each can be traced without the others."""
COMMON = "torch_world"
"""What is watched as long as any source is: who the ranks are, without which no span has an id."""


class Registry:
    """Puts rows in place: now, where their module is loaded; else just after it has been.

    Nothing is imported because of us. Standing at the front of ``sys.meta_path``, we see an import
    of a watched module first, let the other finders find it, and act when its code has run,
    before the importing module goes on: names it then imports from it are the traced ones.

    Args:
        tables: What to trace, by the name of its source.
    """

    def __init__(self, tables: Mapping[str, Sequence[Row]]) -> None:
        self._sources = frozenset(tables)
        self._rows: dict[str, list[tuple[str, Row]]] = {}
        for source, rows in tables.items():
            for row in rows:
                self._rows.setdefault(row.module, []).append((source, row))
        self._finder = _Finder(self._rows, self._loaded)
        self._undos: dict[str, list[Undo]] = {}
        self._lock = threading.RLock()
        self._on: frozenset[str] = frozenset()

    def watch(self, sources: Iterable[str] | None = None) -> None:
        """Put the rows of *sources* (default: all) in place, now or when their modules come; once is enough."""
        with self._lock:
            asked = self._sources if sources is None else self._sources.intersection(sources)
            if asked:
                asked |= self._sources & {COMMON}
            new = asked - self._on
            self._on |= new
            if self._on and self._finder not in sys.meta_path:
                sys.meta_path.insert(0, self._finder)
            for name in self._rows:
                self._install(name, new)

    def unwatch(self, sources: Iterable[str] | None = None) -> None:
        """Take the rows of *sources* (default: all) away, the last one first: every object is the one it was."""
        with self._lock:
            gone = self._on if sources is None else self._on.intersection(sources)
            if self._on - gone <= {COMMON}:
                gone = self._on
            self._on -= gone
            if not self._on and self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            for name in reversed([*self._undos]):
                if any(source in gone for source, _ in self._rows[name]):
                    # Two sources may have wrapped one function: what stays is put back around the bare one.
                    for undo in reversed(self._undos.pop(name)):
                        guarded(undo)()
                    self._install(name, self._on)

    def renew(self) -> None:
        """Put the rows that are in place in place again: some look for what is there, in a new recording too."""
        with self._lock:
            there = self._on
            self.unwatch(there)
            self.watch(there)

    def _install(self, name: str, sources: frozenset[str], *, aliases: bool = True) -> None:
        """Put the rows of *sources* in place in the module *name*, if it is loaded."""
        module = sys.modules.get(name)
        rows = [row for source, row in self._rows[name] if source in sources]
        if rows and isinstance(module, ModuleType):
            self._undos.setdefault(name, []).extend(install(rows, module, aliases=aliases))

    @guarded
    def _loaded(self, module: ModuleType) -> None:
        with self._lock:
            self._install(module.__name__, self._on, aliases=False)


class _Finder(MetaPathFinder):
    def __init__(self, watched: Mapping[str, object], loaded: Callable[[ModuleType], None]) -> None:
        self._watched = watched
        self._loaded = loaded
        self._here = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Other watchers (wrapt's, ddtrace's) ask all finders in turn, and so us again: once is enough.
        sought = getattr(self._here, "sought", None)
        if fullname not in self._watched or fullname == sought:
            return None
        self._here.sought = fullname
        try:
            return self._find(fullname, path, target)
        finally:
            self._here.sought = sought

    def _find(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec: ModuleSpec | None = find(fullname, path, target)
            if spec is not None:
                _when_loaded(spec.loader, self._loaded)
                return spec
        return None


@guarded
def _when_loaded(loader: Any, loaded: Callable[[ModuleType], None]) -> None:
    """Have *loader* call *loaded* after it has run its module; the loader stays the one it is."""
    run = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        began[module.__name__] = monotonic_ns()
        run(module)
        loaded(module)

    if not isinstance(loader, type):  # a class serves all its modules; none of ours is built in
        loader.exec_module = exec_module


_registry = Registry(TABLES)


@guarded
def instrument(sources: Iterable[str] | None = None) -> None:
    """Trace the frameworks that the program has imported, and those it will import.

    Args:
        sources: Names in `TABLES`; by default all.
    """
    tracer = live.tracer
    if tracer is not None and not tracer.is_followed:
        tracer.is_followed = True
        _registry.renew()
    _registry.watch(sources)


@guarded
def uninstrument(sources: Iterable[str] | None = None) -> None:
    """Put every patched object back; call it before the recorder is closed, since open ends are written.

    Args:
        sources: Names in `TABLES`; by default all.
    """
    _registry.unwatch(sources)

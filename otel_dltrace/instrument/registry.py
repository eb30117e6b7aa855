"""Which frameworks are traced, and the watch for the moment at which the program imports one."""

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from otel_dltrace.instrument import torch_ddp, torch_distributed, torch_training
from otel_dltrace.instrument._sites import Row, Undo, install
from otel_dltrace.record.guard import guarded

TABLES: dict[str, tuple[Row, ...]] = {
    "torch_training": torch_training.ROWS,
    "torch_ddp": torch_ddp.ROWS,
    "torch_distributed": torch_distributed.ROWS,
}


class Registry:
    """Puts rows in place: now, where their module is loaded; else just after it has been.

    Nothing is imported because of us. Standing at the front of ``sys.meta_path``, we see an import
    of a watched module first, let the other finders find it, and act when its code has run,
    before the importing module goes on: names it then imports from it are the traced ones.

    Args:
        rows: What to trace.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows: dict[str, list[Row]] = {}
        for row in rows:
            self._rows.setdefault(row.module, []).append(row)
        self._finder = _Finder(self._rows, self._loaded)
        self._undos: list[Undo] = []
        self._lock = threading.RLock()
        self._on = False

    def watch(self) -> None:
        """Put all rows in place, now or when their modules come; once is enough."""
        with self._lock:
            if self._on:
                return
            self._on = True
            sys.meta_path.insert(0, self._finder)
            for name, rows in self._rows.items():
                module = sys.modules.get(name)
                if isinstance(module, ModuleType):
                    self._undos += install(rows, module, aliases=True)

    def unwatch(self) -> None:
        """Take all rows away, the last one first, so that every object is the one it was."""
        with self._lock:
            self._on = False
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            while self._undos:
                guarded(self._undos.pop())()

    @guarded
    def _loaded(self, module: ModuleType) -> None:
        with self._lock:
            if self._on:
                self._undos += install(self._rows[module.__name__], module, aliases=False)


class _Finder(MetaPathFinder):
    def __init__(self, watched: dict[str, list[Row]], loaded: Callable[[ModuleType], None]) -> None:
        self._watched = watched
        self._loaded = loaded

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self._watched:
            return None
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
        run(module)
        loaded(module)

    if not isinstance(loader, type):  # a class serves all its modules; none of ours is built in
        loader.exec_module = exec_module


_registry = Registry([row for rows in TABLES.values() for row in rows])


@guarded
def instrument() -> None:
    """Trace the frameworks that the program has imported, and those it will import."""
    _registry.watch()


@guarded
def uninstrument() -> None:
    """Put every patched object back; call it before the recorder is closed, since open ends are written."""
    _registry.unwatch()

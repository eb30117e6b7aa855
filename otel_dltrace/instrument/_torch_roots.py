"""Finds the outermost modules of a PyTorch program and times their forwards."""

import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._sites import Undo
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.steps import live

Span = tuple[int, bool]
MAX_CALLS = 10_000
"""Module calls after which a search without result ends: a global hook costs 1.4 us for each."""
MAX_TRIES = 2


class _Hook:
    """A hook that a saved or copied model leaves behind: its copy is a function of Python that does nothing."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


class Roots:
    """The modules whose forward is the forward of a step.

    A hook on one module costs nothing measurable, a global one is called for every submodule. So a
    global hook looks for the outermost module that holds what is trained, is removed when that is
    found, and comes back when an optimizer steps parameters which no known root holds (a GAN's
    other half).
    """

    def __init__(self, begins: Callable[[], Span | None], ended: Callable[[Span], None]) -> None:
        self._begins, self._ended = begins, ended
        self._module: Any = None
        self._search: Any = None
        self._restores: list[Undo] = []
        self._forget()

    def _forget(self) -> None:
        self._calls = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._held: set[int] = set()
        self._missing: set[int] = set()
        self._checked: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._running: Any = None
        self._span: Span | None = None

    def attach(self, module: ModuleType) -> Undo:
        """Begin to look for roots, given ``torch.nn.modules.module``; return how to undo all."""
        self._module = module
        self._look()
        return self._detach

    def forget_running(self) -> None:
        """Know that no forward is running: one that raised has not said so."""
        self._running = self._span = None

    def meet_compiled(self, module: Any) -> None:
        """Take a compiled module that is about to be called for a root if it can be one.

        Torch warns the user where it meets a global hook in such a call: the search must be over by then.
        """
        if live.tracer is not None and self._running is None:
            self._adopt(module)
        self._stop_looking()

    def compiled_in_place(self, module: Any) -> None:
        """Time the calls of *module*, whose ``compile()`` has put its hooks inside the graph."""
        compiled = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            if sys.modules["torch"].compiler.is_compiling():  # another graph takes it in
                return compiled(*args, **kwargs)
            self._enter_compiled(module)
            try:
                return compiled(*args, **kwargs)
            finally:
                self._leave(module)

        def restore() -> None:
            if module._compiled_call_impl is call:
                module._compiled_call_impl = compiled

        module._compiled_call_impl = call
        self._restores.append(restore)

    @guarded
    def _enter_compiled(self, module: Any) -> None:
        if live.tracer is not None and self._running is None:
            self._adopt(module, hooks=False)
            if module in self._known:
                self._enter(module)

    def stepped(self, optimizer: Any) -> None:
        """Look again if *optimizer* steps parameters that no known root holds; give up after some tries."""
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known_count, tries = self._checked.get(optimizer, (0, 0))
        if known_count != count:
            tries = 0
        elif tries == 0:
            return
        missing = self._unheld(optimizer)
        if tries < MAX_TRIES and missing:
            self._checked[optimizer] = (count, tries + 1)
            self._missing |= missing
            self._look()
            return
        self._checked[optimizer] = (count, 0)
        self._held |= missing
        self._missing -= missing
        if not self._missing:
            self._stop_looking()

    def _unheld(self, optimizer: Any) -> set[int]:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if stepped - self._held:
            # Wrappers such as FSDP exchange a root's parameters.
            self._held.update(id(parameter) for root in list(self._known) for parameter in root.parameters())
        return stepped - self._held

    def _look(self) -> None:
        if self._search is None and self._module is not None:
            self._calls = 0
            self._search = self._module.register_module_forward_pre_hook(_Hook(self._called))

    def _stop_looking(self) -> None:
        if self._search is not None:
            self._search.remove()
            self._search = None

    def _called(self, module: Any, _args: Any) -> None:
        # Inside a graph that is being compiled this is a constant, and all below it is not traced.
        if sys.modules["torch"].compiler.is_compiling():
            return
        self._meet(module)

    @guarded
    def _meet(self, module: Any) -> None:
        self._calls += 1
        if self._calls > MAX_CALLS:
            self._stop_looking()
        elif self._running is None and live.tracer is not None and self._adopt(module):
            self._enter(module)  # its own hook comes too late for this call

    def _adopt(self, module: Any, *, hooks: bool = True) -> bool:
        """Make *module* a root if it holds what is looked for; return whether it has become one."""
        if module in self._known:
            return False
        parameters = {id(p) for p in module.parameters() if p.requires_grad}
        if not (parameters & self._missing if self._missing else parameters):
            return False  # a loss, a transform, a frozen teacher
        self._known.add(module)
        self._held |= parameters
        self._missing -= parameters
        if not self._missing:
            self._stop_looking()
        if hooks:
            before = module.register_forward_pre_hook(_Hook(self._entered))
            after = module.register_forward_hook(_Hook(self._left))
            self._restores += [before.remove, after.remove]
        return True

    def _entered(self, module: Any, _args: Any) -> None:
        if not sys.modules["torch"].compiler.is_compiling():
            self._enter(module)

    @guarded
    def _enter(self, module: Any) -> None:
        if self._running is None or self._running is module:
            self._span = self._begins()
            self._running = module if self._span is not None else None

    def _left(self, module: Any, _args: Any, _result: Any) -> None:
        if not sys.modules["torch"].compiler.is_compiling():
            self._leave(module)

    @guarded
    def _leave(self, module: Any) -> None:
        if self._running is module:
            span, self._running, self._span = self._span, None, None
            if span is not None:
                self._ended(span)

    def _detach(self) -> None:
        self._stop_looking()
        while self._restores:
            self._restores.pop()()
        self._module = None
        self._forget()

"""Finds the outermost modules of a PyTorch program and times their forwards."""

import sys
import weakref
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from otel_dltrace.instrument import _optimizers
from otel_dltrace.instrument._by_identity import ByIdentity
from otel_dltrace.instrument._sites import Undo
from otel_dltrace.instrument._torch.root_hooks import After, Before, Forward, Search, compiling, none_yet, number_behind
from otel_dltrace.record.guard import guarded
from otel_dltrace.record.tracer import live

MAX_CALLS = 10_000
"""Module calls after which a search without result ends: a global hook costs 1.4 us for each."""
MAX_TRIES = 2
MAX_RETURNS = 8
"""How often a search that something compiled has ended is taken up again: where it was on, graphs are compiled anew."""


class Roots:
    """The modules whose forward is the forward of a step.

    A hook on one module costs nothing measurable, a global one is called for every submodule. So a
    global hook looks for the outermost module that holds what is trained, is removed when that is
    found, and comes back when an optimizer is made for, or steps, parameters which no known root
    holds (a GAN's other half, the next of several models).

    Attributes:
        forward: Of the one that is running, or ran last.
    """

    def __init__(self) -> None:
        self.forward = Forward()
        self._module: Any = None
        self._search: Any = None
        self._restores: weakref.WeakKeyDictionary[Any, list[Undo]] = weakref.WeakKeyDictionary()
        self._forget()

    def _forget(self) -> None:
        self._calls = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._missing: set[int] = set()
        self._is_module_compiled, self._returns = False, 0
        self._made: ByIdentity[set[int]] = ByIdentity()
        """What was missing of an optimizer when it was made."""
        self._checked: ByIdentity[tuple[int, int]] = ByIdentity()
        self._settled: tuple[Callable[[], Any], int] = (none_yet, 0)
        """The optimizer that stepped last, and so many parameters, of which all are held by known roots."""
        self.forward.forget()

    def attach(self, module: ModuleType) -> Undo:
        """Begin to look for roots, given ``torch.nn.modules.module``; return how to undo all."""
        self._module = module
        self._look()
        return self._detach

    @property
    def training(self) -> bool:
        """Whether the root that ran last is in training mode."""
        root = self.forward.latest()
        if root is None and self.forward.latest is not none_yet:
            self.forward.latest = none_yet  # it is gone: here comes another model
            self._look()
        return bool(getattr(root, "training", True))

    def stop_looking(self) -> None:
        """End the search. A graph that is compiled meanwhile would be so again: its guards know of the hook."""
        if self._search is not None:
            self._search.remove()
            self._search = None

    def meet_compiled(self, module: Any) -> None:
        """Take a compiled module that is about to be called for a root if it can be one.

        Torch warns the user where it meets a global hook in such a call: the search must be over by then.
        """
        if live.tracer is not None and self.forward.here.running is None:
            self._adopt(module)
        self.stop_looking()

    @guarded
    def compiled_called(self) -> None:
        """Know that a compiled module was called; of compiled functions nothing is seen."""
        self._is_module_compiled = True
        self.look_on()

    def look_on(self) -> None:
        """Go on looking, behind the call of a compiled module for example, if that was not all."""
        if self._missing and self._known and live.tracer is not None and self._returns < MAX_RETURNS:
            self._returns += 1
            self._look(again=True)

    def compiled_in_place(self, module: Any) -> None:
        """Time the calls of *module*, whose ``compile()`` has put its hooks inside the graph."""
        compiled, after = module._compiled_call_impl, After(self.forward)

        def call(*args: Any, **kwargs: Any) -> Any:
            if compiling():  # another graph takes it in
                return compiled(*args, **kwargs)
            self._enter_compiled(module, args)
            try:
                return compiled(*args, **kwargs)
            finally:
                after(module)
                self.compiled_called()

        call.__wrapped__ = compiled  # type: ignore[attr-defined]
        module._compiled_call_impl = call
        self._restores.setdefault(module, []).append(partial(_restore, weakref.ref(module), weakref.ref(call)))

    @guarded
    def _enter_compiled(self, module: Any, args: Any) -> None:
        if live.tracer is not None and self.forward.here.running is None:
            self._adopt(module, hooks=False)
            if module in self._known:
                Before(self.forward)(module, args)
        self.stop_looking()

    def made(self, optimizer: Any) -> None:
        """Look for who holds the parameters of a new *optimizer*: by its first step a forward would have gone by."""
        _optimizers.made(optimizer)
        missing = self._unheld(optimizer)
        if missing:
            if self._search is None:
                self._missing.clear()  # what was given up, and may be gone
            self._returns = 0
            self._made[optimizer] = missing
            self._missing |= missing
            self._look()

    def stepped(self, optimizer: Any) -> None:
        """Look again if *optimizer* steps parameters that no known root holds; give up after some tries."""
        groups = optimizer.param_groups
        count = len(groups[0]["params"]) if len(groups) == 1 else sum(len(group["params"]) for group in groups)
        if self._settled[1] == count and self._settled[0]() is optimizer:
            return  # the usual case, without a weak dictionary
        _optimizers.stepped(optimizer)
        known_count, tries = self._checked.get(optimizer, (0, 0))
        if known_count != count:
            tries = 0
        elif tries == 0:
            self._settled = weakref.ref(optimizer), count
            return
        missing = self._unheld(optimizer)
        if tries < MAX_TRIES and missing:
            self._checked[optimizer] = (count, tries + 1)
            self._missing |= missing
            self._look()
            return
        self._checked[optimizer] = (count, 0)
        self._missing -= missing | self._made.pop(optimizer, set())  # a wrapper may have exchanged them
        if self._missing:
            if self._is_module_compiled:  # the graph of its backward has ended the search for the next one
                self.look_on()
        elif self._calls:  # else all modules run in graphs, which would be compiled again
            self.stop_looking()

    def _unheld(self, optimizer: Any) -> set[int]:
        stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        # Asked each time: wrappers such as FSDP exchange a root's parameters, and ids come again.
        return stepped - {id(parameter) for root in list(self._known) for parameter in root.parameters()}

    def _look(self, *, again: bool = False) -> None:
        if self._search is None and self._module is not None and not (again and self._calls > MAX_CALLS):
            self._calls = self._calls if again else 0
            self._search = self._module.register_module_forward_pre_hook(Search(self.meet))

    @guarded
    def meet(self, module: Any, args: Any) -> None:
        """Make *module*, whose forward begins, a root if it is what is looked for."""
        is_outside = self.forward.here.running is None
        if is_outside and next(module.parameters(), None) is None:
            return  # a loss, or what stands for a compiled graph
        self._calls += 1
        is_outermost = is_outside and live.tracer is not None
        if self._calls > MAX_CALLS:
            self.stop_looking()
        elif is_outermost and self._is_missed(module) and self._adopt(module):
            Before(self.forward)(module, args)  # its own hook comes too late for this call

    def _is_missed(self, module: Any) -> bool:
        """Return whether *module* holds what is looked for; the first root holds anything.

        A wrapper may have exchanged the parameters since the optimizer was made.
        """
        if not (self._missing and self._known):
            return True
        return any(id(parameter) in self._missing for parameter in module.parameters())

    def _adopt(self, module: Any, *, hooks: bool = True) -> bool:
        """Make *module* a root if it holds what can be trained; return whether it has become one."""
        parameters = list(module.parameters())
        if module in self._known or not any(parameter.requires_grad for parameter in parameters):
            return False  # a loss, a transform, a frozen teacher
        self._known.add(module)
        self._missing.difference_update(map(id, parameters))
        if not self._missing:
            self.stop_looking()
        tracer = live.tracer
        if tracer is not None and tracer.steps.device is not None:
            tracer.steps.device.meet({parameter.device.index for parameter in parameters if parameter.is_cuda})
        torch = sys.modules["torch"]
        self.forward.is_grad_enabled, self.forward.graph_task = torch.is_grad_enabled, torch._C._current_graph_task_id
        if hooks:
            self._time(module)
            if isinstance(module, torch.nn.parallel.DistributedDataParallel) and module.module not in self._known:
                self._known.add(module.module)  # evaluations call what it wraps, which needs no other rank
                if module.module._compiled_call_impl is None:  # else they would be in its graph
                    self._time(module.module)
        return True

    def _time(self, module: Any) -> None:
        if not isinstance(module, sys.modules["torch"].jit.ScriptModule):  # that takes none
            number_behind(module)
            # FSDP's hook, which gathers the root's parameters, is part of the call.
            before = module.register_forward_pre_hook(Before(self.forward), prepend=True)
            after = module.register_forward_hook(After(self.forward), always_call=True)
            self._restores.setdefault(module, []).extend((before.remove, after.remove))

    def _detach(self) -> None:
        self.stop_looking()
        for undos in list(self._restores.values()):
            for undo in reversed(undos):
                undo()
        self._restores.clear()
        self._module = None
        self._forget()


def _restore(module: Callable[[], Any], call: Callable[[], Any]) -> None:
    """Give a compiled module its own call back; neither of the two is kept alive for that."""
    there, ours = module(), call()
    if there is not None and there._compiled_call_impl is ours:
        there._compiled_call_impl = ours.__wrapped__

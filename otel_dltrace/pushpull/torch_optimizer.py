"""An optimizer that averages gradients over all processes, each as soon as the backward pass has it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from otel_dltrace.pushpull import torch_ops as bps
from otel_dltrace.pushpull.compression import Compressor
from otel_dltrace.pushpull.errors import PushPullError, shown

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


@dataclass(slots=True)
class _Gradients:
    """The parameters of an optimizer, and which of their gradients are under way."""

    given: dict[Tensor, str]
    compression: Compressor | None
    passes: int
    asynchronous: bool
    alone: bool
    names: dict[Tensor, str] = field(default_factory=dict)
    handles: dict[Tensor, int] = field(default_factory=dict)
    left: dict[Tensor, int] = field(default_factory=dict)
    """How many more backward passes add to a gradient before it is pushed."""
    synchronizes: bool = True
    synchronized: bool = False

    def take(self, groups: Iterable[dict[str, Any]]) -> None:
        """Average from now on whatever of *groups* has gradients: also what was added, or frozen, before."""
        candidates = () if self.alone else (one for group in groups for one in group["params"])
        new = dict.fromkeys(one for one in candidates if one.requires_grad and one not in self.names)
        if not new:
            return  # as in nearly each step
        priorities: dict[str, int] = {}
        for parameter, name in self._named(new).items():
            priorities[name] = -len(self.names)  # those that the next forward pass needs first go first
            self.names[parameter] = name
            parameter.register_post_accumulate_grad_hook(self.ready)  # type: ignore[no-untyped-call]  # torch's
        for name in sorted(priorities):  # keys are numbered as by BytePS's plugin
            bps.declare(f"Gradient.{name}", priorities[name], self.compression)
        for name in sorted(priorities):
            bps.declare(f"Parameter.{name}")

    def _named(self, parameters: Iterable[Tensor]) -> dict[Tensor, str]:
        """Return *parameters* with their names, all or none: whoever is refused may try again with others.

        Those without a name have a number, of its own over all optimizers, as in a GAN.
        """
        named, taken = dict[Tensor, str](), set(bps.parameters())
        for parameter in parameters:
            _check_free(parameter)
            name = self.given.get(parameter, f"push_pull.noname.{len(taken)}")
            if self.asynchronous and name in taken:  # the servers would give it the other one's value
                raise PushPullError(
                    f"{shown(name)} is a parameter of another DistributedOptimizer; with BYTEPS_ENABLE_ASYNC give "
                    "named_parameters names of their own"
                )
            taken.add(name)
            named[parameter] = name
        bps.parameters().update(taken)
        return named

    def ready(self, parameter: Tensor) -> None:
        """Push the gradient of *parameter*, if this was the last pass that adds to it."""
        left = self.left.get(parameter, self.passes) - 1
        if left < 0 or parameter in self.handles:
            raise PushPullError(
                f"the gradient of {self.names[parameter]!r} was computed more than backward_passes_per_step="
                f"{self.passes} times before step()"
            )
        self.left[parameter] = left
        if not left and not self.asynchronous:
            self.push(parameter)

    def push(self, parameter: Tensor) -> None:
        """Begin to average the gradient of *parameter*; one that was not used counts as zero."""
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        self.synchronized = False  # the step after the last `synchronize` may have been left out
        self.handles[parameter] = bps.push_pull_async_inplace(parameter.grad, name=f"Gradient.{self.names[parameter]}")

    def wait(self) -> None:
        """Return when all gradients are averaged; asynchronously each process keeps its own."""
        # In one order everywhere: which ones the backward pass did not reach may differ between the ranks.
        for parameter in () if self.asynchronous else self.names:
            if parameter not in self.handles and parameter.requires_grad:
                self.push(parameter)
        handles, self.handles = self.handles, {}
        self.left.clear()
        for handle in handles.values():
            bps.synchronize(handle)

    def averaged(self, closure: Callable[[], float]) -> Callable[[], float]:
        """Return *closure* with the gradients that it computes averaged before the step takes them."""

        def closed() -> float:
            loss = closure()
            if self.left:  # else it computed none
                self.wait()
            return loss

        return closed


class _Distributed:
    """What a `DistributedOptimizer` adds to the class of its optimizer."""

    _pushpull: _Gradients

    def synchronize(self) -> None:
        """Wait until all gradients are averaged, to clip them for example; `step` then does not wait again.

        Asynchronously they stay this process's own, and there is nothing to wait for.
        """
        self._begin().wait()
        self._pushpull.synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Have `step` within this context take the gradients as they are, after `synchronize`."""
        self._pushpull.synchronizes = False
        try:
            yield
        finally:
            self._pushpull.synchronizes = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Have ``backward`` add to the gradients *passes* times before each step that is still to come."""
        self._pushpull.passes = passes

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Wait for the averaged gradients and make the step; asynchronously: make it, and exchange its effect."""
        state = self._begin()
        has_gradients = closure is None or bool(state.left)
        if closure is not None:
            closure = state.averaged(closure)
        if state.asynchronous:
            return self._step_asynchronously(closure)
        if has_gradients and state.synchronizes and not state.synchronized:
            state.wait()
        state.synchronized = False
        return super().step(closure)  # type: ignore[misc]  # the optimizer's class comes next

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Clear the gradients, unless they are on their way."""
        if self._pushpull.handles:
            raise PushPullError("zero_grad() while gradients are on their way; call step() or synchronize() first")
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]

    def _begin(self) -> _Gradients:
        self._pushpull.take(self.param_groups)  # type: ignore[attr-defined]  # the optimizer's
        return self._pushpull

    def _step_asynchronously(self, closure: Callable[[], float] | None) -> Any:
        names = self._pushpull.names
        before = {parameter: parameter.detach().clone() for parameter in names}
        loss = super().step(closure)  # type: ignore[misc]
        self._pushpull.left.clear()
        handles = []
        for parameter, old in before.items():
            values = parameter.detach()
            # Apart from the parameter, which is still one if the servers cannot be asked any more.
            handles.append(bps.start(values - old, values, False, f"AsyncParam.{names[parameter]}", initial=old))
        for handle in handles:
            bps.synchronize(handle)
        return loss


# What torch asks before it has a class's step run an optimizer's hooks, as when a state is loaded: the one below does.
_Distributed.step.hooked = True  # type: ignore[attr-defined]


def DistributedOptimizer(  # noqa: N802 - BytePS's name
    optimizer: Kind,
    named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    compression: Compressor | None = None,
    backward_passes_per_step: int = 1,
) -> Kind:
    """Have *optimizer* step on gradients that are averaged over all processes, and return it.

    With BYTEPS_ENABLE_ASYNC each process steps on its own gradients, and the servers add up what that changes.

    Args:
        optimizer: Any optimizer of torch; a learning rate scheduler is made after this.
        named_parameters: The model's; without them parameters are numbered, over all optimizers of the process.
        compression: One of `Compression`; with BYTEPS_ENABLE_ASYNC nothing is compressed, as in BytePS.
        backward_passes_per_step: How often ``backward`` adds to the gradients before a step.

    Raises:
        PushPullError: Names are doubled, or *optimizer* cannot be extended any more.
    """
    if isinstance(optimizer, _Distributed):
        raise PushPullError("the optimizer is already a DistributedOptimizer; use it as it is")
    if "step" in vars(optimizer):
        raise PushPullError("the optimizer's step is already wrapped; create the scheduler after DistributedOptimizer")
    engine = bps.engine()
    alone = engine.layout.size == 1 and not engine.layout.distributed
    given = _names(named_parameters or ())
    gradients = _Gradients(given, compression, backward_passes_per_step, engine.options.asynchronous, alone)
    gradients.take(optimizer.param_groups)
    kind = type(optimizer)
    optimizer.__class__ = type(kind.__name__, (_Distributed, kind), {"_pushpull": gradients})
    return optimizer


def _check_free(parameter: Tensor) -> None:
    hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
    if any(isinstance(getattr(hook, "__self__", None), _Gradients) for hook in hooks.values()):
        raise PushPullError(
            f"a parameter of shape {tuple(parameter.shape)} is in two DistributedOptimizers, and only one can average "
            "its gradient: give it to one of them, or, without BYTEPS_ENABLE_ASYNC, leave the second optimizer as it "
            "is and call synchronize() of the first before its step()"
        )


def _names(named: Iterable[tuple[str, Tensor]]) -> dict[Tensor, str]:
    given = {parameter: name for name, parameter in named}
    doubled = [name for name, number in Counter(given.values()).items() if number > 1]
    if doubled:
        raise PushPullError(f"{', '.join(doubled)}: more than one parameter has this name")
    return given

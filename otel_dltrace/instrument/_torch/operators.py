"""The functional collectives: operators of PyTorch in C++, which Python calls through an object each.

What calls them from Python - the functions of `_functional_collectives`, their backward, DTensor,
the code of a compiled graph - calls the attribute ``_op`` of the operator, or of one of its
overloads. That attribute is replaced, not the operator: what traces a graph knows operators by
identity and never looks inside, so nothing breaks a graph.
"""

import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from otel_dltrace.instrument._sites import Args, Attachment, Site, Undo, replace, wrap
from otel_dltrace.instrument._torch.calls import FUNCTIONAL, tensors_in
from otel_dltrace.instrument._torch.groups import COUNT_NAMED

_NAMESPACE = "_c10d_functional"


class Traced:
    """Stands for the *original* in an operator, whose hash is that of its ``_op``."""

    def __init__(self, original: Any, traced: Callable[..., Any], tracing: Callable[[], bool]) -> None:
        self.original, self._traced, self._tracing = original, traced, tracing

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the operator; untraced where a graph is being made."""
        if self._tracing() or _is_stand_in(args):
            return self.original(*args, **kwargs)
        return self._traced(*args, **kwargs)

    def __hash__(self) -> int:
        """Return the hash of the original: tables are keyed by operators."""
        return hash(self.original)

    def __eq__(self, other: object) -> bool:
        """Return whether *other* is this one."""
        return self is other

    def __getattr__(self, name: str) -> Any:
        """Return what the original has by this name."""
        return getattr(self.original, name)


def _is_stand_in(args: Args) -> bool:
    """Return whether the arguments are no real tensors, since a graph is being made of them."""
    tensor = next(tensors_in(list(args)), None)
    return tensor is None or tensor.device.type == "meta" or isinstance(tensor, _stand_ins())


def _stand_ins() -> tuple[type, ...]:
    """Return the classes of tensors that hold no numbers."""
    kinds = (
        ("torch._subclasses.fake_tensor", "FakeTensor"),
        ("torch._subclasses.functional_tensor", "FunctionalTensor"),
    )
    return tuple(getattr(sys.modules[module], name) for module, name in kinds if module in sys.modules)


def operators(sites: Iterable[Site]) -> Attachment:
    """Return what puts the *sites* in place."""
    named = {site.name.rpartition(".")[2]: site for site in sites}

    def attach(module: ModuleType) -> Undo:
        namespace = getattr(module.torch.ops, _NAMESPACE)
        undos = []
        for name, site in named.items():
            packet = getattr(namespace, name, None)
            for holder in _holders(packet):
                original = vars(holder)["_op"]
                traced = wrap(site, wrap(COUNT_NAMED, original) if name in _MESSAGES else original)
                undos.append(replace(holder, "_op", original, Traced(original, traced, module._are_we_tracing)))

        def detach() -> None:
            for undo in reversed(undos):
                undo()

        return detach

    return Attachment(FUNCTIONAL, attach)


_MESSAGES = ("isend", "irecv", "batch_p2p_ops")


def _holders(packet: Any) -> list[Any]:
    """Return the operator and its overloads, which each call C++ on their own; none of one that is not there."""
    if packet is None or "_op" not in vars(packet):
        return []
    return [packet, *(getattr(packet, name) for name in packet.overloads())]

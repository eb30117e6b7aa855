"""Which functions of Horovod's PyTorch plugin start operations, and where their arguments are."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

from otel_dltrace.instrument._sites import Args, Kwargs

OPS = "horovod.torch.mpi_ops"
SETS = "horovod.common.process_sets"


@dataclass(frozen=True)
class Call:
    """A private function that all calls of an operation go through; it returns a handle.

    Attributes:
        function: Its name in `OPS`.
        operation: What its spans are named.
        prefix: What Horovod puts before the tensor's name.
        parameters: Its parameters up to the last one that is read, in order.
    """

    function: str
    operation: str
    prefix: str
    parameters: str

    @cached_property
    def names(self) -> list[str]:
        """The parameters."""
        return self.parameters.split()

    @cached_property
    def get(self) -> Callable[[Args], tuple[Any, Any, Any]]:
        """What returns tensor (or tensors), name and process set of arguments given by position."""
        return itemgetter(0, self.names.index("name"), self.names.index("process_set"))

    @cached_property
    def root(self) -> int:
        """The place of the root rank, -1 if it has none."""
        return self.names.index("root_rank") if "root_rank" in self.names else -1

    @cached_property
    def op(self) -> int:
        """The place of how values are reduced, -1 if they are not."""
        return self.names.index("op") if "op" in self.names else -1

    @property
    def is_grouped(self) -> bool:
        """Whether it takes several tensors at once."""
        return self.names[0] == "tensors"

    def positional(self, args: Args, kwargs: Kwargs) -> Args:
        """Return the arguments of a call by position; Horovod's own give them so, as a rule."""
        return (*args, *(kwargs.get(name) for name in self.names[len(args) :])) if kwargs else args


CALLS = (
    Call("_allreduce_async", "allreduce", "allreduce", "tensor output name op prescale postscale process_set"),
    Call(
        "_grouped_allreduce_async",
        "allreduce",
        "grouped_allreduce",
        "tensors outputs name op prescale postscale process_set",
    ),
    Call("_allgather_async", "allgather", "allgather", "tensor output name process_set"),
    Call("_grouped_allgather_async", "allgather", "grouped_allgather", "tensors outputs name process_set"),
    Call("_broadcast_async", "broadcast", "broadcast", "tensor output root_rank name process_set"),
    Call("_alltoall_async", "alltoall", "alltoall", "tensor splits output received name process_set"),
    Call("_reducescatter_async", "reducescatter", "reducescatter", "tensor output name op process_set"),
    Call(
        "_grouped_reducescatter_async", "reducescatter", "grouped_reducescatter", "tensors outputs name op process_set"
    ),
)
BLOCKING = (
    "allreduce",
    "allreduce_",
    "grouped_allreduce",
    "grouped_allreduce_",
    "allgather",
    "grouped_allgather",
    "broadcast",
    "broadcast_",
    "alltoall",
    "reducescatter",
    "grouped_reducescatter",
)
"""The calls that return when their operation is done."""

"""The calls of torch.distributed that are traced, as a table: one row for each function."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from otel_dltrace.instrument._sites import Args, Kwargs
from otel_dltrace.instrument._torch.groups import C10D
from otel_dltrace.model.semconv import COLLECTIVE, P2P

FUNCTIONAL = "torch.distributed._functional_collectives"
_OPS = "torch.ops._c10d_functional."


@dataclass(frozen=True)
class Call:
    """A collective or a point-to-point call: the row of a table.

    Attributes:
        name: The function's dotted name in its module.
        parameters: Its parameters, in order.
        span: The span's name; by default the function's.
        module: The module.
        kind: Collective or point to point.
        tensors: The parameter whose bytes count: a tensor, or lists of them; "" if none.
        each: Every rank contributes that many bytes: the operation moves them times the group's size.
        root: The parameters that name the root: its rank in the world, its rank in the group.
        options: The parameter whose ``rootRank`` (or which itself) is the root's rank in the group.
        group: The parameter that is the process group, or its name.
        peer: The parameters that name the other side: its rank in the world, its rank in the group.
        sends: For point to point: this side sends.
        parts: It is made of other calls, whose bytes it sums; it has the number of the last one.
        coalesces: In a coalescing block torch only notes it down, and the block calls another row.
        since: The first version of PyTorch that has it; "" for all that we support.
        until: The first version that has it no more; "" if there is none yet.
    """

    name: str
    parameters: str
    span: str = ""
    module: str = C10D
    kind: str = COLLECTIVE
    tensors: str = ""
    each: bool = False
    root: tuple[str, str] | None = None
    options: str = ""
    group: str = "group"
    peer: tuple[str, str] = ("", "")
    sends: bool = False
    parts: bool = False
    coalesces: bool = False
    since: str = ""
    until: str = ""
    positions: dict[str, int] = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Number the parameters."""
        object.__setattr__(self, "span", self.span or self.name)
        object.__setattr__(self, "positions", {name: i for i, name in enumerate(self.parameters.split())})

    @property
    def is_method(self) -> bool:
        """Whether it is a method of a process group."""
        return self.name.startswith("ProcessGroup.")

    @property
    def is_operator(self) -> bool:
        """Whether it is an operator, whose result is waited for by itself."""
        return self.module == FUNCTIONAL

    def argument(self, name: str, args: Args, kwargs: Kwargs) -> Any:
        """Return the argument for parameter *name* of a call, None if it is not given."""
        position = self.positions.get(name, -1)
        return args[position] if 0 <= position < len(args) else kwargs.get(name)

    def size(self, value: Any, ranks: int) -> int:
        """Return the bytes that the call moves in a group of *ranks*; *value* is its argument for *tensors*."""
        try:
            size: int = value.nbytes
        except (AttributeError, RuntimeError):  # a list, or a sparse one
            size = sum(map(bytes_of, tensors_in(value)))
        return size * ranks if self.each else size


def bytes_of(tensor: Any) -> int:
    """Return the bytes of *tensor*; of a sparse one those of its indices and values."""
    if getattr(tensor, "is_sparse", False):
        return int(tensor._indices().nbytes + tensor._values().nbytes)
    return int(tensor.nbytes)


def tensors_in(value: Any) -> Iterator[Any]:
    """Yield the tensors in *value*: a tensor, or lists of them; what is neither is for the call to refuse."""
    if is_tensor(value):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def is_tensor(value: Any) -> bool:
    """Return whether *value* is a tensor; a sparse one refuses to say its bytes, so its class is asked."""
    return hasattr(type(value), "nbytes")


_SRC, _DST = ("src", "group_src"), ("dst", "group_dst")
FUNCTIONS = (
    Call("all_reduce", "tensor op group async_op", tensors="tensor", coalesces=True),
    Call("all_reduce_coalesced", "tensors op group async_op", tensors="tensors"),
    Call("reduce", "tensor dst op group async_op group_dst", tensors="tensor", root=_DST),
    Call("broadcast", "tensor src group async_op group_src", tensors="tensor", root=_SRC),
    Call("barrier", "group async_op device_ids timeout"),
    Call("monitored_barrier", "group timeout wait_all_ranks"),
    Call("all_gather", "tensor_list tensor group async_op", tensors="tensor", each=True),
    Call(
        "all_gather_single",
        "output_tensor input_tensor group async_op",
        tensors="output_tensor",
        coalesces=True,
        since="2.13",
    ),
    Call(
        "all_gather_into_tensor", "output_tensor input_tensor group async_op", tensors="output_tensor", coalesces=True
    ),
    Call(
        "_all_gather_base",
        "output_tensor input_tensor group async_op",
        span="all_gather_into_tensor",
        tensors="output_tensor",
        coalesces=True,
    ),
    Call(
        "all_gather_coalesced",
        "output_tensor_lists input_tensor_list group async_op",
        tensors="input_tensor_list",
        each=True,
    ),
    Call("gather", "tensor gather_list dst group async_op group_dst", tensors="tensor", each=True, root=_DST),
    *(
        Call(
            name,
            "tensor gather_tensor dst group async_op group_dst",
            span="gather_single",
            tensors="tensor",
            each=True,
            root=_DST,
            since="2.14",
        )
        for name in ("gather_single", "gather_into_tensor")
    ),
    Call("scatter", "tensor scatter_list src group async_op group_src", tensors="tensor", each=True, root=_SRC),
    Call("reduce_scatter", "output input_list op group async_op", tensors="input_list"),
    Call("reduce_scatter_single", "output input op group async_op", tensors="input", coalesces=True, since="2.13"),
    Call("reduce_scatter_tensor", "output input op group async_op", tensors="input", coalesces=True),
    Call(
        "_reduce_scatter_base",
        "output input op group async_op",
        span="reduce_scatter_tensor",
        tensors="input",
        coalesces=True,
    ),
    Call("all_to_all", "output_tensor_list input_tensor_list group async_op", tensors="input_tensor_list"),
    Call(
        "all_to_all_single",
        "output input output_split_sizes input_split_sizes group async_op",
        tensors="input",
    ),
    Call("all_gather_object", "object_list obj group", parts=True),
    Call("gather_object", "obj object_gather_list dst group group_dst", root=_DST, parts=True),
    Call("broadcast_object_list", "object_list src group device group_src", root=_SRC, parts=True),
    Call(
        "scatter_object_list",
        "scatter_object_output_list scatter_object_input_list src group group_src",
        root=_SRC,
        parts=True,
    ),
    Call("send", "tensor dst group tag group_dst", kind=P2P, tensors="tensor", peer=_DST, sends=True),
    Call("recv", "tensor src group tag group_src", kind=P2P, tensors="tensor", peer=_SRC),
    Call("send_object_list", "object_list dst group device group_dst", kind=P2P, peer=_DST, sends=True, parts=True),
    Call("recv_object_list", "object_list src group device group_src", kind=P2P, peer=_SRC, parts=True),
    Call(
        "_broadcast_coalesced",
        "process_group tensors buffer_size src",
        span="broadcast_coalesced",
        module="torch.distributed",
        tensors="tensors",
        root=("", "src"),
        group="process_group",
    ),
)
"""The functions that a program calls, with or without ``async_op``."""


def _method(name: str, parameters: str, span: str, tensors: str = "", **more: Any) -> Call:
    return Call(f"ProcessGroup.{name}", f"self {parameters}", span=span, tensors=tensors, group="self", **more)


METHODS = (
    _method("allreduce", "tensors opts", "all_reduce", "tensors"),
    _method("allreduce_coalesced", "tensors opts", "all_reduce_coalesced", "tensors"),
    _method("reduce", "tensors opts", "reduce", "tensors", options="opts"),
    _method("broadcast", "tensors opts", "broadcast", "tensors", options="opts"),
    _method("barrier", "opts", "barrier"),
    _method("monitored_barrier", "timeout wait_all_ranks", "monitored_barrier"),
    _method("allgather", "output_tensors input_tensors opts", "all_gather", "input_tensors", each=True),
    _method("all_gather_single", "output input opts", "all_gather_single", "output", since="2.13"),
    _method("_allgather_base", "output input opts", "all_gather_into_tensor", "output"),
    _method("allgather_coalesced", "output_lists input_list opts", "all_gather_coalesced", "input_list", each=True),
    _method(
        "all_gather_single_coalesced",
        "outputs inputs opts",
        "all_gather_single_coalesced",
        "inputs",
        each=True,
        since="2.13",
    ),
    _method(
        "allgather_into_tensor_coalesced",
        "outputs inputs opts",
        "all_gather_into_tensor_coalesced",
        "inputs",
        each=True,
    ),
    _method("gather", "output_tensors input_tensors opts", "gather", "input_tensors", each=True, options="opts"),
    *(
        _method(name, "output input opts", "gather_single", "input", each=True, options="opts", since="2.14")
        for name in ("gather_single", "gather_into_tensor")
    ),
    _method("scatter", "output_tensors input_tensors opts", "scatter", "output_tensors", each=True, options="opts"),
    _method("reduce_scatter", "output_tensors input_tensors opts", "reduce_scatter", "input_tensors"),
    _method(
        "reduce_scatter_single", "outputTensor inputTensor opts", "reduce_scatter_single", "inputTensor", since="2.13"
    ),
    _method("_reduce_scatter_base", "outputTensor inputTensor opts", "reduce_scatter_tensor", "inputTensor"),
    _method(
        "reduce_scatter_single_coalesced",
        "outputs inputs opts",
        "reduce_scatter_single_coalesced",
        "inputs",
        since="2.13",
    ),
    _method("reduce_scatter_tensor_coalesced", "outputs inputs opts", "reduce_scatter_tensor_coalesced", "inputs"),
    _method("alltoall", "output_tensors input_tensors opts", "all_to_all", "input_tensors"),
    _method(
        "all_to_all_single",
        "output input output_split_sizes input_split_sizes opts",
        "all_to_all_single",
        "input",
        since="2.13",
    ),
    _method("alltoall_base", "output input output_split_sizes input_split_sizes opts", "all_to_all_single", "input"),
    _method("send", "tensors dstRank tag", "isend", "tensors", kind=P2P, peer=("", "dstRank"), sends=True),
    _method("recv", "tensors srcRank tag", "irecv", "tensors", kind=P2P, peer=("", "srcRank")),
    _method("recv_anysource", "tensors tag", "irecv", "tensors", kind=P2P),
)
"""What the functions call: met alone where a program holds a process group, or a function from before us.

``isend`` and ``irecv`` are seen here alone, for torch compares the functions by identity.
"""


def _operator(name: str, parameters: str, span: str = "", tensors: str = "input", **more: Any) -> Call:
    return Call(
        _OPS + name,
        f"{parameters} group_name",
        span=span or name.removesuffix("_"),
        module=FUNCTIONAL,
        tensors=tensors,
        group="group_name",
        **more,
    )


OPERATORS = (
    _operator("all_reduce", "input reduce_op"),
    _operator("all_reduce_", "input reduce_op"),
    _operator("all_reduce_coalesced", "inputs reduce_op", tensors="inputs"),
    _operator("all_reduce_coalesced_", "inputs reduce_op", tensors="inputs"),
    _operator("broadcast", "input src", root=("", "src")),
    _operator("broadcast_", "input src", root=("", "src")),
    _operator("all_gather_into_tensor", "input group_size", each=True),
    _operator("all_gather_into_tensor_out", "input group_size", span="all_gather_into_tensor", each=True),
    _operator("all_gather_into_tensor_coalesced", "inputs group_size", tensors="inputs", each=True),
    _operator("reduce_scatter_tensor", "input reduce_op group_size"),
    _operator("reduce_scatter_tensor_out", "input reduce_op group_size", span="reduce_scatter_tensor"),
    _operator("reduce_scatter_tensor_coalesced", "inputs reduce_op group_size", tensors="inputs"),
    _operator("all_to_all_single", "input output_split_sizes input_split_sizes"),
    _operator("isend", "tensor dst tag", tensors="tensor", kind=P2P, peer=("", "dst"), sends=True, since="2.13"),
    _operator("irecv", "tensor src tag", tensors="tensor", kind=P2P, peer=("", "src"), since="2.13"),
)
"""The functional collectives: operators in C++, called by functions in Python and by compiled graphs."""

CALLS = FUNCTIONS + METHODS + OPERATORS

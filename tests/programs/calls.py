"""Calls every row of the table of calls on two ranks, and says what PyTorch's Flight Recorder saw of each."""

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.distributed_c10d as c10d
import torch.distributed.nn.functional as differentiable

warnings.simplefilter("ignore")  # half of the names are deprecated
dist.init_process_group("gloo")
rank = dist.get_rank()
other = 1 - rank
world = dist.group.WORLD


def entries(start: int) -> list[dict[str, Any]]:
    """Return what the Flight Recorder has noted from its entry *start* on."""
    return json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False)).get("entries", [])[start:]


def numbers(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor that differs by rank."""
    return (torch.arange(1, 1 + int(torch.tensor(shape).prod())).reshape(shape) * (rank + 1)).to(kind)


def lists(count: int, *shape: int) -> list[torch.Tensor]:
    """Return tensors for each of *count* ranks."""
    return [numbers(*shape) + i for i in range(count)]


def pair(first: int, second: int) -> list[torch.Tensor]:
    """Return two tensors of so many numbers."""
    return [numbers(first), numbers(second)]


def on(root: int, value: Any) -> Any:
    """Return *value* on the *root* alone."""
    return value if rank == root else None


def options(kind: str, **fields: Any) -> Any:
    """Return C++ options of *kind*."""
    made = getattr(c10d, f"{kind}Options")()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def coalesced(call: Callable[[], Any], *, wait: bool) -> None:
    """Call twice in a coalescing block."""
    with c10d._coalescing_manager(async_ops=wait) as manager:
        call()
        call()
    if wait:
        manager.wait()


FUNCTIONS: dict[str, Callable[..., tuple[list[Any], dict[str, Any]]]] = {
    "all_reduce": lambda: ([numbers(2, 3)], {}),
    "all_reduce_coalesced": lambda: ([pair(4, 2)], {}),
    "reduce": lambda: ([numbers(5)], {"dst": 1}),
    "broadcast": lambda: ([numbers(7, kind=torch.int64)], {"src": 1}),
    "barrier": lambda: ([], {}),
    "monitored_barrier": lambda: ([], {}),
    "all_gather": lambda: ([lists(2, 3), numbers(3)], {}),
    "all_gather_single": lambda: ([numbers(6), numbers(3)], {}),
    "all_gather_into_tensor": lambda: ([numbers(6), numbers(3)], {}),
    "_all_gather_base": lambda: ([numbers(6), numbers(3)], {}),
    "all_gather_coalesced": lambda: ([[pair(4, 2), pair(4, 2)], pair(4, 2)], {}),
    "gather": lambda: ([numbers(4), on(1, lists(2, 4))], {"dst": 1}),
    "scatter": lambda: ([numbers(4), on(0, lists(2, 4))], {"group_src": 0}),
    "reduce_scatter": lambda: ([numbers(4), lists(2, 4)], {}),
    "reduce_scatter_single": lambda: ([numbers(4), numbers(8)], {}),
    "reduce_scatter_tensor": lambda: ([numbers(4), numbers(8)], {}),
    "_reduce_scatter_base": lambda: ([numbers(4), numbers(8)], {}),
    "all_to_all": lambda: ([lists(2, 3), lists(2, 3)], {}),
    "all_to_all_single": lambda: ([numbers(6), numbers(6)], {}),
    "all_gather_object": lambda: ([[None, None], {"rank": rank}], {}),
    "gather_object": lambda: ([{"rank": rank}, on(0, [None, None])], {}),
    "broadcast_object_list": lambda: ([[rank, "x" * 50]], {"src": 1}),
    "scatter_object_list": lambda: ([[None], on(0, ["a", "b" * 9])], {}),
    "_broadcast_coalesced": lambda: ([world, pair(4, 2), 1 << 20, 0], {}),
}
METHODS: dict[str, Callable[[], Any]] = {
    "allreduce": lambda: world.allreduce([numbers(3)]),
    "allreduce_coalesced": lambda: world.allreduce_coalesced(pair(3, 2)),
    "reduce": lambda: world.reduce([numbers(3)], options("Reduce", rootRank=1)),
    "broadcast": lambda: world.broadcast(numbers(3), 1),
    "barrier": world.barrier,
    "monitored_barrier": world.monitored_barrier,
    "allgather": lambda: world.allgather([lists(2, 3)], [numbers(3)]),
    "all_gather_single": lambda: world.all_gather_single(numbers(6), numbers(3)),
    "_allgather_base": lambda: world._allgather_base(numbers(6), numbers(3)),
    "allgather_coalesced": lambda: world.allgather_coalesced([pair(4, 2), pair(4, 2)], pair(4, 2)),
    "all_gather_single_coalesced": lambda: world.all_gather_single_coalesced(pair(8, 4), pair(4, 2)),
    "allgather_into_tensor_coalesced": lambda: world.allgather_into_tensor_coalesced(pair(8, 4), pair(4, 2)),
    "gather": lambda: world.gather(on(1, [lists(2, 4)]) or [], [numbers(4)], options("Gather", rootRank=1)),
    "scatter": lambda: world.scatter([numbers(4)], on(1, [lists(2, 4)]) or [], options("Scatter", rootRank=1)),
    "reduce_scatter": lambda: world.reduce_scatter([numbers(4)], [lists(2, 4)]),
    "reduce_scatter_single": lambda: world.reduce_scatter_single(numbers(4), numbers(8)),
    "_reduce_scatter_base": lambda: world._reduce_scatter_base(numbers(4), numbers(8)),
    "reduce_scatter_single_coalesced": lambda: world.reduce_scatter_single_coalesced(pair(4, 2), pair(8, 4)),
    "reduce_scatter_tensor_coalesced": lambda: world.reduce_scatter_tensor_coalesced(pair(4, 2), pair(8, 4)),
    "alltoall": lambda: world.alltoall(lists(2, 3), lists(2, 3)),
    "all_to_all_single": lambda: world.all_to_all_single(numbers(6), numbers(6), [], []),
    "alltoall_base": lambda: world.alltoall_base(numbers(6), numbers(6), [], []),
}
OPERATORS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: functional.all_reduce(numbers(3), "sum", world),
    "all_reduce_": lambda: torch.ops._c10d_functional.all_reduce_(numbers(3), "sum", world.group_name),
    "all_reduce_coalesced": lambda: functional.all_reduce_coalesced(pair(3, 2), "sum", world),
    "all_reduce_coalesced_": lambda: torch.ops._c10d_functional.all_reduce_coalesced_(
        pair(3, 2), "sum", world.group_name
    ),
    "broadcast": lambda: functional.broadcast(numbers(3), 1, world),
    "broadcast_": lambda: torch.ops._c10d_functional.broadcast_.default(numbers(3), 1, world.group_name),
    "all_gather_into_tensor": lambda: functional.all_gather_single(numbers(3), 0, world),
    "all_gather_into_tensor_out": lambda: torch.ops._c10d_functional.all_gather_into_tensor_out(
        numbers(3), 2, world.group_name, out=numbers(6)
    ),
    "all_gather_into_tensor_coalesced": lambda: functional.all_gather_single_coalesced(pair(3, 2), world),
    "reduce_scatter_tensor": lambda: functional.reduce_scatter_single(numbers(8), "sum", 0, world),
    "reduce_scatter_tensor_out": lambda: torch.ops._c10d_functional.reduce_scatter_tensor_out(
        numbers(8), "sum", 2, world.group_name, out=numbers(4)
    ),
    "reduce_scatter_tensor_coalesced": lambda: functional.reduce_scatter_single_coalesced(
        pair(8, 4), "sum", [0, 0], world
    ),
    "all_to_all_single": lambda: functional.all_to_all_single(numbers(6), None, None, world),
}
DIFFERENTIABLE: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: differentiable.all_reduce(numbers(3)),
    "all_gather": lambda: differentiable.all_gather(numbers(3)),
    "broadcast": lambda: differentiable.broadcast(numbers(3), 1),
    "reduce": lambda: differentiable.reduce(numbers(3), 1),
    "gather": lambda: differentiable.gather(numbers(3), 1),
    "scatter": lambda: differentiable.scatter(lists(2, 3), 1),
    "reduce_scatter": lambda: differentiable.reduce_scatter(numbers(3), lists(2, 3)),
    "all_to_all_single": lambda: differentiable.all_to_all_single(numbers(4), numbers(4)),
}


def function(name: str, **more: Any) -> Any:
    """Call a function of torch.distributed; return what it has written to."""
    arguments, keywords = FUNCTIONS[name]()
    work = getattr(dist, name, None) or getattr(c10d, name)
    work = work(*arguments, **keywords, **more)
    if work is not None:
        work.wait()
    return arguments


def operator(name: str) -> Any:
    """Call a functional collective and wait for its result."""
    result = OPERATORS[name]()
    for tensor in result if isinstance(result, list) else [result]:
        functional.wait_tensor(getattr(tensor, "elem", tensor))
    return result


def method(name: str) -> None:
    """Call a method of the process group and wait for its work."""
    work = METHODS[name]()
    if work is not None:
        work.wait()


SYNC_ONLY = ("monitored_barrier", "_broadcast_coalesced")
ASYNC = [name for name in FUNCTIONS if name not in SYNC_ONLY and "object" not in name]
CALLS: dict[str, Callable[[], Any]] = {
    **{f"function {name}": lambda name=name: function(name) for name in FUNCTIONS},
    **{f"async {name}": lambda name=name: function(name, async_op=True) for name in ASYNC},
    **{f"method {name}": lambda name=name: method(name) for name in METHODS},
    **{f"operator {name}": lambda name=name: operator(name) for name in OPERATORS},
    **{f"differentiable {name}": DIFFERENTIABLE[name] for name in DIFFERENTIABLE},
    **{
        f"coalesced {name} {wait}": lambda name=name, wait=wait: coalesced(lambda: function(name), wait=wait)
        for name in ("all_reduce", "all_gather_single", "reduce_scatter_single", "broadcast")
        for wait in (False, True)
    },
}


def plain(value: Any) -> Any:
    """Return *value* with its tensors as lists."""
    if isinstance(value, torch.Tensor):
        return functional.wait_tensor(value).tolist() if type(value) is not torch.Tensor else value.tolist()
    if isinstance(value, dist.ProcessGroup):
        return value.group_name
    return [plain(part) for part in value] if isinstance(value, list | tuple) else str(value)


def moved(entry: dict[str, Any]) -> tuple[int, str, int]:
    """Return number, operation and bytes of an *entry*, of all ranks together where each has its own."""
    name = entry["profiling_name"].removeprefix("gloo:")
    sizes, types = (
        (entry["output_sizes"], entry["output_dtypes"])
        if name == "scatter"
        else (entry["input_sizes"], entry["input_dtypes"])
    )
    width = {"Float": 4, "Long": 8, "Byte": 1}
    size = sum(math.prod(shape) * width[kind] for shape, kind in zip(sizes, types, strict=True))
    return entry["collective_seq_id"], name, size * (2 if "gather" in name or name == "scatter" else 1)


with Path(os.environ["OUT"], f"rank{rank}.jsonl").open("w") as out:
    seen = 0
    for label, call in CALLS.items():
        result = hashlib.sha256(json.dumps(plain(call())).encode()).hexdigest()
        flown = entries(seen)
        seen += len(flown)
        said = {"label": label, "flown": [moved(entry) for entry in flown], "result": result}
        print(json.dumps(said), file=out)
dist.destroy_process_group()

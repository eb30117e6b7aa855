"""Sends messages between four ranks in several groups, with collectives between, and says what went where."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
rank = dist.get_rank()
said: list[Any] = []


def fill(count: int) -> torch.Tensor:
    """Return that many numbers that differ by rank."""
    return torch.full((count,), float(rank + 1))


def got(tensor: torch.Tensor) -> None:
    """Note what has arrived."""
    said.append(tensor.tolist())


def blocking() -> None:
    """Send with two tags, received in the other order."""
    if rank == 0:
        first = dist.isend(fill(1), 1, tag=1)
        dist.send(fill(2), 1, tag=2)
        first.wait()
        for _ in range(2):
            dist.send(fill(3), dst=3)
    elif rank == 1:
        for size, tag in ((2, 2), (1, 1)):
            dist.recv(tensor := fill(size), src=0, tag=tag)
            got(tensor)
    elif rank == 3:
        work = dist.irecv(tensor := fill(3), src=0)
        work.wait()
        got(tensor)
        said.append(dist.recv(fill(3), src=0))


def from_anybody() -> None:
    """Receive from whoever sends, at once and later."""
    if rank == 2:
        said.append(sorted(dist.recv(fill(4), tag=7) for _ in range(2)))
        work = dist.irecv(fill(4), tag=8)
        work.wait()
    else:
        if rank != 3:
            dist.send(fill(4), 2, tag=7)
        if rank == 3:
            dist.send(fill(4), 2, tag=8)


def in_group(group: Any) -> None:
    """Send in a group whose ranks are not those of the world, by either number."""
    if rank == 3:
        dist.send(fill(5), dst=1, group=group, tag=4)
        dist.send(fill(5), group_dst=0, group=group, tag=4)
        dist.send_object_list(["a", {"b": 1}], dst=1, group=group)
    elif rank == 1:
        dist.recv(fill(5), src=3, group=group, tag=4)
        dist.recv(fill(5), group_src=1, group=group, tag=4)
        dist.recv_object_list(objects := [None, None], src=3, group=group)
        said.append(objects)


def ring() -> None:
    """Send to the next rank and receive from the one before, as one batch."""
    after, before = (rank + 1) % 4, (rank - 1) % 4
    operations = [dist.P2POp(dist.isend, fill(6), after), dist.P2POp(dist.irecv, tensor := fill(6), before)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    got(tensor)


def compiled() -> None:
    """Send and receive as a compiled graph does."""
    if rank == 0:
        functional.wait_tensor(torch.ops._c10d_functional.isend(fill(7), 3, 9, "0"))
    elif rank == 3:
        got(functional.wait_tensor(torch.ops._c10d_functional.irecv(fill(7), 0, 9, "0")))
    elif rank == 1:
        functional.batch_p2p_ops_inplace(["isend", "irecv"], [2, 2], [5, 5], [fill(1), fill(1)], "0")
    else:
        functional.batch_p2p_ops_inplace(["irecv", "isend"], [1, 1], [5, 5], [fill(1), fill(1)], "0")


odd = dist.new_group([1, 3])
pairs, _ = dist.new_subgroups(group_size=2)
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
alone = dist.new_group([0])
for part in (blocking, from_anybody, lambda: in_group(odd), ring, dist.monitored_barrier, compiled):
    part()
    dist.all_reduce(numbers := fill(2))
    got(numbers)
    if rank in (1, 3):
        dist.broadcast(numbers, group_src=1, group=odd)
        got(numbers)
    dist.all_gather(received := [fill(1), fill(1)], fill(1), group=pairs)
    said.append([tensor.tolist() for tensor in received])
    for name in ("replicate", "shard"):
        dist.reduce_scatter_single(numbers := fill(1), fill(2), group=mesh.get_group(name))
        got(numbers)
    got(functional.all_reduce(fill(3), "sum", (mesh, 1)).wait())
    dist.all_reduce(fill(1), group=alone)  # outside of it there is nothing to do

entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))["entries"]
flown = [[e["process_group"][0], e["collective_seq_id"], e["profiling_name"].removeprefix("gloo:")] for e in entries]
groups = {name: dist.get_process_group_ranks(group) for group, name in dist.distributed_c10d._world.pg_names.items()}
with Path(os.environ["OUT"], f"rank{rank}.jsonl").open("w") as out:
    print(json.dumps({"got": said, "flown": flown, "groups": groups}), file=out)
dist.destroy_process_group(alone)  # outside of it there is nothing to do
dist.destroy_process_group()

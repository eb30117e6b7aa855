"""Every operation of Horovod, and a small training; each rank writes down when it called, for itself.

    horovod_calls.py LOG STEPS ["late" RANK MS | "killed" RANK]

Rank r writes LOG.r: a line for each operation with its tensor's full name, its bytes, CLOCK_MONOTONIC before the call,
and after it where it returned at once. A late rank sleeps before each step; one that is killed is so in the middle of
the last step.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import horovod.torch as hvd
import torch

UNNAMED = 150
log, steps = sys.argv[1], int(sys.argv[2])
fault, special, late_ms = [*sys.argv[3:], *["", "-1", "0"][len(sys.argv) - 3 :]]
hvd.init(process_sets="dynamic")
rank, size = hvd.rank(), hvd.size()
file = Path(f"{log}.{rank}").open("w")  # noqa: SIM115  -- until the end


def called(*tensors: str, elements: int = 0) -> None:
    """Write down that blocking operations on these tensors are about to be called."""
    file.flush()
    now = time.monotonic_ns()
    write(tensors, elements, now, now)


@contextmanager
def calling(tensor: str, elements: int) -> Iterator[None]:
    """Write down when an operation was called, and that the call had returned."""
    file.flush()
    before = time.monotonic_ns()
    yield
    write((tensor,), elements, before, time.monotonic_ns())


def write(tensors: tuple[str, ...], elements: int, before: int, after: int) -> None:
    file.writelines(f'["{tensor}", {4 * elements}, {before}, {after}]\n' for tensor in tensors)


def ones(count: int = 4) -> torch.Tensor:
    return torch.full((count,), float(rank))


def plain() -> None:
    """Each operation once, named, unnamed, in place, in groups."""
    called("allreduce.a", elements=4)
    hvd.allreduce(ones(), name="a")
    for _ in range(UNNAMED):
        with calling("allreduce.noname.N", 4):
            handle = hvd.allreduce_async_(ones())
        hvd.synchronize(handle)
    called(*(f"grouped_allreduce.g_{i}of3" for i in (1, 2, 3)), elements=4)
    hvd.grouped_allreduce([ones(), ones(), ones()], name="g")
    called("allgather.b", elements=4)
    hvd.allgather(ones(), name="b")
    called(*(f"grouped_allgather.gg_{i}of2" for i in (1, 2)), elements=4)
    hvd.grouped_allgather([ones(), ones()], name="gg")
    called("broadcast.c", elements=4)
    hvd.broadcast(ones(), root_rank=1, name="c")
    with calling("broadcast.d", 4):
        handle = hvd.broadcast_async_(ones(), root_rank=0, name="d")
    hvd.synchronize(handle)
    called("alltoall.e", elements=size)
    hvd.alltoall(ones(size), name="e")
    called("reducescatter.f", elements=2 * size)
    hvd.reducescatter(ones(2 * size), name="f")
    called(*(f"grouped_reducescatter.gf_{i}of2" for i in (1, 2)), elements=size)
    hvd.grouped_reducescatter([ones(size), ones(size)], name="gf")
    called("barrier.noname")
    hvd.barrier()
    for members in ([0], [0, size - 2] if size > 2 else [1]):
        part = hvd.add_process_set(members)
        if rank in members:
            called("allreduce.h", elements=4)
            hvd.allreduce(ones(), name="h", process_set=part)
            called("barrier.noname")
            hvd.barrier(process_set=part)
        hvd.remove_process_set(part)
    with calling("allreduce.i", 4):
        handle = hvd.allreduce_async(ones(), name="i", op=hvd.Max)
    while not hvd.poll(handle):
        time.sleep(0.0005)
    hvd.synchronize(handle)


def log_gradients() -> None:
    """Have Horovod's optimizer write down each gradient that its hooks reduce."""
    module = sys.modules["horovod.torch.optimizer"]
    reduce = module.allreduce_async_

    def logged(tensor: torch.Tensor, name: str, **more: object) -> int:
        with calling(f"allreduce.{name}", tensor.numel()):
            return reduce(tensor, name=name, **more)

    module.allreduce_async_ = logged


def training() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    log_gradients()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters()
    )
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(4 * steps, 8)), batch_size=4)
    for step, (batch,) in enumerate(data):
        if (fault, special) == ("late", str(rank)):
            time.sleep(float(late_ms) / 1000)
        optimizer.zero_grad()
        model(batch).pow(2).mean().backward()
        if (fault, special, step) == ("killed", str(rank), steps - 1):
            file.flush()
            time.sleep(0.5)  # in which the thread that writes the timeline gets to it
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()


plain()
training()
called("join.noname")
hvd.join()
file.close()

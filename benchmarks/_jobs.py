"""What the ranks of the benchmarks run: small training jobs on two ranks, and loops of collectives."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice, repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

SAMPLES = 64
"""In a micro-batch."""
MICRO_BATCHES = 4
CALLS = 64
"""Collectives in a step of the loops that only communicate."""
IN_FLIGHT = 8
MESSAGE = 256
"""Elements of a small message: 1 KiB."""


class Batches(IterableDataset[torch.Tensor]):
    """The same random batch without end."""

    def __init__(self, batch: int, *sample: int) -> None:
        self._batch = torch.randn(batch, *sample)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Return batches."""
        return repeat(self._batch)


class Training:
    """A model and its training loop; with several *micro* batches a step accumulates their gradients."""

    calls = 1

    def __init__(self, model: nn.Module, batch: int, sample: tuple[int, ...], micro: int = 1) -> None:
        self.model, self.micro = model, micro
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        self.batches = iter(DataLoader(Batches(batch, *sample), batch_size=None))

    def run(self, steps: int) -> None:
        """Train for *steps* steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            for number, batch in enumerate(islice(self.batches, self.micro), 1):
                with self._unsynchronised() if number < self.micro else nullcontext():
                    self.forward(batch).square().mean().backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()

    def _unsynchronised(self) -> Any:
        assert isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the model's output for *batch*."""
        output: torch.Tensor = self.model(batch)
        return output


class OnGpu(Training):
    """The same on a GPU: each batch goes there, and each step ends when it is done, as where its loss is shown."""

    def run(self, steps: int) -> None:
        """Train for *steps* steps."""
        for _ in range(steps):
            super().run(1)
            torch.cuda.synchronize()

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Return the model's output for *batch*, which is on the host."""
        return super().forward(batch.cuda(non_blocking=True))


class Collectives:
    """A loop of small all-reduces, *in_flight* of them at a time; one at a time is synchronous."""

    calls = CALLS

    def __init__(self, in_flight: int = 1) -> None:
        from otel_dltrace import step  # here, since the other jobs are also run without us

        self.step, self.in_flight = step, in_flight
        self.tensors = [torch.zeros(MESSAGE) for _ in range(in_flight)]

    def run(self, steps: int) -> None:
        """Make *steps* steps of `CALLS` calls."""
        for _ in range(steps):
            with self.step():
                for _ in range(CALLS // self.in_flight):
                    self._call()

    def _call(self) -> None:
        if self.in_flight == 1:
            dist.all_reduce(self.tensors[0])
            return
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in self.tensors]:
            assert work is not None
            work.wait()


Job = Training | Collectives


class Block(nn.Module):
    """The MLP of a transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to *x* what the layer makes of it."""
        result: torch.Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return result


def ddp(width: int, batch: int, bucket_mb: float, micro: int = 1) -> Training:
    """Return twelve linear layers under DistributedDataParallel, in six buckets."""
    layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(12)])
    return Training(DistributedDataParallel(layers, bucket_cap_mb=bucket_mb), batch, (width,), micro)


def fsdp(width: int, batch: int) -> Training:
    """Return six blocks under FSDP2, each a group of parameters."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers = nn.Sequential(*[Block(width) for _ in range(6)])
    for module in (*layers, layers):
        fully_shard(module, mesh=mesh)
    return Training(layers, batch, (width,))


def encoder(width: int, words: int, batch: int) -> Training:
    """Return six layers of a transformer under DistributedDataParallel, on this rank's GPU."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    model = DistributedDataParallel(nn.TransformerEncoder(layer, 6).cuda())
    return OnGpu(model, batch, (words, width))


JOBS: dict[str, Callable[[], Job]] = {
    "tiny": partial(ddp, 32, 16, 0.008),
    "small": partial(ddp, 256, 160, 0.5),
    "large": partial(ddp, 1024, SAMPLES, 8.0),
    "accumulation": partial(ddp, 256, SAMPLES, 0.5, MICRO_BATCHES),
    "fsdp": partial(fsdp, 128, 128),
    "gpu": partial(encoder, 512, 128, 64),
    "sync": Collectives,
    "async": partial(Collectives, IN_FLIGHT),
}
"""By the names that `bench_training` and `bench_memory` give them."""

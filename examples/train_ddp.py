"""Train a small classifier on synthetic data with DistributedDataParallel, on CPUs.

    torchrun --nproc-per-node 2 examples/train_ddp.py
    torchrun --nproc-per-node 2 examples/train_ddp.py --slow-rank 1 --slow-ms 20

The second line makes one rank slow, as a rank with a slow disk would be.
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, CLASSES = 64, 10


def make_data(samples: int, seed: int) -> TensorDataset:
    """Return points around one centre per class, and their classes."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    points = centres[labels] + 2 * torch.randn(samples, FEATURES, generator=generator)
    return TensorDataset(points, labels)


def make_model(width: int, depth: int) -> nn.Module:
    """Return a multilayer perceptron."""
    layers: list[nn.Module] = [nn.Linear(FEATURES, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def train_epoch(
    model: nn.Module,
    loader: DataLoader,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    slow_s: float,
) -> float:
    """Train on every batch of *loader* once; return the last loss, averaged over the ranks."""
    loss = torch.zeros(())
    for batch, (points, labels) in enumerate(loader):
        if slow_s:
            time.sleep(slow_s)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
        scheduler.step()
        if batch % 10 == 0:
            dist.all_reduce(loss.detach().clone())
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    """Return the share of points that *model* puts into the right class, over all ranks."""
    counts = torch.zeros(2)
    for points, labels in loader:
        right = model(points).argmax(1) == labels
        counts += torch.tensor([right.sum(), len(labels)])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main() -> None:
    """Train and say how well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50, help="optimizer steps in an epoch")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--slow-rank", type=int, default=-1, help="the rank that is slow at every batch")
    parser.add_argument("--slow-ms", type=float, default=20)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = DistributedDataParallel(make_model(options.width, options.depth), bucket_cap_mb=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * options.steps)

    data = make_data(options.steps * options.batch_size * world_size, seed=1)
    held_out = make_data(20 * options.batch_size * world_size, seed=2)
    sampler: DistributedSampler = DistributedSampler(data)
    loader = DataLoader(data, options.batch_size, sampler=sampler)
    held_out_loader = DataLoader(held_out, options.batch_size, sampler=DistributedSampler(held_out, shuffle=False))

    slow_s = options.slow_ms / 1000 if rank == options.slow_rank else 0.0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, scheduler, slow_s)
        accuracy = evaluate(model, held_out_loader)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss:.3f}, accuracy {accuracy:.3f}", flush=True)
        dist.barrier()
    del model  # before its group: torch 2.13 ends a group that DDP still held with the GIL, which gloo may wait for
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a small classifier on synthetic data with push_pull, on CPUs.

    otel-dltrace pushpull launch --workers 2 --local-ranks 2 --servers 2 -- python examples/train_pushpull.py
    otel-dltrace pushpull launch --workers 2 --servers 1 -- python examples/train_pushpull.py --slow-rank 1 --slow-ms 30

The second line makes one rank slow, as a rank with a slow disk would be.
"""

import argparse
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import otel_dltrace.pushpull.torch as bps

FEATURES, CLASSES = 64, 10
COMPRESSION = {"none": bps.Compression.none, "fp16": bps.Compression.fp16, "topk": bps.Compression.topk(0.05)}


def make_data(samples: int) -> TensorDataset:
    """Return points around one centre per class, and their classes."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    return TensorDataset(centres[labels] + 2 * torch.randn(samples, FEATURES, generator=generator), labels)


def make_model(width: int, depth: int) -> nn.Module:
    """Return a multilayer perceptron."""
    layers: list[nn.Module] = [nn.Linear(FEATURES, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, slow_s: float) -> float:
    """Train on every batch of *loader* once; return the last loss, averaged over the ranks."""
    loss = torch.zeros(())
    for points, labels in loader:
        time.sleep(slow_s)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(points), labels)
        loss.backward()
        optimizer.step()
    return bps.push_pull(loss, name="loss").item()


def main() -> None:
    """Train and say how well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=25, help="optimizer steps in an epoch")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--compression", choices=COMPRESSION, default="none")
    parser.add_argument("--slow-rank", type=int, default=-1, help="the rank that is slow at every batch")
    parser.add_argument("--slow-ms", type=float, default=20)
    options = parser.parse_args()

    bps.init()
    torch.manual_seed(bps.rank())
    torch.set_num_threads(1)
    model = make_model(options.width, options.depth)
    bps.broadcast_parameters(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), COMPRESSION[options.compression])

    data = make_data(options.steps * options.batch_size * bps.size())
    sampler: DistributedSampler = DistributedSampler(data, bps.size(), bps.rank())
    loader = DataLoader(data, options.batch_size, sampler=sampler)
    slow_s = options.slow_ms / 1000 if bps.rank() == options.slow_rank else 0.0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss = train_epoch(model, loader, optimizer, slow_s)
        if bps.rank() == 0:
            print(f"epoch {epoch}: loss {loss:.3f}", flush=True)
    bps.shutdown()


if __name__ == "__main__":
    main()

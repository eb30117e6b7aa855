"""Train on two ranks with three delays in known places, and write down how long each was, and what it is planted in.

Rank 0's dataset is slow, and it writes a checkpoint in one step; in rank 1's forward other processes use all CPUs.
"""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import otel_dltrace

STEPS, BATCH, CHECKPOINT = 12, 4, 7
SLOW_S, BUSY_S, SAVING_S = 0.15, 0.4, 1.0
HOG = """
import sys, time
for line in sys.stdin:
    end = time.monotonic() + float(line)
    while time.monotonic() < end:
        pass
    print(flush=True)
"""
folder = Path(sys.argv[1])
noted: dict[str, list[float]] = defaultdict(list)


@contextmanager
def planted(stage: str) -> Iterator[None]:
    """Write down how long the block takes."""
    began = time.perf_counter()
    yield
    noted[stage].append(time.perf_counter() - began)


class Samples(Dataset):
    """Samples, of which the first of each batch is slow on rank 0."""

    def __len__(self) -> int:
        """Return how many there are."""
        return STEPS * BATCH

    def __getitem__(self, number: int) -> torch.Tensor:
        """Return a sample, late."""
        if rank == 0 and number % BATCH == 0:
            with planted("dataloader_next"):
                time.sleep(SLOW_S)
        return torch.ones(16)


class Model(torch.nn.Module):
    """A layer beside which, on rank 1, other processes keep all CPUs busy."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Wait for the others to be done, then compute."""
        if rank == 1:
            with planted("forward"):
                for hog in hogs:
                    hog.stdin.write(f"{BUSY_S}\n")
                    hog.stdin.flush()
                for hog in hogs:
                    hog.stdout.readline()
        return self.linear(x)


def save(state: dict[str, torch.Tensor]) -> None:
    """Write *state* to the disk, again and again, for a while."""
    began = time.perf_counter()
    while time.perf_counter() < began + SAVING_S:
        with (folder / "model.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())


dist.init_process_group("gloo")
rank = dist.get_rank()
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
hogs = [subprocess.Popen([sys.executable, "-S", "-c", HOG], **pipes) for _ in os.sched_getaffinity(0) if rank == 1]
torch.manual_seed(7)
model = DistributedDataParallel(Model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
big = {"weights": torch.zeros(4_000_000)}
while not any(path.stat().st_size for path in folder.glob("dltrace-*/hosts/*/metrics-*")):
    time.sleep(0.01)  # the drain may take a while to be there and sample, and longer beside the hogs
batches = iter(DataLoader(Samples(), batch_size=BATCH))
for step in range(STEPS):
    with planted("around dataloader_next"):
        x = next(batches)
    optimizer.zero_grad()
    with planted("around forward"):
        y = model(x)
    y.square().mean().backward()
    optimizer.step()
    if step == CHECKPOINT and rank == 0:
        with planted("around checkpoint"), otel_dltrace.phase("checkpoint"), planted("checkpoint"):
            save(big)
for hog in hogs:
    hog.stdin.close()
(folder / f"planted.{rank}.json").write_text(json.dumps(noted))
dist.destroy_process_group()

"""One rank of `bench_ddp`'s job: trains in blocks, some traced and some not, and writes down what each cost.

Run by torchrun. Each round holds a block of every mode in an order that all ranks draw alike.
"""

import argparse
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from otel_dltrace import configure
from otel_dltrace.instrument import registry
from otel_dltrace.instrument._torch_binding import Binding
from otel_dltrace.model.semconv import Level
from otel_dltrace.record.steps import live

MODES = {"off": Level.PHASE, "off again": Level.PHASE, "step": Level.STEP, "phase": Level.PHASE}
TRACED = ("step", "phase")
WARM_UP = 3
"""Steps after switching that are not measured: in them the root module, for one, is looked for anew."""
SHAPES = {"small": (256, 12, 0.5), "large": (1024, 12, 8.0)}
"""Width and number of layers, and MB of a bucket: six buckets each."""


class Batches(IterableDataset):  # type: ignore[type-arg]
    """The same random batch without end."""

    def __init__(self, batch: int, width: int) -> None:
        self._batch = torch.randn(batch, width)

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Return batches."""
        return repeat(self._batch)


class Job:
    """The model and its training loop."""

    def __init__(self, shape: str, batch: int) -> None:
        width, depth, bucket_mb = SHAPES[shape]
        torch.manual_seed(0)
        layers = nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])
        self.model = DistributedDataParallel(layers, bucket_cap_mb=bucket_mb)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.batches = iter(DataLoader(Batches(batch, width), batch_size=None))

    def train(self, steps: int) -> None:
        """Train for *steps* steps."""
        for batch in islice(self.batches, steps):
            self.optimizer.zero_grad()
            self.model(batch).square().mean().backward()
            self.optimizer.step()


class Drain:
    """The drain process, seen from rank 0: it is stopped while a block that is not traced runs.

    It works up to seconds after what it works on, so without this an untraced block would pay for
    the traced one before it, and the difference between the two would leave the drain out.
    """

    def __init__(self, rings: str) -> None:
        self._processes = [p for p in psutil.process_iter(["cmdline"]) if _serves(p, rings)]

    def stop(self) -> None:
        """Stop it for now."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    def cpu(self) -> float:
        """Return its CPU seconds so far, all threads."""
        return sum(time.clock_gettime(~process.pid << 3 | 2) for process in self._processes)  # clock_getcpuclockid(3)


def _serves(process: psutil.Process, rings: str) -> bool:
    try:
        return "drain" in process.info["cmdline"] and process.environ().get("OTEL_DLTRACE_RING_DIR") == rings
    except (psutil.Error, TypeError):
        return False


def switch(mode: str) -> None:
    """Patch torch for *mode*, or give it all its functions back."""
    assert live.tracer is not None
    live.tracer.recorder.level = int(MODES[mode])
    (registry.instrument if mode in TRACED else registry.uninstrument)()


def block(job: Job, drain: Drain, mode: str, steps: int) -> dict[str, float]:
    """Train a block in *mode*; return its seconds and its CPU seconds per step."""
    switch(mode)
    if mode in TRACED:
        drain.go_on()
    job.train(WARM_UP)
    dist.barrier()
    drained, worked, begun = drain.cpu(), time.process_time(), time.perf_counter()
    job.train(steps)
    seconds, cpu = time.perf_counter() - begun, time.process_time() - worked
    drained = drain.cpu() - drained
    drain.stop()
    return {"s": seconds / steps, "cpu": cpu / steps, "drain": drained / steps}


def rounds(job: Job, drain: Drain, number: int, steps: int) -> list[dict[str, Any]]:
    """Return what each block of *number* rounds cost."""
    order = random.Random(0)
    modes, seen = list(MODES), []
    for _ in range(number):
        order.shuffle(modes)
        seen.append({mode: block(job, drain, mode, steps) for mode in modes})
    return seen


def main() -> None:
    """Train, and write what rank and rounds saw to the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--steps", type=int, help="in a block")
    parser.add_argument("--rounds", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job = Job(options.shape, options.batch)
    configure.instrument()
    # To switch on again would be to begin another run, with its own directory.
    Binding.initialised = lambda *_: None  # type: ignore[method-assign]
    job.train(30)
    time.sleep(1.5)  # the drain has started
    drain = Drain(os.environ["OTEL_DLTRACE_RING_DIR"] if dist.get_rank() == 0 else "")
    drain.stop()
    dist.barrier()
    try:
        rounds(job, drain, 2, options.steps)
        seen = rounds(job, drain, options.rounds, options.steps)
    finally:
        drain.go_on()
    (options.folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of `bench_horovod`'s jobs: trains a block of steps whenever it is told to, and tells what a step took.

``python -m benchmarks._horovod_rank FOLDER JOB``: of each line in FOLDER/JOB.<rank>.in it trains so many steps.
"""

import os
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

WIDTH, LAYERS, BATCH = 256, 12, 160
WARM_UP = 2
"""Steps of a block that are not measured: the caches were another job's."""


def main() -> None:
    """Serve the lines until there are no more."""
    hvd.init()
    place = Path(sys.argv[1]) / f"{sys.argv[2]}.{hvd.rank()}"
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-6), named_parameters=model.named_parameters()
    )
    batch = torch.randn(BATCH, WIDTH)

    def train(steps: int) -> float:
        """Return the seconds that a step took."""
        begun = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        return (time.perf_counter() - begun) / steps

    train(WARM_UP)
    with place.with_suffix(f"{place.suffix}.out").open("w") as answers:
        print(os.getpid(), file=answers, flush=True)
        with place.with_suffix(f"{place.suffix}.in").open() as orders:
            for order in orders:
                train(WARM_UP)
                print(train(int(order)), file=answers, flush=True)


if __name__ == "__main__":
    main()

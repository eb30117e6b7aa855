"""One rank of `bench_mpi`'s job: exchanges messages with the other one, traced and not, and writes down what it took.

Run by mpiexec: ``python -m benchmarks._mpi_rank FOLDER ROUNDS``.
"""

import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from mpi4py import MPI

import otel_dltrace
from benchmarks.bench_mpi import SIZES
from otel_dltrace.instrument import registry
from otel_dltrace.record.tracer import Tracer, live

BLOCK_S = 0.02
MOST = 2000
WARM_UP = 20
SOURCE = "mpi4py"

World = MPI.COMM_WORLD
Call = Callable[[], None]


def ping_pong(size: int) -> Call:
    """Return a message of *size* bytes there and back: two calls on each rank, four one after the other."""
    out, back = np.zeros(size, np.uint8), np.empty(size, np.uint8)
    if World.rank == 0:

        def first() -> None:
            World.Send(out, 1)
            World.Recv(back, 1)

        return first

    def second() -> None:
        World.Recv(back, 0)
        World.Send(out, 0)

    return second


def allreduce(size: int) -> Call:
    """Return an all-reduce of *size* bytes of float64."""
    values, total = np.zeros(size // 8), np.empty(size // 8)
    return lambda: World.Allreduce(values, total)


MAKERS: dict[str, Callable[[int], Call]] = {"Send and Recv": ping_pong, "Allreduce": allreduce}


def seconds(call: Call, times: int) -> float:
    """Return how long each of *times* calls takes."""
    for _ in range(WARM_UP):
        call()
    World.Barrier()
    begun = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - begun) / times


def times_in(call: Call) -> int:
    """Return how many calls take about a block, the same on all ranks."""
    mean = World.bcast(seconds(call, WARM_UP))
    return max(WARM_UP, min(MOST, int(BLOCK_S / mean)))


def switch(tracer: Tracer, on: bool) -> None:
    """Trace, or give mpi4py all its methods back."""
    if on:
        live.tracer = tracer
        registry.instrument([SOURCE])
    else:
        registry.uninstrument()
        live.tracer = None


def main() -> None:
    """Measure each case at each size in *rounds* rounds, and have rank 0 write the seconds of each block."""
    folder, rounds = Path(sys.argv[1]), int(sys.argv[2])
    otel_dltrace.start()
    tracer = live.tracer
    assert tracer is not None
    switch(tracer, on=False)
    chance = random.Random(0)
    seen: dict[str, dict[str, list[float]]] = {}
    for name, make in MAKERS.items():
        for size in SIZES:
            call = make(size)
            times = times_in(call)
            blocks = seen[f"{name}, {size}"] = {"off": [], "off again": [], "on": []}
            for _ in range(rounds):
                for mode in chance.sample(list(blocks), len(blocks)):
                    switch(tracer, on=mode == "on")
                    blocks[mode].append(seconds(call, times))
            switch(tracer, on=False)
    if World.rank == 0:
        (folder / "seconds.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()

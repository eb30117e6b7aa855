"""One rank of `bench_memory`'s job: trains a small model, then writes down what it holds in memory.

It imports nothing of ours: whether it is traced is for ``OTEL_DLTRACE`` to say, as in any program.
"""

import argparse
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import profiler

from benchmarks._jobs import JOBS
from benchmarks._processes import RINGS, Drain, memory_of

_running: list[profiler.profile] = []
"""Profilers that are not stopped: that takes minutes after so many steps."""


def trace_by(peer: str) -> Callable[[], None]:
    """Trace from now on as *peer* does, "" for not at all; return what waits for work that it has put off."""
    if peer == "profiler":
        profile = profiler.profile(activities=[profiler.ProfilerActivity.CPU])
        profile.start()
        _running.append(profile)
    elif peer == "sdk":
        from benchmarks._sdk_spans import SdkSpans

        spans = SdkSpans()
        spans.install()
        return spans.settle
    return lambda: None


def main() -> None:
    """Train, then write the memory of this rank, and on rank 0 of the drain, to the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("steps", type=int)
    parser.add_argument("--peer", default="", choices=("profiler", "sdk"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    job, rank = JOBS["tiny"](), dist.get_rank()
    settle = trace_by(options.peer)
    job.run(options.steps)
    settle()
    gc.collect()
    dist.barrier()
    held = {"rank": [memory_of(psutil.Process())]}
    if rank == 0:
        held["drain"] = Drain(Path(os.environ[RINGS])).memory()
    dist.barrier()  # what is shared counts for all, as long as all are there
    (options.folder / f"rank{rank}.json").write_text(json.dumps(held))
    if _running:
        os._exit(0)  # the interpreter's own end crashes while a profiler runs
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What tracing adds to a DistributedDataParallel step, drain included: ``python -m benchmarks ddp``.

One torchrun job of two ranks on Gloo trains in short blocks. A round holds four of them in an order drawn
anew: *off* and *off again* (torch unpatched: every function is the object it was), *step* and *phase*
(traced at that level, otherwise the default mode: crash-safe ring, run directory, no endpoint). Both ranks
switch at the same steps. The drain process is stopped (SIGSTOP) while an untraced block runs, so that it does
all its work in traced blocks, and none for them in untraced ones.

Time: seconds per step of a block on rank 0, divided by that of the same round's *off*; the median over rounds.
*off again* divided by *off* is the noise. CPU: seconds per step of both trainers (``process_time``, all
threads) and of the drain, summed over all rounds, divided by the sum of *off* and *off again*, halved.
Where the interval of the time is wider than the limit, CPU decides. Intervals hold 95 % of resampled rounds.

Two models: twelve Linear(256) in six buckets, a step of about 15 ms, the hard case; and twelve Linear(1024).
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._stats import Statistic, median_of, ratio_of_sums, table, with_interval

RANKS = 2
LIMITS = {"step": 0.5, "phase": 2.0}
"""Percent that a traced step may take longer."""


@dataclass(frozen=True)
class Workload:
    """A model, its batch, and how many steps make a block of about half a second."""

    name: str
    shape: str
    batch: int
    steps: int


WORKLOADS = (
    Workload("12 x Linear(256)", "small", 160, 32),
    Workload("12 x Linear(1024)", "large", 64, 5),
)


def run(rounds: int = 300) -> str:
    """Measure and return the tables in markdown."""
    return "\n\n".join(_table(workload, _blocks(workload, rounds)) for workload in WORKLOADS)


Round = dict[str, dict[str, float]]


def _blocks(workload: Workload, rounds: int) -> list[Round]:
    """Return for each round and mode the seconds, the trainers' and the drain's CPU seconds per step."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    options = {"shape": workload.shape, "batch": workload.batch, "steps": workload.steps, "rounds": rounds}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    env |= {"OTEL_DLTRACE_RING_DIR": str(folder / "rings"), "OTEL_DLTRACE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
    try:
        subprocess.run(
            [*launcher, "-m", "benchmarks._ddp_rank", str(folder), *arguments],
            env=env,
            check=True,
        )
        seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [_merge(ranks) for ranks in zip(*seen, strict=True)]


def _merge(ranks: Sequence[Round]) -> Round:
    """Return a round's figures of all ranks: rank 0's time, since they wait for each other, everybody's CPU."""
    return {mode: {**seen, "cpu": sum(rank[mode]["cpu"] for rank in ranks)} for mode, seen in ranks[0].items()}


def _table(workload: Workload, rounds: list[Round]) -> str:
    off = [seen["off"]["s"] for seen in rounds]
    cpu_off = [(seen["off"]["cpu"] + seen["off again"]["cpu"]) / 2 for seen in rounds]
    head = [
        f"{workload.name}, {len(rounds)} rounds",
        "time (95 %)",
        "CPU, trainers + drain (95 %)",
        "of it drain",
        "goal",
    ]
    rows = []
    for mode in ("off again", "step", "phase"):
        ratios = [seen[mode]["s"] / base for seen, base in zip(rounds, off, strict=True)]
        drain = [seen[mode]["drain"] for seen in rounds]
        cpu = [seen[mode]["cpu"] + seen[mode]["drain"] for seen in rounds]
        below = [seen["off"]["cpu"] for seen in rounds] if mode == "off again" else cpu_off
        rows.append(
            [
                f"{mode} / off",
                _percent(median_of(ratios), len(rounds)),
                _percent(ratio_of_sums(cpu, below), len(rounds)),
                f"{100 * sum(drain) / sum(cpu_off):.2f} %",
                f"<= {LIMITS[mode]} %" if mode in LIMITS else "",
            ]
        )
    time_s, cpu_s = with_interval(median_of(off), len(rounds))[0], sum(cpu_off) / len(rounds)
    return (
        f"{table(head, rows)}\n\nA step takes {time_s * 1e3:.1f} ms and {cpu_s * 1e3:.1f} ms of CPU on {RANKS} ranks."
    )


def _percent(ratio: Statistic, rounds: int) -> str:
    """Return by how many percent *ratio* is above 1, and its interval."""
    value, low, high = (100 * (x - 1) for x in with_interval(ratio, rounds))
    return f"{value:+.2f} % ({low:+.2f} - {high:+.2f})"


if __name__ == "__main__":
    print(run(int(sys.argv[1])))

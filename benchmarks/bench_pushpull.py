"""What tracing adds to push_pull, down to each partition's stages, servers included: ``python -m benchmarks pushpull``.

For each layout one job trains the small model of `bench_training`, whose gradients are cut into partitions of 16 KiB
a local rank: some stages more than 10,000 a second. A round holds one block of
every mode in an order drawn anew; all ranks and servers switch at the same steps, and the first steps after a switch
do not count:

- *off* and *off again*: torch unpatched, no observer in push_pull;
- *operations*: an operation for each tensor, stages of the training step;
- *partitions*: a span for each stage of each partition as well, and one for each request that a server answers.

The drain process is stopped (SIGSTOP) while a block runs that is not traced.

Time: seconds per step of a block on rank 0, divided by that of the same round's *off*; the median over rounds.
*off again* divided by *off* is the noise. CPU: seconds per step of all trainers, servers and the drain, summed over
all rounds, divided by the mean of *off* and *off again*. Where the interval of the time is wider than the limit, CPU
decides. Intervals hold 95 % of resampled rounds.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks._processes import ROOT, environment, scratch
from benchmarks._stats import Round, median_of, merged, percent_more, ranged, ratio_of_sums, table

BLOCK_S = 2.0
"""A step takes up to a quarter of a second, and the first three after a switch do not count."""
PARTITION_BYTES = 16_384
"""Of a local rank."""
LIMIT, AIM, FAST = 3.0, 2.0, 10_000
"""Percent that a step traced down to its partitions may take longer, and at how many stages a second."""


@dataclass(frozen=True)
class Layout:
    """Where push_pull runs."""

    workers: int
    local_ranks: int
    servers: int

    @property
    def name(self) -> str:
        """What it is called in the table."""
        counts = (self.workers, "worker"), (self.local_ranks, "local rank"), (self.servers, "server")
        return ", ".join(f"{count} {word}{'' if count == 1 else 's'}" for count, word in counts)


LAYOUTS = (Layout(1, 2, 0), Layout(2, 2, 1))


@dataclass(frozen=True)
class Measured:
    """What a job saw: its rounds, and how many stages of partitions a step has on all ranks."""

    rounds: list[Round]
    stages: int


def run(rounds: int) -> str:
    """Measure and return the tables in markdown."""
    return "\n\n".join(_report(layout, _measure(layout, rounds)) for layout in LAYOUTS)


def _measure(layout: Layout, rounds: int) -> Measured:
    with scratch() as folder:
        _launch(folder, layout, rounds)
        ranks = layout.workers * layout.local_ranks
        seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    rounds_seen = zip(*(rank["rounds"] for rank in seen), strict=True)
    return Measured([merged(ranks) for ranks in rounds_seen], sum(rank["stages"] for rank in seen))


def _launch(folder: Path, layout: Layout, rounds: int) -> None:
    counts = (layout.workers, layout.local_ranks, layout.servers)
    command = [sys.executable, "-m", "benchmarks._pushpull_job", *map(str, counts), str(folder)]
    command += [str(rounds), str(BLOCK_S)]
    env = environment(
        folder,
        PYTHONPATH=str(ROOT),
        OTEL_DLTRACE_LEVEL="partition",
        OTEL_DLTRACE_RUN=os.urandom(8).hex(),
        BYTEPS_PARTITION_BYTES=str(PARTITION_BYTES * layout.local_ranks),
    )
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-8000:]}")


def _report(layout: Layout, measured: Measured) -> str:
    """Return the table of *layout*, and what it takes untraced."""
    rounds = measured.rounds
    head = [
        f"{layout.name}, {len(rounds)} rounds",
        "time (95 %)",
        "+ us a step (95 %)",
        "CPU, trainers + servers + drain (95 %)",
        "of it drain",
        "goal",
    ]
    rows = [_cells(mode, rounds) for mode in rounds[0] if mode != "off"]
    step_s = median(seen["off"]["s"] for seen in rounds)
    rate = measured.stages / median(seen["partitions"]["s"] for seen in rounds)
    return (
        f"{table(head, rows)}\n\n"
        f"A step takes {1e3 * step_s:.1f} ms and has {measured.stages:,} stages of partitions on all ranks: "
        f"*partitions* records {rate:,.0f} a second (the goal is for {FAST:,} and more)."
    )


def _cells(mode: str, rounds: list[Round]) -> list[str]:
    off = [seen["off"]["s"] for seen in rounds]
    time = [seen[mode]["s"] for seen in rounds]
    # The noise is one untraced block against the other, not against their mean.
    again = "off" if mode == "off again" else "off again"
    cpu_off = [(seen["off"]["cpu"] + seen[again]["cpu"]) / 2 for seen in rounds]
    drain = [seen[mode]["drain"] for seen in rounds]
    cpu = [seen[mode]["cpu"] + drained for seen, drained in zip(rounds, drain, strict=True)]
    added = [1e6 * (one - other) for one, other in zip(time, off, strict=True)]
    return [
        f"{mode} / off",
        percent_more(median_of([one / other for one, other in zip(time, off, strict=True)]), len(rounds)),
        ranged(median_of(added), len(rounds), "+.1f"),
        percent_more(ratio_of_sums(cpu, cpu_off), len(rounds)),
        f"{100 * sum(drain) / sum(cpu_off):.2f} %",
        f"<= {LIMIT} %, aim {AIM} %" if mode == "partitions" else "",
    ]

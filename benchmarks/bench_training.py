"""What tracing adds to training, drain included, beside torch.profiler and the SDK: ``python -m benchmarks training``.

For each workload one torchrun job of two ranks, on Gloo, on GPUs on NCCL, works in short blocks. A round holds one
block of every mode in an order drawn anew; both ranks switch at the same steps, and the first steps after a switch do
not count:

- *off* and *off again*: torch unpatched, every function is the object it was;
- *step* and *phase*: traced at that level, otherwise the default mode (crash-safe ring, run directory, no endpoint);
- *torch.profiler*: CPU activities, otherwise its defaults, running for the block. Collecting is counted;
  `stop`, which turns what was collected into events, is not: it is said below the table;
- *SDK span per call*: a span of the OpenTelemetry SDK with six attributes where *phase* records a batch, forward,
  backward, optimizer, collective or wait (not for the step, nor between batch and forward: two fewer a step), a
  `BatchSpanProcessor`, and an exporter that encodes to OTLP and drops the bytes. Its thread is part of the process.

The last two workloads are the first again while the collector is away: its port is closed, or it is a black hole
that takes connections and never answers. All spans go out there, so all are spilled.

The drain process is stopped (SIGSTOP) while any other block runs than our own, so that it does all its work in
traced blocks, and none for them elsewhere.

Time: seconds per step of a block on rank 0, divided by that of the same round's *off*; the median over rounds.
*off again* divided by *off* is the noise. CPU: seconds per step of both trainers (``process_time``, all
threads) and of the drain, summed over all rounds, divided by the sum of *off* and *off again*, halved.
Where the interval of the time is wider than the limit, CPU decides. *CPU of phase* is what a mode adds in CPU,
divided by what *phase* adds. Intervals hold 95 % of resampled rounds.
"""

import argparse
import json
import socket
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks._processes import RANKS, scratch, torchrun
from benchmarks._stats import Round, median_of, merged, percent_more, ranged, ratio_of_sums, table, with_interval

BLOCK_S = 0.5
LIMITS = {"step": 0.5, "phase": 2.0}
"""Percent that a traced training step may take longer."""


@dataclass(frozen=True)
class Workload:
    """A job of `_jobs`, and what its times are counted by: a training step, or a call of a collective.

    Attributes:
        collector: How the collector is away: `CLOSED`, `BLACK_HOLE`; "" for no endpoint.
    """

    job: str
    name: str
    unit: str = "step"
    collector: str = ""


CLOSED, BLACK_HOLE = "a closed port", "a black hole"

GPU = Workload("gpu", "DDP, 6 x TransformerEncoderLayer(512), on GPUs")

WORKLOADS = (
    Workload("small", "DDP, 12 x Linear(256)"),
    Workload("large", "DDP, 12 x Linear(1024)"),
    *([GPU] if Path("/dev/nvidiactl").exists() else []),
    Workload("fsdp", "FSDP2, 6 x MLP(128)"),
    Workload("accumulation", "DDP, 4 micro-batches, `no_sync`"),
    Workload("sync", "all_reduce of 1 KiB", "call"),
    Workload("async", "all_reduce of 1 KiB, 8 in flight", "call"),
    *(
        Workload("small", f"DDP, 12 x Linear(256), the collector {away}", collector=away)
        for away in (CLOSED, BLACK_HOLE)
    ),
)


def run(
    rounds: int,
    workloads: Sequence[Workload] = WORKLOADS,
    block_s: float = BLOCK_S,
    modes: Sequence[str] = (),
) -> str:
    """Measure and return the tables in markdown, of *modes* alone where there are any."""
    return "\n\n".join(_report(workload, _rounds(workload, rounds, block_s, modes)) for workload in workloads)


def _rounds(workload: Workload, rounds: int, block_s: float, modes: Sequence[str]) -> list[Round]:
    with scratch() as folder, collector(workload.collector) as env:
        torchrun(folder, "benchmarks._training_rank", workload.job, rounds, block_s, *modes, **env)
        seen = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    return [merged(ranks) for ranks in zip(*seen, strict=True)]


@contextmanager
def collector(away: str) -> Iterator[dict[str, str]]:
    """Have a collector that is *away*; yield the variables that send everything there."""
    if not away:
        yield {}
        return
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # who connects is refused until somebody listens
        if away == BLACK_HOLE:
            taken.listen()
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        yield {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint, "OTEL_DLTRACE_STEPS": "all", "OTEL_DLTRACE_SPAN_BUDGET": "0"}


def _report(workload: Workload, rounds: list[Round]) -> str:
    """Return the table of *workload*, and what it takes untraced."""
    modes = [_Costs(mode, rounds) for mode in rounds[0] if mode != "off"]
    by_name = {costs.mode: costs for costs in modes}
    phase = by_name.get("phase")
    scale, short = (1e3, "ms") if workload.unit == "step" else (1e6, "us")
    head = [
        f"{workload.name}, {len(rounds)} rounds",
        "time (95 %)",
        f"+ us a {workload.unit} (95 %)",
        "CPU, trainers + drain (95 %)",
        f"+ CPU us a {workload.unit} (95 %)",
        "of it drain",
        "CPU of phase (95 %)",
        "goal",
    ]
    rows = [[*costs.cells(), costs.beside(phase) if phase else "", _goal(workload, costs.mode)] for costs in modes]
    time_s = statistics.median(modes[-1].off) * scale
    cpu_s = statistics.mean(modes[-1].cpu_off) * scale
    return (
        f"{table(head, rows)}\n\n"
        f"A {workload.unit} takes {time_s:.1f} {short} and {cpu_s:.1f} {short} of CPU on {RANKS} ranks."
        f"{_stop(by_name.get('torch.profiler'), scale, short)}"
    )


def _stop(profiler: "_Costs | None", scale: float, short: str) -> str:
    """Return the sentence on what leaving the *profiler* takes."""
    if profiler is None:
        return ""
    stop_s = statistics.median(profiler.of("left")) * scale
    return f" The profiler's `stop` takes another {stop_s:.1f} {short} for each, which is not counted."


def _goal(workload: Workload, mode: str) -> str:
    return f"<= {LIMITS[mode]} %" if workload.unit == "step" and mode in LIMITS else ""


class _Costs:
    """What *mode* costs beside *off* in the same *rounds*."""

    def __init__(self, mode: str, rounds: list[Round]) -> None:
        self.mode, self.rounds = mode, rounds
        self.off = [seen["off"]["s"] for seen in rounds]
        # The noise is one untraced block against the other, not against their mean.
        again = "off" if mode == "off again" else "off again"
        self.cpu_off = [(seen["off"]["cpu"] + seen[again]["cpu"]) / 2 for seen in rounds]
        self.cpu = [cpu + drain for cpu, drain in zip(self.of("cpu"), self.of("drain"), strict=True)]

    def of(self, what: str) -> list[float]:
        """Return one figure of all rounds."""
        return [seen[self.mode][what] for seen in self.rounds]

    def cells(self) -> list[str]:
        """Return the cells of its row that need no other mode."""
        ratios = [seconds / off for seconds, off in zip(self.of("s"), self.off, strict=True)]
        added = [1e6 * (seconds - off) for seconds, off in zip(self.of("s"), self.off, strict=True)]
        number = len(self.rounds)
        return [
            f"{self.mode} / off",
            percent_more(median_of(ratios), number),
            ranged(median_of(added), number, "+.1f"),
            percent_more(ratio_of_sums(self.cpu, self.cpu_off), number),
            ranged(lambda chosen: 1e6 * self._added(chosen) / len(chosen), number, "+.1f"),
            f"{100 * sum(self.of('drain')) / sum(self.cpu_off):.2f} %",
        ]

    def beside(self, other: "_Costs") -> str:
        """Return what it adds in CPU, divided by what *other* adds; "?" where that is not told from nothing."""
        if self.mode in ("off again", other.mode):
            return ""
        number = len(self.rounds)
        if with_interval(other._added, number)[1] <= 0:
            return "?"
        return ranged(lambda chosen: self._added(chosen) / other._added(chosen), number, ".1f", "x")

    def _added(self, chosen: Sequence[int]) -> float:
        return sum(self.cpu[i] - self.cpu_off[i] for i in chosen)


def main() -> None:
    """Run some workloads and modes."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_training", description="Run some of it.")
    parser.add_argument("rounds", type=int)
    local = [workload for workload in WORKLOADS if not workload.collector]
    jobs = [workload.job for workload in local]
    parser.add_argument("--jobs", nargs="+", choices=jobs, help="those whose collector is not away; default: all")
    parser.add_argument("--modes", nargs="+", default=[], help="beside off and off again; default: all")
    parser.add_argument("--seconds", type=float, default=BLOCK_S, help="that a block takes")
    options = parser.parse_args()
    chosen = [workload for workload in local if workload.job in options.jobs] if options.jobs else WORKLOADS
    print(run(options.rounds, chosen, options.seconds, options.modes))


if __name__ == "__main__":
    main()

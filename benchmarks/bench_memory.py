"""What a traced rank and its drain hold in memory, beside torch.profiler and the SDK: ``python -m benchmarks memory``.

Each figure is from a torchrun job of its own: two ranks train a model of twelve Linear(32) under
DistributedDataParallel for so many steps that the ring goes round more than once, then read
``/proc/self/smaps``. Nothing in them is of ours unless ``OTEL_DLTRACE=1`` brings it, through the .pth file.
Jobs of the four kinds take turns. *torch.profiler* has been running all the time and holds what it has
collected, above a gigabyte a rank; *SDK* makes a span per call, as in the benchmark ``training``. The drain is
read while it works.

RSS counts a page that several processes have mapped in each of them, PSS shares it out among them: the ring, mapped
by rank and drain, and torch, mapped by both ranks. Figures are medians over jobs (of the mean of both ranks);
intervals hold 95 % of resampled jobs.
"""

import json
import statistics
from dataclasses import dataclass

from benchmarks._processes import RANKS, scratch, torchrun
from benchmarks._stats import median_of, ranged, table

STEPS = 6000
UNTRACED, TRACED = "rank, untraced", "rank, traced"


@dataclass(frozen=True)
class Case:
    """A kind of job: what traces it."""

    name: str
    peer: str = ""
    switch: str = "0"


CASES = (
    Case(UNTRACED),
    Case(TRACED, switch="1"),
    Case("rank, torch.profiler", peer="profiler"),
    Case("rank, SDK span per call", peer="sdk"),
)

Held = dict[str, float]
"""Bytes: ``rss``, ``pss``, and the rings' part of them."""


def run(rounds: int) -> str:
    """Measure and return the table in markdown."""
    seen = [_round() for _ in range(rounds)]
    head = [f"after {STEPS:,} steps, {rounds} jobs each", "RSS, MiB (95 %)", "PSS, MiB (95 %)", "PSS added (95 %)"]
    rows = []
    for name in seen[0]:
        held = [round_[name] for round_ in seen]
        rows.append([name, _column(held, "rss"), _column(held, "pss"), _added(name, seen)])
        if name == TRACED:
            rows.append(["of it the ring", _column(held, "ring rss"), _column(held, "ring pss"), ""])
    return table(head, rows)


def _round() -> dict[str, Held]:
    """Run a job of each kind; return what their ranks, and the drain of the traced one, hold."""
    held: dict[str, Held] = {}
    for case in CASES:
        with scratch() as folder:
            peer = ["--peer", case.peer] if case.peer else []
            torchrun(folder, "benchmarks._memory_rank", STEPS, *peer, OTEL_DLTRACE=case.switch)
            ranks = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
        held[case.name] = _mean([one for rank in ranks for one in rank["rank"]])
        if case.name == TRACED:
            if not ranks[0]["drain"]:
                raise RuntimeError("the traced job had no drain: is the package installed, with its .pth file?")
            drain = _mean(ranks[0]["drain"])
    return {**held, "the drain, one per host": drain}


def _mean(processes: list[Held]) -> Held:
    return {what: statistics.mean(process[what] for process in processes) for what in processes[0]}


def _added(name: str, seen: list[dict[str, Held]]) -> str:
    """Return what *name* takes more than an untraced rank; the drain takes all of it."""
    base = (lambda _: 0.0) if "drain" in name else (lambda round_: round_[UNTRACED]["pss"])
    added = [round_[name]["pss"] - base(round_) for round_ in seen]
    return "" if name == UNTRACED else _mebibytes(added, "+.1f")


def _column(held: list[Held], what: str) -> str:
    return _mebibytes([one[what] for one in held], ".1f")


def _mebibytes(sizes: list[float], form: str) -> str:
    return ranged(median_of([size / (1 << 20) for size in sizes]), len(sizes), form)

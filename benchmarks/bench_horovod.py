"""What tracing Horovod costs, beside Horovod's own timeline and nothing: ``python -m benchmarks horovod``.

Real Horovod, two ranks on this machine over Gloo, 12 x Linear(256) under `DistributedOptimizer`: 24 all-reduces a step.
Each way to run is a job of its own, since Horovod asks for its timeline but once. All jobs are there all the time, and
take turns in blocks, in an order drawn anew in each round; who has not its turn is stopped (SIGSTOP), ranks and drain:

- *off* and *off again*: neither we nor Horovod's timeline; the second divided by the first is the noise;
- *collective*: traced at that level, which is all that who was late to what takes;
- *timeline*: Horovod's own, to a file on tmpfs, without us;
- *timeline and phase*: the same, read by us as it grows.

Time: seconds per step of a block on rank 0, divided by that of the same round's *off*; the median over rounds. CPU:
seconds per step of both ranks (all their threads) and of the drain, summed over all rounds, divided by those of *off*.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from benchmarks._processes import RANKS, ROOT, Drain, cpu_of, environment, scratch
from benchmarks._stats import median_of, percent_more, ranged, ratio_of_medians, ratio_of_sums, table, with_interval
from tests.support.build_horovod import CannotBuildError, horovod
from tests.support.horovod_job import environment as ranks_need
from tests.support.horovod_job import launcher

STEPS = 20
READY_S = 300
WAYS: dict[str, dict[str, str]] = {
    "off": {},
    "off again": {},
    "collective": {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_LEVEL": "collective"},
    "timeline": {"HOROVOD_TIMELINE": "timeline.json"},
    "timeline and phase": {"HOROVOD_TIMELINE": "timeline.json", "OTEL_DLTRACE": "1"},
}


class Job:
    """The ranks of one way to run, and the drain beside them.

    Args:
        folder: Where it runs.
        site: The folder that Horovod is in.
        variables: What makes it this way.
    """

    def __init__(self, folder: Path, site: Path, variables: dict[str, str]) -> None:
        folder.mkdir()
        needed = ranks_need(site) | {"PYTHONPATH": f"{site}:{ROOT}", "OTEL_DLTRACE_RUN": folder.name}
        env = environment(folder, **needed, **variables)
        for rank in range(RANKS):
            os.mkfifo(folder / f"job.{rank}.in")
        # Ranks that are stopped do not answer each other; Gloo gives up after 30 s, unless told.
        start = [*launcher("gloo", RANKS), "--gloo-timeout-seconds", "86400"]
        command = [*start, sys.executable, "-m", "benchmarks._horovod_rank", str(folder), "job"]
        self._log = (folder / "output").open("w+")
        self._launcher = subprocess.Popen(command, cwd=folder, env=env, stdout=self._log, stderr=self._log)
        self._answers = [folder / f"job.{rank}.out" for rank in range(RANKS)]
        self._pids = [int(line) for line in self._wait_for(0)]
        self._orders = [(folder / f"job.{rank}.in").open("w") for rank in range(RANKS)]
        self._told = 0
        self._drain = Drain(folder / "rings")
        self.stop()

    def _wait_for(self, line: int) -> list[str]:
        """Return the ranks' answers number *line*."""
        end = time.monotonic() + READY_S
        while True:
            texts = [path.read_text().splitlines(keepends=True) if path.exists() else [] for path in self._answers]
            if all(len(text) > line and text[line].endswith("\n") for text in texts):
                return [text[line] for text in texts]
            if self._launcher.poll() is not None or time.monotonic() > end:
                self._log.seek(0)
                raise RuntimeError(f"a job of Horovod failed:\n{self._log.read()[-8000:]}")
            time.sleep(0.002)

    def block(self) -> tuple[float, float]:
        """Have it train for a block; return the seconds, and the CPU seconds, that a step took."""
        self._signal(signal.SIGCONT)
        self._drain.go_on()
        before = self._cpu()
        for orders in self._orders:
            orders.write(f"{STEPS}\n")
            orders.flush()
        self._told += 1
        answers = self._wait_for(self._told)
        cpu = self._cpu() - before
        self.stop()
        return float(answers[0]), cpu / STEPS

    def stop(self) -> None:
        """Stop it for now."""
        self._signal(signal.SIGSTOP)
        self._drain.stop()

    def _signal(self, number: int) -> None:
        for pid in self._pids:
            os.kill(pid, number)

    def _cpu(self) -> float:
        return sum(map(cpu_of, self._pids)) + self._drain.cpu()

    def end(self) -> None:
        """End its ranks, if they are still there."""
        with suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        self._launcher.wait(READY_S)
        for file in (*self._orders, self._log):
            file.close()


@contextmanager
def _jobs(folder: Path, site: Path) -> Iterator[dict[str, Job]]:
    with ExitStack() as stack:
        jobs = {}
        for number, (name, variables) in enumerate(WAYS.items()):
            jobs[name] = Job(folder / f"{number:016x}", site, variables)
            stack.callback(jobs[name].end)
        yield jobs


def measure(rounds: int, site: Path) -> dict[str, list[tuple[float, float]]]:
    """Return the time and CPU of a step in each block of *rounds* rounds, by way to run."""
    chance = random.Random(0)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with scratch() as folder, _jobs(folder, site) as jobs:
        for _ in range(rounds):
            for name in chance.sample(list(jobs), len(jobs)):
                seen[name].append(jobs[name].block())
    return seen


def report(seen: dict[str, list[tuple[float, float]]]) -> str:
    """Return the table in markdown."""
    rounds = len(seen["off"])
    head = [
        f"{rounds} rounds",
        "time (95 %)",
        "CPU, ranks + drain (95 %)",
        "+ us a step (95 %)",
        "of timeline (95 %)",
        "goal",
    ]
    rows = [_row(name, seen) for name in WAYS if name != "off"]
    return (
        f"{table(head, rows)}\n\nA step takes {1e3 * sum(s for s, _ in seen['off']) / rounds:.1f} ms on {RANKS} ranks."
    )


def _row(name: str, seen: dict[str, list[tuple[float, float]]]) -> list[str]:
    rounds = len(seen["off"])
    (times, cpu), (off, cpu_off) = (list(zip(*seen[way], strict=True)) for way in (name, "off"))
    ratios = [one / other for one, other in zip(times, off, strict=True)]
    added = [1e6 * (one - other) for one, other in zip(times, off, strict=True)]
    beside = ""
    if name == "collective":
        theirs = [1e6 * (one - other) for (one, _), other in zip(seen["timeline"], off, strict=True)]
        if with_interval(median_of(theirs), rounds)[1] > 0:
            beside = ranged(ratio_of_medians(added, theirs), rounds, ".2f", "x")
        else:
            beside = "?"
    return [
        f"{name} / off",
        percent_more(median_of(ratios), rounds),
        percent_more(ratio_of_sums(cpu, cpu_off), rounds),
        ranged(median_of(added), rounds, "+.1f"),
        beside,
        "aim: at most half of timeline" if name == "collective" else "",
    ]


def run(rounds: int) -> str:
    """Measure and return the table in markdown."""
    try:
        site = horovod()
    except CannotBuildError as error:
        return f"not measured: Horovod cannot be built: {error}"
    return report(measure(rounds, site))

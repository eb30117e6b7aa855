"""One rank of `bench_pushpull`'s job: works in blocks, some traced and some not, and writes down what each cost.

Each round holds a block of every mode in an order that all ranks draw alike.
"""

import argparse
import gc
import json
import os
import random
import time
from pathlib import Path

import psutil
import torch
from torch import nn

import otel_dltrace
import otel_dltrace.pushpull.torch as bps
from benchmarks._jobs import Batches, Training
from benchmarks._processes import RINGS, Drain, Processes
from benchmarks._pushpull_job import OFF, ON
from otel_dltrace.instrument import registry
from otel_dltrace.model.semconv import Level
from otel_dltrace.pushpull import trace
from otel_dltrace.record.tracer import Tracer, live

WARM_UP = 3
"""Steps after switching that are not measured."""
STEPS = 10
"""From which the time of one is guessed."""
WIDTH, DEPTH, SAMPLES = 256, 12, 256
RATE, MORE = 10_700, 1.04
"""Stages a second of all ranks that there may be; a job that is faster gets a larger batch, by so much at a time."""
SOURCES = [source for source in registry.TABLES if source.startswith(("torch", "pushpull"))]
MODES = {"off": 0, "off again": 0, "operations": int(Level.COLLECTIVE), "partitions": int(Level.PARTITION)}
"""By name the level at which a block is recorded, 0 for one that is not traced."""


class PushPullTraining(Training):
    """A multilayer perceptron and its training loop."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))), SAMPLES, (WIDTH,))
        bps.broadcast_parameters(self.model.state_dict())
        self.optimizer = bps.DistributedOptimizer(self.optimizer, self.model.named_parameters())
        self.samples = SAMPLES

    def batch_of(self, samples: int) -> None:
        """Train on batches of *samples* from now on."""
        self.samples = samples
        self.batches = iter(torch.utils.data.DataLoader(Batches(samples, WIDTH), batch_size=None))


def meet() -> None:
    """Wait for the other ranks."""
    bps.push_pull(torch.zeros(1), name="meet")


def _serves(process: psutil.Process, rings: str) -> bool:
    try:
        env = process.environ()
        return env.get(RINGS) == rings and env.get("DMLC_ROLE") == "server" and "drain" not in process.cmdline()
    except psutil.Error:
        return False


def switch(tracer: Tracer, servers: Processes, level: int) -> None:
    """Record at *level* from now on, here and on the servers."""
    servers.signal(ON if level else OFF)
    if level:
        tracer.recorder.level = level
        live.tracer = tracer
        registry.instrument(SOURCES)
    else:
        registry.uninstrument()
        live.tracer = None


class Block:
    """Runs blocks."""

    def __init__(self, job: PushPullTraining, tracer: Tracer, servers: Processes, drain: Drain, steps: int) -> None:
        self.job, self.tracer, self.servers, self.drain, self.steps = job, tracer, servers, drain, steps

    def run(self, level: int) -> dict[str, float]:
        """Run a block at *level*; return seconds per step: of time, of CPU here and on servers, of the drain's."""
        switch(self.tracer, self.servers, level)
        if level:
            self.drain.go_on()
        gc.collect()  # what was patched and put back: else a block collects the whole heap for another's switch
        self.job.run(WARM_UP)
        meet()
        drained, worked, begun = self.drain.cpu(), time.process_time() + self.servers.cpu(), time.perf_counter()
        self.job.run(self.steps)
        seconds = time.perf_counter() - begun
        cpu = time.process_time() + self.servers.cpu() - worked
        drained = self.drain.cpu() - drained
        self.drain.stop()
        switch(self.tracer, self.servers, 0)
        return {"s": seconds / self.steps, "cpu": cpu / self.steps, "drain": drained / self.steps}


def rounds(block: Block, number: int) -> list[dict[str, dict[str, float]]]:
    """Return what each block of *number* rounds cost."""
    chance = random.Random(0)
    seen = []
    for _ in range(number):
        blocks = {mode: block.run(MODES[mode]) for mode in chance.sample([*MODES], len(MODES))}
        seen.append({mode: blocks[mode] for mode in MODES})
    return seen


class Count:
    """Counts the stages of push_pulls."""

    follows_stages = True

    def __init__(self) -> None:
        self.stages = 0

    def push_pull_started(self, *_told: object) -> "Count":
        """Count those of this one, too."""
        return self

    def request_sending(self, _partition: int) -> dict[str, str]:
        """Send nothing along."""
        return {}

    def stage_finished(self, *_told: object) -> None:
        """Count a stage."""
        self.stages += 1

    def completed(self, *_told: object) -> None:
        """Count nothing more."""

    waited = completed


def stages_in(job: PushPullTraining) -> int:
    """Return how many stages of partitions a step has on this rank."""
    count = Count()
    before = trace.observe(count)
    job.run(1)
    trace.observe(before)
    return count.stages


def step_s(job: PushPullTraining) -> float:
    """Return the seconds of a step, the same on all ranks."""
    job.run(WARM_UP)
    meet()
    begun = time.perf_counter()
    job.run(STEPS)
    return bps.push_pull(torch.tensor((time.perf_counter() - begun) / STEPS), name="seconds").item()


def slow_down(job: PushPullTraining, stages: int) -> float:
    """Give *job*, which has *stages* a step on this rank, a batch for `RATE`; return the seconds of a step."""
    of_all = bps.push_pull(torch.tensor(float(stages)), average=False, name="stages").item()
    while (seconds := step_s(job)) < of_all / RATE:
        job.batch_of(round(job.samples * MORE))
    return seconds


def main() -> None:
    """Work, and write what this rank saw to the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("rounds", type=int)
    parser.add_argument("seconds", type=float, help="that a block takes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bps.init()
    job = PushPullTraining()
    otel_dltrace.start()
    tracer = live.tracer
    assert tracer is not None
    is_first = bps.rank() == 0
    rings = os.environ[RINGS]
    servers = Processes(process for process in psutil.process_iter() if is_first and _serves(process, rings))
    switch(tracer, servers, int(Level.PARTITION))
    job.run(WARM_UP)
    otel_dltrace.flush(60)
    switch(tracer, servers, 0)
    meet()
    stages = stages_in(job)
    steps = max(1, round(options.seconds / slow_down(job, stages)))
    drain = Drain(Path(rings) if is_first else options.folder)
    drain.stop()
    block = Block(job, tracer, servers, drain, steps)
    try:
        rounds(block, min(2, options.rounds))
        seen = rounds(block, options.rounds)
    finally:
        drain.go_on()
        live.tracer = tracer  # for its end
    (options.folder / f"rank{bps.rank()}.json").write_text(json.dumps({"rounds": seen, "stages": stages}))
    bps.shutdown()


if __name__ == "__main__":
    main()

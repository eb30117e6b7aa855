"""One rank of `bench_training`'s job: works in blocks, some traced and some not, and writes down what each cost.

Run by torchrun. Each round holds a block of every mode in an order that all ranks draw alike.
"""

import argparse
import gc
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import profiler

import otel_dltrace
from benchmarks._jobs import JOBS, Job
from benchmarks._processes import RINGS, Drain
from benchmarks._sdk_spans import SdkSpans
from otel_dltrace.instrument import registry
from otel_dltrace.model.semconv import Level
from otel_dltrace.record.tracer import Tracer, live

WARM_UP = 3
"""Steps after switching that are not measured: in them the root module, for one, is looked for anew."""
UNTRACED = 2
"""So many modes are not traced: what all are compared with, and the noise."""
SOURCES = [source for source in registry.TABLES if source.startswith("torch")]
"""All but the one that joins spans of the SDK, which only the mode beside ours loads."""


def nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True)
class Mode:
    """One way to run the job.

    Attributes:
        name: The row of the table.
        enter: Puts it on.
        settle: Waits until its own threads have done what belongs to the block; CPU, not time, is counted.
        leave: Takes it off; neither is counted.
        drained: The drain process works for it.
    """

    name: str
    enter: Callable[[], None] = nothing
    settle: Callable[[], None] = nothing
    leave: Callable[[], None] = nothing
    drained: bool = False


def the_modes(tracer: Tracer) -> tuple[Mode, ...]:
    """Return the table of modes; *tracer* is the one of ours."""
    sdk, profiling = SdkSpans(), Profiling()
    return (
        Mode("off"),
        Mode("off again"),
        Mode("step", partial(trace, tracer, Level.STEP), leave=untrace, drained=True),
        Mode("phase", partial(trace, tracer, Level.PHASE), leave=untrace, drained=True),
        Mode("torch.profiler", profiling.start, leave=profiling.stop),
        Mode("SDK span per call", sdk.install, sdk.settle, sdk.remove),
    )


def those_of(modes: Sequence[Mode], names: Sequence[str]) -> tuple[Mode, ...]:
    """Return those *modes* that *names* has, all where it has none; the first two, untraced, always."""
    return tuple(mode for i, mode in enumerate(modes) if i < UNTRACED or not names or mode.name in names)


def trace(tracer: Tracer, level: Level) -> None:
    """Record at *level*."""
    tracer.recorder.level = int(level)
    live.tracer = tracer
    registry.instrument(SOURCES)


def untrace() -> None:
    """Give torch all its functions back."""
    registry.uninstrument()
    live.tracer = None


class Profiling:
    """torch.profiler with its defaults, on CPU activities; what it has collected is dropped."""

    def start(self) -> None:
        """Begin to collect."""
        self._profile = profiler.profile(activities=[profiler.ProfilerActivity.CPU])
        self._profile.start()

    def stop(self) -> None:
        """End, and drop the events."""
        self._profile.stop()
        del self._profile


def block(job: Job, drain: Drain, mode: Mode, steps: int) -> dict[str, float]:
    """Run a block in *mode*; return seconds per step or call: of time, of CPU, of the drain's, of leaving the mode."""
    mode.enter()
    if mode.drained:
        drain.go_on()
    gc.collect()  # what was patched and put back: else a block of one mode collects the whole heap for another's switch
    job.run(WARM_UP)
    dist.barrier()
    drained, worked, begun = drain.cpu(), time.process_time(), time.perf_counter()
    job.run(steps)
    seconds = time.perf_counter() - begun
    mode.settle()
    cpu, drained = time.process_time() - worked, drain.cpu() - drained
    drain.stop()
    begun = time.perf_counter()
    mode.leave()
    left = time.perf_counter() - begun
    number = steps * job.calls
    return {"s": seconds / number, "cpu": cpu / number, "drain": drained / number, "left": left / number}


Round = dict[str, dict[str, float]]


def rounds(job: Job, drain: Drain, modes: tuple[Mode, ...], number: int, steps: int) -> list[Round]:
    """Return what each block of *number* rounds cost."""
    chance = random.Random(0)
    seen = []
    for _ in range(number):
        blocks = {mode.name: block(job, drain, mode, steps) for mode in chance.sample(modes, len(modes))}
        seen.append({mode.name: blocks[mode.name] for mode in modes})
    return seen


def steps_in(job: Job, seconds: float) -> int:
    """Return how many steps take about *seconds*, the same on all ranks."""
    job.run(WARM_UP)
    dist.barrier()
    begun = time.perf_counter()
    job.run(WARM_UP)
    steps = torch.tensor(max(1, round(seconds * WARM_UP / (time.perf_counter() - begun))))
    dist.broadcast(steps, 0)
    return int(steps)


def meet(*, on_gpus: bool) -> None:
    """Join the other rank: over Gloo, and on GPUs over NCCL as well."""
    rank = os.environ["RANK"]
    if on_gpus and torch.cuda.device_count() == 1:  # NCCL refuses two ranks on one of a host: each has one to itself
        os.environ |= {"NCCL_HOSTID": f"host-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket"}
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")


def begin_to_trace(job: Job) -> Tracer:
    """Have this process bound and its drain started; return the tracer, with tracing off."""
    otel_dltrace.start()
    tracer = live.tracer
    assert tracer is not None
    trace(tracer, Level.PHASE)
    job.run(WARM_UP)
    otel_dltrace.flush(60)
    untrace()
    return tracer


def main() -> None:
    """Work, and write what this rank saw to the folder."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("rounds", type=int)
    parser.add_argument("seconds", type=float, help="that a block takes")
    parser.add_argument("modes", nargs="*", help="by name, beside off and off again; default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    meet(on_gpus=options.job == "gpu")
    job = JOBS[options.job]()
    tracer = begin_to_trace(job)
    dist.barrier()
    steps, modes = steps_in(job, options.seconds), those_of(the_modes(tracer), options.modes)
    drain = Drain(Path(os.environ[RINGS]) if dist.get_rank() == 0 else options.folder)
    drain.stop()
    try:
        rounds(job, drain, modes, min(2, options.rounds), steps)
        seen = rounds(job, drain, modes, options.rounds, steps)
    finally:
        drain.go_on()
        live.tracer = tracer  # for its end
    (options.folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Eight ranks in one process, for `bench_wire`: each line on standard input has them all record some steps.

Answers each line with the CPU time in ns that the recording took. A process of its own, since a ring's
reader tells by its lock whether its writer lives, which a process cannot ask about itself.
"""

import sys
import time
from dataclasses import asdict
from pathlib import Path
from time import monotonic_ns

from otel_dltrace.model.identity import Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import Level
from otel_dltrace.record.operation import Operation
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.steps import Steps

RANKS = 8
HOME = "bench"
STAGES = ("dataloader_next", "forward", "backward", "optimizer", "step_lr_schedulers")
BUCKETS = 16
PHASES = 98
SPANS = 1 + len(STAGES) + BUCKETS + PHASES
"""Spans of one rank's step."""


def a_recorder(rings: Path, directory: Path, rank: int) -> Recorder:
    """Return the recorder of one rank, bound."""
    bind = Bind("job-1", "1.00000000000000aa", "bench", rank=rank, local_rank=rank, world_size=RANKS)
    home = {"drain": HOME, "directory": str(directory), "host": "bench", "resource": {}, "bind": asdict(bind)}
    recorder = Recorder(rings, 4 << 20, home=home)
    recorder.bind(bind)
    return recorder


def record_step(steps: Steps, buckets: list[int], phases: list[int], first_seq: int) -> None:
    """Record what a rank sees in a step: stages, the buckets' all-reduces, the phases inside them."""
    recorder = steps.recorder
    span, level = recorder.span, int(Level.PHASE)
    steps.begin()
    for stage in STAGES:
        start = monotonic_ns()
        steps.stage(stage, start, monotonic_ns())
    for seq, bucket in enumerate(buckets, first_seq):
        operation = Operation(recorder, bucket, 26_214_400)
        for phase in phases[(seq - first_seq) :: BUCKETS]:
            start = monotonic_ns()
            span(phase, level, start, monotonic_ns(), 1_048_576, operation.number)
        operation.close(seq)
    steps.end()


def main(rings: Path, directory: Path) -> None:
    """Serve standard input until it ends."""
    ranks = []
    for rank in range(RANKS):
        recorder = a_recorder(rings, directory, rank)
        buckets = [
            recorder.intern(Descriptor("collective", "all_reduce", "0", RANKS, "nccl", f"bucket {k}", dtype="float32"))
            for k in range(BUCKETS)
        ]
        phases = [recorder.intern(Descriptor("phase", f"phase {k % 12}", tensor=f"layer {k}")) for k in range(PHASES)]
        ranks.append((Steps(recorder), buckets, phases))
    seq = 1
    for line in sys.stdin:
        begun = time.process_time_ns()
        for _ in range(int(line)):
            for steps, buckets, phases in ranks:
                record_step(steps, buckets, phases, seq)
            seq += BUCKETS
        print(time.process_time_ns() - begun, flush=True)
    for steps, _, _ in ranks:
        steps.recorder.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Processes that no launcher tells apart, and that all have a step 0: no span id comes twice."""

import sys
from collections import Counter
from pathlib import Path

import pytest

from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.model.semconv import STEP
from otel_dltrace.model.spans import SpanBatch
from tests.support.servers import free_port

STEPS = """
    import multiprocessing, sys
    import otel_dltrace

    def train(begun):
        for _ in range(3):
            with otel_dltrace.step(), otel_dltrace.phase("work"):
                pass

    if __name__ == "__main__":
        method, *more = sys.argv[1:]
        if more:
            train(0)
        context = multiprocessing.get_context(method)
        children = [context.Process(target=train, args=(1,)) for _ in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
"""


def twice(batches: list[SpanBatch]) -> list[int]:
    """Return the ids that several spans have."""
    counts = Counter(number for batch in batches for number in batch["span_id"].tolist())
    return [number for number, times in counts.items() if times > 1]


def steps_of(run: Path) -> list[tuple[int, list[int]]]:
    """Return, of each process in *run*, its rank and the steps of its spans."""
    return sorted((batch.process.bind.rank, sorted(set(batch["step"].tolist()))) for batch in read_run(run))


@pytest.mark.parametrize("under", ["run", ""])
@pytest.mark.parametrize("arguments", ["fork", "fork before", "spawn"])
def test_children_that_train_are_runs_of_their_own(under, arguments, place):
    """Each has a trace of its own for its step, though it goes on to count where its parent was."""
    command = [sys.executable, str(place.write(STEPS)), *arguments.split()]
    if under:
        command = [sys.executable, "-m", "otel_dltrace", "run", "--no-report", "--", *command]
    done = place.finish(place.popen(command, OTEL_DLTRACE="1"))
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()

    first = [[0, 1, 2]] if "before" in arguments else []
    then = [3, 4, 5] if first else [0, 1, 2]
    assert sorted(steps for run in place.runs() for _, steps in steps_of(run)) == [*first, then, then]
    assert len(place.runs()) == len(first) + 2
    assert twice(place.spans()) == []


def test_programs_of_a_script_are_runs_of_their_own(place):
    """The same program twice, under one command; a job by its id."""
    script = f"{sys.executable} {place.write(STEPS)} fork before"
    done = place.command("run", "--no-report", "--", "sh", "-c", f"{script} && {script}")
    assert done.returncode == 0, done.stderr

    assert len(place.runs()) == 6
    assert len({batch.process.bind.job for batch in place.spans()}) == 1
    assert twice(place.spans()) == []


RESTARTED = """
    import os, pathlib, time
    import otel_dltrace

    for _ in range(3):
        with otel_dltrace.step():
            pass
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    done = [pathlib.Path(f"{os.getppid()}.{restarts}.{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))]
    done[int(os.environ["RANK"])].touch()
    while not all(path.exists() for path in done):
        time.sleep(0.01)
    if restarts == "0":
        raise SystemExit("planted")
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_that_are_started_again_are_a_run_of_their_own(ranks, place):
    """By torchrun, of a program that makes no process group, under one command: its restarts, and a second one."""
    pytest.importorskip("torch")
    torchrun = f"{sys.executable} -m torch.distributed.run --master-port {free_port()} --nproc-per-node {ranks}"
    script = f"{torchrun} --max-restarts 1 {place.write(RESTARTED)}"
    done = place.command("run", "--no-report", "--", "sh", "-c", f"{script} && {script}")
    assert done.returncode == 0, done.stderr

    assert [sorted(batch.rank for batch in read_run(run)) for run in place.runs()] == [[*range(ranks)]] * 4
    assert twice(place.spans()) == []


INSIDE = """
    import os
    import otel_dltrace

    for number in range(3):
        with otel_dltrace.step():
            if number == 2:
                child = os.fork()
            with otel_dltrace.phase("work"):
                pass
    if child:
        os.waitpid(child, 0)
"""


def test_what_a_child_does_in_its_parent_s_step_stays_there(place):
    """Below the parent's step, which the child does not end."""
    done = place.run(INSIDE, OTEL_DLTRACE="1")
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()
    (run,) = place.runs()
    parent, child = sorted(read_run(run), key=len, reverse=True)
    last = parent["span_id"][parent.is_kind(STEP) & (parent["step"] == 2)]

    assert sorted(parent["step"].tolist()) == [0, 0, 1, 1, 2, 2]
    assert child["step"].tolist() == [2]
    assert child["parent_id"].tolist() == last.tolist()
    assert twice([parent, child]) == []


GROUP = """
    import multiprocessing, os
    import torch.distributed as dist
    import otel_dltrace

    def steps():
        for _ in range(2):
            with otel_dltrace.step():
                if dist.is_initialized():
                    dist.barrier()

    def train(rank, path):
        dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
        steps()
        dist.destroy_process_group()

    if __name__ == "__main__":
        steps()
        path = os.path.abspath("store")
        children = [multiprocessing.get_context("fork").Process(target=train, args=(rank, path)) for rank in range(2)]
        for child in children:
            child.start()
        for child in children:
            child.join()
            assert child.exitcode == 0
"""


def test_children_with_a_process_group_are_one_run(place):
    """What the group has agreed on is what counts, though their parent was bound already."""
    pytest.importorskip("torch")
    done = place.run(GROUP, OTEL_DLTRACE="1")
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()

    assert sorted(steps_of(run) for run in place.runs()) == [[(0, [0, 1])], [(0, [2, 3]), (1, [2, 3])]]
    assert twice(place.spans()) == []

"""Real Horovod for tests: built once, and programs run on its ranks over MPI or Gloo."""

import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from otel_dltrace.model.spans import SpanBatch
from tests.support.build_horovod import tool
from tests.support.paths import PROGRAMS, ROOT
from tests.support.processes import Place

PROGRAM = PROGRAMS / "horovod_calls.py"
GRADIENTS = ("allreduce.0.weight", "allreduce.0.bias", "allreduce.2.weight", "allreduce.2.bias")
TRACED = [sys.executable, "-m", "otel_dltrace", "run", "--no-report", "--"]
GLOO = [sys.executable, "-c", "from horovod.runner.launch import run_commandline; run_commandline()", "--gloo"]
ENDS_S = 240


def launcher(controller: str, ranks: int) -> list[str]:
    """Return the command that starts *ranks* ranks over MPI or Gloo."""
    if controller == "gloo":
        return [*GLOO, "-np", str(ranks), "-H", f"localhost:{ranks}"]
    mpirun = str(tool("mpirun"))
    return [mpirun, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]


def environment(site: Path) -> dict[str, str]:
    """Return what ranks need: Horovod, and no thread or wait that takes the processor from another rank."""
    return {
        "PYTHONPATH": f"{site}:{ROOT}",
        "OMP_NUM_THREADS": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
        "HOROVOD_LOG_LEVEL": "error",
    }


def run(place: Place, site: Path, controller: str, ranks: int, *arguments: str, ends: bool = True, **env: str) -> str:
    """Run `PROGRAM` traced on *ranks* ranks, to its good or its bad end; return what was said."""
    command = [*TRACED, *launcher(controller, ranks), sys.executable, str(PROGRAM), "log", *arguments]
    done = place.finish(place.popen(command, **environment(site), **env), ENDS_S)
    assert (done.returncode == 0) == ends, done.stdout + done.stderr
    assert "is not traced" not in done.stderr, done.stderr
    return done.stdout + done.stderr


def logged(place: Place, rank: int) -> dict[str, list[tuple[int, int, int]]]:
    """Return what a rank wrote down, by tensor: bytes, and the times between which each call was made."""
    out = defaultdict(list)
    for line in (place.folder / f"log.{rank}").read_text().splitlines():
        tensor, *call = json.loads(line)
        out[tensor].append(tuple(call))
    return dict(out)


def need(controller: str) -> None:
    """Skip where there is no such way to start ranks."""
    if controller == "mpi" and (tool("mpirun") is None or tool("mpicxx") is None):
        pytest.skip("there is no Open MPI to build Horovod with: mpirun and mpicxx")


def by_rank(place: Place, ranks: int) -> list[SpanBatch]:
    """Return the spans of each rank of the one run there is."""
    (run,) = place.runs()
    batches = sorted(place.spans(), key=lambda batch: batch.rank)
    assert [batch.rank for batch in batches] == [*range(ranks)], run
    return batches

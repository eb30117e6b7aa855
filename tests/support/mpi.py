"""Runs Python programs on the ranks of the MPI that there is."""

import shutil
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from otel_dltrace.model.attributes import collective_ids
from otel_dltrace.model.spans import SpanBatch
from tests.support.processes import Place, a_place

MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
RUN = [sys.executable, "-m", "otel_dltrace", "run", "--no-report", "--"]
ALLOWED = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


def mpiexec(place: Place, ranks: int, command: list[str], *, traced: bool) -> str:
    """Run a Python program on *ranks* ranks; return what it printed."""
    launched = [str(MPIEXEC), "-n", str(ranks), sys.executable, *command]
    done = place.finish(place.popen([*RUN, *launched] if traced else launched, **ALLOWED))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "is not traced" not in done.stderr, done.stderr
    return done.stdout


def spans_of(program: str, ranks: int, folder: Path) -> list[SpanBatch]:
    """Return what *program* recorded on *ranks* ranks."""
    if MPIEXEC is None:
        pytest.skip("there is no mpiexec")
    with a_place(folder) as place:
        place.write(program)
        mpiexec(place, ranks, ["program.py"], traced=True)
        return place.spans()


def joined(batches: list[SpanBatch]) -> list[list[tuple[str, int]]]:
    """Return name and rank of those that share an id, for each id."""
    by_id = defaultdict(list)
    for _, name, number, _, rank in [row for batch in batches for row in operations(batch) if row[2]]:
        by_id[number].append((name, rank))
    return sorted(map(sorted, by_id.values()))


def operations(batch: SpanBatch) -> list[tuple[str, str, int, int, int]]:
    """Return kind, name, id, group size and rank of each operation."""
    ids = collective_ids(batch).tolist()
    rank = batch.process.bind.rank
    described = [batch.descriptor_of(row) for row in range(len(batch))]
    return [
        (d.kind, d.name, number, d.group_size, rank)
        for d, number in zip(described, ids, strict=True)
        if d.kind in ("collective", "p2p")
    ]

"""Runs Python programs on the ranks of the MPI that there is."""

import shutil
import sys
from pathlib import Path

from tests.support.processes import Place

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

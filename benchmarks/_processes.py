"""The processes that benchmarks start: torchrun jobs and the drains beside them; none outlives its benchmark."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
RANKS = 2
RINGS = "OTEL_DLTRACE_RING_DIR"


def environment(folder: Path, **more: str) -> dict[str, str]:
    """Return an environment in which nothing is traced, and what is traced after all stays in *folder*."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OTEL_", "PYTHON"))}
    return env | {RINGS: str(folder / "rings"), "OTEL_DLTRACE_DIR": str(folder), "OMP_NUM_THREADS": "1"} | more


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Make a folder on tmpfs; afterwards end who traces or drains there, and remove it."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="dltrace-bench-", dir=shm if shm.is_dir() else None))
    try:
        yield folder
    finally:
        end_all(folder / "rings")
        shutil.rmtree(folder)


def torchrun(folder: Path, module: str, *arguments: object, **env: str) -> None:
    """Run *module* of the benchmarks on two ranks; *folder* and *arguments* are its arguments.

    Raises:
        RuntimeError: A rank failed; the message is what they printed.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command = [*launcher, "-m", module, str(folder), *map(str, arguments)]
    with (folder / "output").open("w+") as output:  # the profiler prints two lines for each block
        env = environment(folder, PYTHONPATH=str(ROOT), **env)
        done = subprocess.run(command, cwd=folder, env=env, stdout=output, stderr=output, check=False)
        if done.returncode:
            output.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed:\n{output.read()[-8000:]}")


def end_all(rings: Path) -> None:
    """End the processes that trace into *rings*, or drain it, and wait until they have ended."""
    found = [process for process in psutil.process_iter() if _traces_into(process, rings)]
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.terminate()
            process.resume()  # a drain may have been stopped
    _, alive = psutil.wait_procs(found, timeout=10)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()
    psutil.wait_procs(alive, timeout=10)


def _traces_into(process: psutil.Process, rings: Path) -> bool:
    try:
        return process.pid != os.getpid() and process.environ().get(RINGS) == str(rings)
    except psutil.Error:
        return False


class Processes:
    """Processes that work beside the ranks, seen from rank 0: for the other ranks there are none."""

    def __init__(self, processes: Iterable[psutil.Process]) -> None:
        self._processes = [*processes]

    def signal(self, number: int) -> None:
        """Send each the signal *number*."""
        for process in self._processes:
            process.send_signal(number)

    def cpu(self) -> float:
        """Return their CPU seconds so far, all threads."""
        return sum(cpu_of(process.pid) for process in self._processes)


class Drain(Processes):
    """The drain process: it is stopped while a block that is not traced runs.

    It works up to seconds after what it works on, so without this an untraced block would pay for
    the traced one before it, and the difference between the two would leave the drain out.
    """

    def __init__(self, rings: Path) -> None:
        super().__init__(p for p in psutil.process_iter() if _traces_into(p, rings) and "drain" in p.cmdline())

    def stop(self) -> None:
        """Stop it for now."""
        self.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run."""
        self.signal(signal.SIGCONT)

    def memory(self) -> list[dict[str, int]]:
        """Return what `memory_of` says of it; nothing where there is none."""
        return [memory_of(process) for process in self._processes]


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of the process *pid* so far, all threads."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)


def memory_of(process: psutil.Process) -> dict[str, int]:
    """Return the bytes that *process* has in memory: all, its share of them, and those of rings it has mapped.

    A page that n processes have mapped counts in full in ``rss``, and a n-th in ``pss``.
    """
    whole = process.memory_full_info()
    rings = [mapped for mapped in process.memory_maps() if mapped.path.endswith(".ring")]
    return {
        "rss": whole.rss,
        "pss": whole.pss,
        "ring rss": sum(ring.rss for ring in rings),
        "ring pss": sum(ring.pss for ring in rings),
    }

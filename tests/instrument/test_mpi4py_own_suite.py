"""mpi4py's own tests, from its source distribution: under tracing they pass as they do without."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.build_horovod import unpack
from tests.support.mpi import ALLOWED, MPIEXEC
from tests.support.processes import a_place

pytest.importorskip("mpi4py")

MODULES = (
    r"test_(attributes|cco_ngh_obj|cco_obj|comm|comm_topo|doc|exceptions|file|p2p_buf|p2p_buf_matched|p2p_obj"
    r"|p2p_obj_matched|pickle|request|subclass|win)\.py$"
)
"""What bears on the calls and takes a few seconds."""
MODULES_OF_SEVERAL = (
    r"test_(attributes|cco_ngh_obj|cco_obj|comm|comm_topo|p2p_buf|p2p_obj|p2p_obj_matched|request|subclass)\.py$"
)
"""Of these, what takes no more than that where three ranks share two cores."""
APART = 'exec "$@" 2> "said.${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-0}}"'
"""Has each rank say what it says in a file of its own."""


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest) -> Path:
    """The unpacked source distribution of the installed mpi4py, kept between runs."""
    version = importlib.metadata.version("mpi4py")
    folder = request.config.cache.mkdir(f"mpi4py-{version}")
    unpacked = folder / f"mpi4py-{version}"
    if not unpacked.exists():
        what = ["--no-binary", "mpi4py", "--no-deps", "--no-build-isolation", f"mpi4py=={version}", "-d", str(folder)]
        done = subprocess.run([sys.executable, "-m", "pip", "download", *what], capture_output=True, check=False)
        archive = folder / f"mpi4py-{version}.tar.gz"
        if not archive.exists():
            pytest.skip(f"the source distribution cannot be had: {done.stderr.decode()[-200:]}")
        unpack(archive, folder)
    return unpacked


def outcomes(folder: Path, source: Path, ranks: int, **env: str) -> list[dict[str, str]]:
    """Run the tests; return the outcome of each by its name, on each rank."""
    launched = [str(MPIEXEC), "-n", str(ranks)] if ranks > 1 else []
    modules = MODULES_OF_SEVERAL if ranks > 1 else MODULES
    tests = [sys.executable, str(source / "test" / "main.py"), "-v", "-i", modules]
    with a_place(folder) as place:
        done = place.finish(place.popen([*launched, "sh", "-c", APART, "sh", *tests], **ALLOWED, **env))
        said = [(place.folder / f"said.{rank}").read_text() for rank in range(ranks)]
    assert done.returncode == 0, said[0][-3000:] + done.stderr
    assert "is not traced" not in "".join(said)
    assert all(re.search(r"^Ran \d+ tests", text, re.MULTILINE) for text in said), said[0][-3000:]
    outcome = re.compile(r"^(test\w+ \([\w.]+\)).*? \.\.\. .*?(ok|FAIL|ERROR|skipped)", re.DOTALL | re.MULTILINE)
    return [dict(outcome.findall(text)) for text in said]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 3], ids=["one rank", "three ranks"])
def test_the_own_tests_of_mpi4py_pass_as_without_us(source: Path, tmp_path: Path, ranks: int) -> None:
    """Every test of these modules has the same outcome traced and untraced, on every rank."""
    if ranks > 1 and MPIEXEC is None:
        pytest.skip("there is no mpiexec")
    without = outcomes(tmp_path, source, ranks)
    assert min(map(len, without)) > 200
    assert outcomes(tmp_path, source, ranks, OTEL_DLTRACE="1") == without

"""mpi4py's own tests, from its source distribution: under tracing they pass as they do without."""

import importlib.metadata
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.support import a_place
from tests.test_mpi4py import ALLOWED

pytest.importorskip("mpi4py")

MODULES = (
    r"test_(attributes|cco_ngh_obj|cco_obj|comm|comm_topo|doc|exceptions|file|p2p_buf|p2p_buf_matched|p2p_obj"
    r"|p2p_obj_matched|pickle|request|subclass|win)\.py$"
)
"""What bears on the calls and takes a few seconds."""


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
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
    return unpacked


def outcomes(folder: Path, source: Path, **env: str) -> dict[str, str]:
    """Run the tests; return the outcome of each by its name."""
    with a_place(folder) as place:
        command = [sys.executable, str(source / "test" / "main.py"), "-v", "-i", MODULES]
        done = place.finish(place.popen(command, **ALLOWED, **env))
    assert "is not traced" not in done.stderr, done.stderr
    found = re.findall(
        r"^(test\w+ \([\w.]+\)).*? \.\.\. (ok|FAIL|ERROR|skipped)", done.stderr, re.DOTALL | re.MULTILINE
    )
    assert re.search(r"^Ran \d+ tests", done.stderr, re.MULTILINE), done.stderr[-3000:]
    return dict(found)


def test_the_own_tests_of_mpi4py_pass_as_without_us(source: Path, tmp_path: Path) -> None:
    """Every test of these modules has the same outcome traced and untraced."""
    without = outcomes(tmp_path, source)
    assert len(without) > 200
    assert outcomes(tmp_path, source, OTEL_DLTRACE="1") == without

"""MPICH's mpiexec has no name for what it starts: on one host, the process that starts the ranks is one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import Place

ASK = (
    "from otel_dltrace.settings.hydra import own_world; world = own_world(); print(world.run, world.start, flush=True)"
)
ONE_HOST = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}


@pytest.fixture
def proxy(tmp_path: Path) -> Path:
    """A shell that is called as Hydra's proxy."""
    path = tmp_path / "hydra_pmi_proxy"
    path.symlink_to(shutil.which("sh") or "/bin/sh")
    return path


def ranks_below(command: Path | str, **variables: str) -> list[tuple[str, str]]:
    """Return run and start as each of two ranks knows them that *command*, a shell, has begun, one behind a script."""
    ask = f"{sys.executable} -c '{ASK}'"
    script = f'PMI_RANK=0 {ask}; PMI_RANK=1 sh -c "{ask}; true"; true'
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PMI", "SLURM_", "I_MPI_"))}
    told = subprocess.check_output([command, "-c", script], env=env | variables, text=True)
    return [(run, start) for run, _, start in (line.partition(" ") for line in told.splitlines())]


def test_ranks_below_one_proxy_are_one_run_and_those_below_the_next_another(proxy: Path) -> None:
    """Whatever script each is behind."""
    first, second = ranks_below(proxy, **ONE_HOST), ranks_below(proxy, **ONE_HOST)
    assert len({*first, *second}) == 2
    assert (first[0], second[0]) == (first[1], second[1])
    assert all(run == start and len(run) == 16 for run, start in [*first, *second])


@pytest.mark.parametrize(
    ("variables", "known"),
    [
        pytest.param({**ONE_HOST, "PMI_SIZE": "4"}, ("", ""), id="ranks on other hosts, which have other proxies"),
        pytest.param({**ONE_HOST, "PMI_SPAWNED": "1"}, ("", ""), id="spawned"),
        pytest.param({**ONE_HOST, "PMI_SIZE": "4", "I_MPI_HYDRA_UUID": "u-1"}, ("u-1", "u-1"), id="Intel MPI there"),
    ],
)
def test_a_proxy_names_no_ranks_that_may_have_another(
    proxy: Path, variables: dict[str, str], known: tuple[str, str]
) -> None:
    """Intel MPI's variables do."""
    assert ranks_below(proxy, **variables) == [known] * 2


def test_a_single_rank_agrees_with_nobody_and_is_told_from_the_next_one(proxy: Path) -> None:
    """Below `otel-dltrace run` each start is another run all the same."""
    (run, start), _ = ranks_below(proxy, PMI_SIZE="1", MPI_LOCALNRANKS="1")
    assert (run, len(start)) == ("", 16)


def test_without_a_proxy_nothing_is_known() -> None:
    """As of other launchers that speak PMI."""
    assert ranks_below("sh", **ONE_HOST) == [("", "")] * 2


STEPS = """
import otel_dltrace
with otel_dltrace.step():
    pass
"""
APART = (
    "otel_dltrace: nothing says which 2 ranks of MPI are one run, so each has a run of its own: "
    "start them with `otel-dltrace run`, or set OTEL_DLTRACE_RUN alike on all ranks, anew for each run"
)


@pytest.mark.parametrize(
    ("variables", "is_told"),
    [
        pytest.param({"PMI_RANK": "0"}, True, id="rank 0"),
        pytest.param({"PMI_RANK": "1"}, False, id="another one"),
        pytest.param({"PMI_RANK": "0", "PMI_SPAWNED": "1"}, False, id="spawned"),
        pytest.param({"PMI_RANK": "0", "OTEL_DLTRACE_RUN": "r"}, False, id="a run"),
    ],
)
def test_rank_0_says_that_each_rank_has_a_run_of_its_own(
    place: Place, variables: dict[str, str], is_told: bool
) -> None:
    """Where MPI's launcher has no name for all, and none is given."""
    done = place.run(STEPS, OTEL_DLTRACE="1", PMI_SIZE="2", MPI_LOCALNRANKS="1", **variables)
    assert done.returncode == 0, done.stderr
    assert (APART in done.stderr.splitlines()) is is_told

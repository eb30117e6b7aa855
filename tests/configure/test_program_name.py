"""A job is named after its program, however Python was started: by script, module, runner or multiprocessing."""

import sys

import pytest

from otel_dltrace.settings import program
from otel_dltrace.settings.process import JOB_NAME, job_name_of
from otel_dltrace.settings.program import program_name

COMMANDS = {
    "python train.py --epochs 3": "train",
    "/usr/bin/python3.11 -u jobs/train.py": "train",
    "python -X importtime -Wignore -W error train.py": "train",
    "python -m solv 100": "solv",
    "python -um project.train conf.py": "project.train",
    "python -msolv": "solv",
    "python -m mpi4py script.py": "script",
    "python -m mpi4py.futures -m solv": "solv",
    "python -m torch.distributed.run --nproc-per-node 2 train.py": "train",
    "python -m cProfile -o out train.py": "train",
    "python -m coverage run --branch train.py": "train",
    "python -m trace --count train.py": "train",
    "python -m pdb train.py": "train",
    "python --check-hash-based-pycs always train.py": "train",
    "python - x.py": "",
    "python -m mpi4py --version": "mpi4py",
    "-n 2 -x PYTHONPATH python3.12 min.py 100": "min",
    "python -uc pass train.py": "",
    "python -i": "",
    "python -m": "",
    "./solver input.txt": "",
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_what_the_program_is_called(command):
    """Its script or module, and not that of what runs it; options of Python and of a launcher are passed over."""
    assert program_name(command.split()) == COMMANDS[command]


@pytest.mark.parametrize(
    ("words", "argv", "name"),
    [
        pytest.param(["python", "-m", "solv"], ["-m"], "solv", id="a module, before Python has found it"),
        pytest.param(["python", "-c", "pass"], ["-c"], "job", id="code"),
        pytest.param(["python"], ["-"], "job", id="standard input"),
        pytest.param(["solver", "in.txt"], ["/opt/solver"], "solver", id="a Python within another program"),
        pytest.param(["python", "-c", "from multiprocessing.spawn import spawn_main"], ["-c"], "job", id="no parent"),
    ],
)
def test_a_process_names_its_job(monkeypatch, words, argv, name):
    """After the words that Python was started with; what nobody named is a job."""
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(program.os, "getppid", lambda: 0)

    assert job_name_of({}) == name


SPAWNS = """
import multiprocessing
import sys
import otel_dltrace

def work(below):
    with otel_dltrace.phase("work"):
        pass
    if below:
        start(below - 1)

def start(below):
    child = multiprocessing.get_context(sys.argv[1]).Process(target=work, args=(below,))
    child.start()
    child.join()

if __name__ == "__main__":
    start(1)
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_what_multiprocessing_starts_is_of_the_program_s_job(place, method):
    """A child and a child of it are named as the program, whose arguments they get later."""
    place.write(SPAWNS, "solv.py")
    done = place.finish(place.popen([sys.executable, "-m", "solv", method], OTEL_DLTRACE="1"))
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()

    assert [batch.process.bind and batch.process.bind.job_name for batch in place.spans()] == ["solv"] * 2


@pytest.mark.parametrize(
    ("launcher", "words", "env", "name"),
    [
        pytest.param("mpiexec", "-n 1 python a.py 3 : -n 2 python -m b", {}, "a+b", id="two programs"),
        pytest.param("mpirun", "python a.py : python a.py 2 : ./native", {}, "a", id="one program, several ways"),
        pytest.param("mpiexec", "-n 2 python a.py", {}, "", id="one program"),
        pytest.param("mpiexec", "python a.py : python b.py", {JOB_NAME: "given"}, "given", id="named further out"),
        pytest.param("script", "python a.py : python b.py", {}, "", id="no mpiexec"),
    ],
)
def test_run_names_an_mpi_job_of_several_programs(place, launcher, words, env, name):
    """Its ranks would each name it as their own program, and have as many run directories; other programs still do."""
    path = place.folder / launcher
    path.write_text(f'#!/bin/sh\necho "named ${JOB_NAME}"\n')
    path.chmod(0o755)
    done = place.command("run", "--no-report", "--", str(path), *words.split(), **env)

    assert (done.returncode, done.stdout) == (0, f"named {name}\n"), done.stderr

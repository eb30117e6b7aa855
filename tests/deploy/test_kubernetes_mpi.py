"""An MPI rank is started over ssh: what the worker's container says must reach it all the same."""

import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kube import overlay
from tests.support.pods import Around, Pod
from tests.support.servers import free_port, wait_until

SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")
CARRIED = ("OTEL_", "PYTHONPATH")


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Pod]:
    """A worker's pod that has not been started."""
    objects = overlay("mpijob")
    template = next(o for o in objects if o["kind"] == "MPIJob")["spec"]["mpiReplicaSpecs"]["Worker"]["template"]
    labels = {"training.kubeflow.org/job-name": "train", "training.kubeflow.org/replica-index": "1"}
    pod = Pod(template, Around(objects, metadata={"labels": labels, "name": "train-worker-1"}), tmp_path / "worker")
    yield pod
    pod.clean_up()


def test_sshd_gives_ranks_every_variable_of_the_container_that_tracing_reads(worker, tmp_path):
    """A real sshd with the arguments of the manifest, and a session in it: the values are the container's own."""
    ssh = shutil.which("ssh")
    if SSHD is None or ssh is None or shutil.which("ssh-keygen") is None:
        pytest.skip("sshd, ssh and ssh-keygen are not all here")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    port = free_port()
    config = tmp_path / "sshd_config"
    keys = f"HostKey {tmp_path / 'host'}\nAuthorizedKeysFile {tmp_path / 'user.pub'}\nStrictModes no\n"
    config.write_text(f"Port {port}\nListenAddress 127.0.0.1\n{keys}PidFile none\nUsePAM no\n")
    checked = subprocess.run([SSHD, "-t", "-f", config], capture_output=True, text=True, check=False)
    if checked.returncode:
        pytest.skip(f"sshd does not run here: {checked.stderr.strip()}")
    (container,) = worker.containers
    command, env = worker.command(container)
    assert command[0] == "/usr/sbin/sshd"
    with (tmp_path / "sshd.log").open("wb") as log:
        server = subprocess.Popen([SSHD, *command[1:], "-f", config], stderr=log)
    try:
        login = [ssh, "-F", "none", "-p", str(port), "-i", tmp_path / "user", "-o", "StrictHostKeyChecking=no"]
        login += ["-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes", f"{getpass.getuser()}@127.0.0.1", "env"]
        wait_until(lambda: "Server listening" in (tmp_path / "sshd.log").read_text(), what="sshd listening")
        answer = subprocess.run(login, capture_output=True, text=True, check=False)
    finally:
        server.terminate()
        server.wait()

    assert answer.returncode == 0, answer.stderr + (tmp_path / "sshd.log").read_text()
    session = dict(line.split("=", 1) for line in answer.stdout.splitlines())
    wanted = {name: value for name, value in env.items() if name.startswith(CARRIED)}
    assert {name: session.get(name) for name in wanted} == wanted
    assert wanted["OTEL_RESOURCE_ATTRIBUTES"].startswith("k8s.pod.label.training.kubeflow.org/job-name=train,")


def test_the_manifest_names_every_variable_of_the_container_that_tracing_reads(worker):
    """The same by reading: SetEnv carries all of them."""
    (container,) = worker.containers
    command, env = worker.command(container)
    carried = dict(pair.split("=", 1) for pair in command[-1].removeprefix("SetEnv=").split(" "))
    assert carried == {name: value for name, value in env.items() if name.startswith(CARRIED)}


def test_each_start_of_the_launcher_is_a_run_of_its_own(tmp_path):
    """In one pod, too, as after a failure: mpirun carries the run's id, which is one for all ranks."""
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    mpirun.chmod(0o755)
    launcher = next(o for o in overlay("mpijob") if o["kind"] == "MPIJob")["spec"]["mpiReplicaSpecs"]["Launcher"]
    (container,) = launcher["template"]["spec"]["containers"]
    command, env = [*container["command"], *container["args"]], {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    started = [subprocess.check_output(command, env=env, text=True).splitlines() for _ in range(2)]

    (one, other), rest = zip(*((words.pop(3), words) for words in started), strict=True)
    assert rest == (["-n", "4", "-x", "python", "/workspace/train.py"],) * 2
    assert one != other
    assert all(re.fullmatch(r"OTEL_DLTRACE_RUN=[0-9a-f-]{36}", run) for run in (one, other))

"""The launcher and its command: what a job's processes are given, and how they end."""

import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from otel_dltrace.cli.main import main
from otel_dltrace.configure.outcome import host_is_drained
from otel_dltrace.export.rundir.host_folder import host_folder_name
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.pushpull import folder as folder_module
from otel_dltrace.pushpull.launch import Plan, launch
from otel_dltrace.record.process_id import boot_id
from tests.support.paths import ROOT
from tests.support.processes import nobody
from tests.support.servers import free_port, wait_until

LAUNCH = [sys.executable, "-m", "otel_dltrace", "pushpull", "launch"]


def launched(*arguments: str, program: str) -> "subprocess.CompletedProcess[str]":
    """Run a Python *program* under the launcher."""
    command = [*LAUNCH, *arguments, "--", sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)


def test_local_ranks_meet_among_temporary_files_where_dev_shm_takes_no_folder(monkeypatch):
    """As in a container whose user may not write there."""
    with TemporaryDirectory() as closed, TemporaryDirectory() as open_to_all:
        for folder, mode in ((closed, 0o755), (open_to_all, 0o777)):
            Path(folder).chmod(mode)
        monkeypatch.setattr(folder_module, "SHARED", Path(closed))
        monkeypatch.setattr("tempfile.tempdir", open_to_all)
        with nobody(), folder_module.job_folder() as ours:
            assert (ours.parent, ours.is_dir()) == (Path(open_to_all), True)


def test_without_any_folder_a_launch_says_so(monkeypatch):
    """And old ones of ours are looked for in /dev/shm all the same."""

    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(folder_module, "SHARED", Path("/proc/none"))
    monkeypatch.setattr("tempfile.gettempdir", none)

    folder_module.remove_orphans()
    with pytest.raises(ConfigError, match="no writable folder: set TMPDIR"), folder_module.job_folder():
        pass


def test_each_process_is_told_its_place():
    """The variables that BytePS's programs read, and ours; nothing is left when the job has ended."""
    program = """
import json
import os
names = "DMLC_ROLE DMLC_WORKER_ID DMLC_NUM_WORKER BYTEPS_LOCAL_RANK BYTEPS_LOCAL_SIZE DMLC_NUM_SERVER DMLC_PS_ROOT_URI"
said = [os.environ[name] for name in names.split()]
said += [str(len(os.environ["PUSHPULL_TOKEN"])), os.environ["PUSHPULL_DIR"]]
os.write(1, (" ".join(said) + os.linesep).encode())
"""
    done = launched("--workers", "2", "--local-ranks", "2", "--servers", "0", program=program)
    lines = [line.rpartition(" ") for line in sorted(done.stdout.splitlines())]
    assert [before for before, _, _ in lines] == [
        f"worker {worker} 2 {local_rank} 2 0 127.0.0.1 32" for worker in (0, 1) for local_rank in (0, 1)
    ]
    folders = {Path(folder) for _, _, folder in lines}
    assert (done.returncode, len(folders), any(folder.exists() for folder in folders)) == (0, 2, False)


MEETS = """
import os
import numpy as np
from otel_dltrace.pushpull.engine import Engine
from otel_dltrace.pushpull.options import read_env
engine = Engine(*read_env(os.environ))
engine.start()
values = np.ones(2, np.float32)
engine.wait(engine.push_pull(engine.declare("w"), values, average=False))
engine.stop()
os.write(1, b"%g\\n" % values[0])
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python can be told so since 3.11")
def test_what_lies_in_the_working_directory_is_no_module_of_a_server(tmp_path, monkeypatch):
    """As its own `otel_dltrace.py`, or `grpc.py`; a program of the user's finds there what it always did."""
    monkeypatch.chdir(tmp_path)
    for name in ("otel_dltrace", "grpc", "queue"):
        (tmp_path / f"{name}.py").write_text("from pathlib import Path\nPath('taken').touch()\nraise SystemExit(7)\n")
    begins = "import time\ntime.sleep(3)\nimport grpc"

    assert launch(Plan((sys.executable, "-c", begins), grace_s=0.2), os.environ) == 7
    assert (tmp_path / "taken").exists()
    (tmp_path / "taken").unlink()
    assert launch(Plan(("sh", "-c", "sleep 3; test ! -e taken")), os.environ) == 0


@pytest.mark.parametrize(
    ("host", "env"),
    [
        pytest.param("127.0.0.2", {}, id="root"),
        pytest.param("", {"DMLC_NODE_HOST": "127.0.0.2"}, id="own address"),
    ],
)
def test_servers_listen_where_they_are_looked_for(host, env, monkeypatch):
    """At the root that is asked for, whatever other address this host has told its servers before."""
    for name, value in {**env, "PUSHPULL_TIMEOUT": "120"}.items():
        monkeypatch.setenv(name, value)
    root = ["--root", f"{host}:{free_port()}"] if host else []
    done = launched("--workers", "2", "--servers", "2", *root, program=MEETS)
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr


FAILING = """
import os, pathlib, signal, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
ready = pathlib.Path({ready!r})
if os.environ["DMLC_WORKER_ID"] == "0":
    ready.with_suffix(".tmp").write_text(str(os.getpid()))
    ready.with_suffix(".tmp").rename(ready)
    signal.sigwait([signal.SIGTERM])
else:
    while not ready.exists():
        time.sleep(0.01)
    {fails}
"""


@pytest.mark.parametrize(
    ("fails", "code", "says"),
    [
        pytest.param("raise SystemExit(7)", 7, "worker 1 ended with exit code 7", id="exit code"),
        pytest.param("os.kill(os.getpid(), 9)", 137, "worker 1 was killed by SIGKILL", id="signal"),
    ],
)
def test_the_first_to_fail_gives_the_exit_code(fails, code, says, tmp_path, capfd):
    """The others are ended: none stays behind."""
    ready = tmp_path / "ready"
    program = (sys.executable, "-c", FAILING.format(ready=str(ready), fails=fails))
    assert launch(Plan(program, workers=2, servers=0, grace_s=0.2), os.environ) == code
    assert says in capfd.readouterr().err
    with pytest.raises(ProcessLookupError):
        os.kill(int(ready.read_text()), 0)


KILLED = """
import os, pathlib, signal, sys, time
if os.environ["DMLC_WORKER_ID"] == "1":
    os.kill(os.getppid(), signal.SIGSTOP)  # it sees neither end before the other
    os.kill(os.getpid(), signal.SIGKILL)
while " T " not in pathlib.Path(f"/proc/{os.getppid()}/stat").read_text():
    time.sleep(0.01)
sys.exit(3)  # for want of the other
"""


def states_below(pid: int) -> list[str]:
    """Return the states of the processes that *pid* has started."""
    return [child.status() for child in psutil.Process(pid).children()]


def test_of_those_that_failed_at_once_the_killed_one_is_to_blame():
    """The others' errors tell of it; a busy machine may let us see none of them before all have ended."""
    command = [*LAUNCH, "--workers", "2", "--servers", "0", "--", sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as launcher:
        wait_until(lambda: states_below(launcher.pid) == [psutil.STATUS_ZOMBIE] * 2, what="both ends")
        launcher.send_signal(signal.SIGCONT)
        _, said = launcher.communicate(timeout=240)
    assert launcher.returncode == 128 + signal.SIGKILL
    assert said == "otel-dltrace: local rank 0 of worker 1 was killed by SIGKILL; ending the others\n"


BEREFT = """
import os, sys, time
import torch
import otel_dltrace.pushpull.torch as bps
bps.init()
bps.push_pull(torch.ones(4), name="x")
if bps.rank() == 0:
    bps.shutdown()
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    time.sleep(1.0)  # it takes long to end
    sys.exit(7)
try:
    bps.push_pull(torch.ones(4), name="x")
finally:
    open(sys.argv[1], "w").close()
"""


def test_who_fails_for_want_of_another_is_not_to_blame(tmp_path):
    """It ends before the one that has left it alone, and gives no exit code."""
    pytest.importorskip("torch")
    program = [sys.executable, "-c", BEREFT, str(tmp_path / "failed")]
    done = subprocess.run(
        [*LAUNCH, "--workers", "2", "--servers", "1", "--", *program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 7, done.stderr
    assert "otel-dltrace: local rank 0 of worker 0 ended with exit code 7; ending the others\n" in done.stderr


def test_a_signal_reaches_the_program():
    """Who ends the launcher ends the job, in order."""
    program = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("ready", flush=True)
print(signal.sigwait([signal.SIGTERM]).name, flush=True)
"""
    command = [*LAUNCH, "--servers", "0", "--", sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "ready\n"
        launcher.terminate()
        said, _ = launcher.communicate(timeout=240)
    assert (launcher.returncode, said) == (128 + signal.SIGTERM, "SIGTERM\n")


def test_a_signal_that_is_to_be_ignored_ends_nothing(tmp_path):
    """As under `nohup`, when the terminal is closed: its SIGHUP is ignored by the program as well."""
    program = f"""
import pathlib, signal, time
print("ready", flush=True)
while not pathlib.Path({str(tmp_path / "hung up")!r}).exists():
    time.sleep(0.01)
print(signal.getsignal(signal.SIGHUP).name, flush=True)
"""
    command = ["nohup", *LAUNCH, "--servers", "0", "--", sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout.readline() == "ready\n"
        launcher.send_signal(signal.SIGHUP)
        (tmp_path / "hung up").touch()
        said, _ = launcher.communicate(timeout=240)
    assert (launcher.returncode, said) == (0, "SIG_IGN\n")


@pytest.mark.parametrize(
    ("does", "code"),
    [
        pytest.param("exit 3", 3, id="one that fails"),
        pytest.param("kill -TERM $PPID; sleep 240", 128 + signal.SIGTERM, id="a signal"),
    ],
)
def test_what_ends_a_job_ends_its_start(does, code):
    """Of a job of far too many processes those that were not started by then never are."""
    command = [*LAUNCH, "--workers", "10000000", "--servers", "0", "--", "sh", "-c", does]
    assert subprocess.run(command, timeout=120, check=False).returncode == code


MEETING = """
import os, time
from otel_dltrace.pushpull.engine import Engine
from otel_dltrace.pushpull.options import read_env
engine = Engine(*read_env(os.environ))
engine.start()
os.write(1, (os.environ["PUSHPULL_DIR"] + os.linesep).encode())
time.sleep(600)
"""


@pytest.mark.parametrize(
    "env", [pytest.param({}, id="asked by none"), pytest.param({"BYTEPS_FORCE_DISTRIBUTED": "1"}, id="waited for")]
)
def test_servers_that_nobody_asks_end_with_the_worker(env):
    """One worker alone talks to none; where it is to, they wait for it as long as they may."""
    grace_s = 1.0 if env else 100.0
    begin = time.monotonic()
    assert launch(Plan(("true",), servers=2, grace_s=grace_s), os.environ | env) == 0
    assert (time.monotonic() - begin > grace_s) is bool(env)


def is_over(process: psutil.Process) -> bool:
    """Return whether *process* runs no more; a container may have nobody who takes note of it."""
    try:
        return process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


@contextmanager
def meeting() -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process], Path]]:
    """Give a launcher, the processes that it has started and that have met, and its folder; end all of them."""
    command = [*LAUNCH, "--workers", "2", "--servers", "1", "--", sys.executable, "-c", MEETING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        children = []
        try:
            folders = {Path(launcher.stdout.readline().strip()).parent for _ in range(2)}
            children = psutil.Process(launcher.pid).children()
            yield launcher, children, folders.pop()
        finally:
            launcher.terminate()
            launcher.wait(60)
            for child in children:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


LEAVING = """
import os, pathlib, subprocess, sys
below = '''
import pathlib, signal, sys, time
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
print("up", flush=True)
signal.sigwait([signal.SIGTERM])
time.sleep(1.5)
pathlib.Path(sys.argv[1]).write_text("saved")
'''
child = subprocess.Popen([sys.executable, "-c", below, sys.argv[2]], stdout=-1)
child.stdout.readline()
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
{ends}
"""
_PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def nobody_reaps() -> Iterator[None]:
    """Have what outlives its parent become ours, who take no note of its end, like the first process of a container."""
    prctl = getattr(ctypes.CDLL(None), "prctl", lambda *_: None)  # others than Linux have none
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    yield
    prctl(_PR_SET_CHILD_SUBREAPER, 0)


@pytest.mark.usefixtures("nobody_reaps")
@pytest.mark.parametrize(
    ("ends", "code"),
    [
        pytest.param("os.kill(os.getpid(), 9)", 137, id="killed"),
        pytest.param("sys.exit(3)", 3, id="failed"),
        pytest.param("", 0, id="done"),
    ],
)
def test_what_a_worker_has_started_ends_with_the_job(ends, code, tmp_path):
    """A worker is often a shell around the training: what is below it has the whole grace, and costs no more of it."""
    told, saved = tmp_path / "pid", tmp_path / "saved"
    program = (sys.executable, "-c", LEAVING.format(ends=ends), str(told), str(saved))
    begin = time.monotonic()
    assert launch(Plan(program, servers=0, grace_s=100.0), os.environ) == code
    assert (saved.exists(), time.monotonic() - begin < 100.0) == (True, True)
    left = int(told.read_text())
    wait_until(lambda: not psutil.pid_exists(left) or is_over(psutil.Process(left)), what="the end of what is left")
    with suppress(ChildProcessError):  # where it is not ours
        os.waitpid(left, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="no other kernel ends processes with the one that started them")
def test_a_launcher_that_is_killed_leaves_nothing_behind(tmp_path):
    """The kernel ends servers and workers with it; the next launcher removes its folder, and no other's."""
    own = tmp_path / "dltrace-pushpull-1000-9000-0"  # as a process without a launcher has it
    own.mkdir()
    with meeting() as (killed, children, orphan), meeting() as (_, _, others):
        killed.kill()
        wait_until(lambda: all(map(is_over, children)), what="the end of the children")
        env = os.environ | {"TMPDIR": str(tmp_path)}
        done = subprocess.run([*LAUNCH, "--servers", "0", "--", "true"], env=env, timeout=240, check=False)
        now = [folder.exists() for folder in (orphan, others, own)]
    assert len(children) == 3
    assert (done.returncode, now) == (0, [False, True, True])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["launch"], "write it after --", id="no program"),
        pytest.param(["launch", "--workers", "0", "--", "x"], "--workers 0: there must be 1 or more", id="no worker"),
        pytest.param(["launch", "--only-worker", "1", "--", "x"], "--only-worker needs --root", id="no root"),
        pytest.param(
            ["launch", "--workers", "2", "--only-worker", "2", "--root", "h:1", "--", "x"],
            "--only-worker 2: with --workers 2 the last one is 1",
            id="no such worker",
        ),
        pytest.param(["launch", "--root", "ps0", "--", "x"], "--root 'ps0' is not HOST:PORT", id="no port"),
        pytest.param(["launch", "--root", ":9", "--", "x"], "--root ':9' is not HOST:PORT", id="no host"),
        pytest.param(["launch", "--root", "h:0", "--", "x"], "--root 'h:0' is not HOST:PORT", id="no port is 0"),
        pytest.param(["launch", "--root", "h:99999", "--", "x"], "--root 'h:99999' is not HOST:PORT", id="high port"),
        pytest.param(["launch", "--servers", "0", "--", "no-such"], "no-such cannot be started", id="no such program"),
    ],
)
def test_what_a_user_can_mend_is_one_sentence(arguments, says, capfd):
    """Exit code 2, and what to do."""
    assert main(["pushpull", *arguments]) == 2
    assert says in capfd.readouterr().err


@pytest.mark.parametrize("command", [LAUNCH, [*LAUNCH[:3], "run"]], ids=["launch", "run"])
@pytest.mark.parametrize(
    ("env", "says"),
    [
        pytest.param(
            {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_START_STEP": "3", "BYTEPS_TRACE_END_STEP": "3"},
            "otel-dltrace: BYTEPS_TRACE_END_STEP=3 must be greater than BYTEPS_TRACE_START_STEP=3",
            id="no step",
        ),
        pytest.param(
            {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_LEVEL": "all"}, "otel-dltrace: OTEL_DLTRACE_LEVEL='all'", id="no level"
        ),
    ],
)
def test_a_variable_that_cannot_be_used_ends_the_command(command, env, says):
    """Said once, before anything is started, with exit code 2."""
    command = [*command, "--", sys.executable, "-c", "print('trained')"]
    done = subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done.stderr
    assert done.stderr.startswith(says)


def test_the_example_trains(tmp_path):
    """Over two workers of two local ranks and two servers; the loss goes down."""
    pytest.importorskip("torch", reason="the example trains a model of torch")
    program = [sys.executable, str(ROOT / "examples" / "train_pushpull.py"), "--epochs", "2", "--steps", "10"]
    command = [*LAUNCH, "--workers", "2", "--local-ranks", "2", "--servers", "2", "--", *program, "--width", "64"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(line.rpartition(" ")[2]) for line in done.stdout.splitlines()]
    assert (len(losses), losses[0] > losses[-1]) == (2, True)


@pytest.mark.parametrize(
    ("known", "ended", "whole"),
    [
        pytest.param(2, 2, True, id="its local ranks alone"),
        pytest.param(5, 2, False, id="another worker's go on, and a server"),
        pytest.param(5, 5, True, id="all have ended"),
        pytest.param(1, 1, False, id="a local rank is not known yet"),
    ],
)
def test_the_last_line_counts_all_of_this_host(known, ended, whole, tmp_path):
    """A host may have several workers and servers: the spans of one worker's local ranks are not all there are."""
    folder = tmp_path / "hosts" / host_folder_name(os.uname().nodename, boot_id().hex())
    folder.mkdir(parents=True)
    told = {"processes": [{}] * known, "summary": {"processes": ended, "spans": 9}}
    (folder / "drain.json").write_text(json.dumps(told))
    assert host_is_drained(tmp_path, 2, deadline=0.0) == whole

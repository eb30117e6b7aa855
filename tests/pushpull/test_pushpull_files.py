"""push_pull jobs that only BytePS's variables trace, and servers on hosts of their own: what is there at the end."""

import json
import os
import sys
from collections import Counter

import pytest

from otel_dltrace.cli.main import main
from otel_dltrace.cli.pushpull import server_environment
from otel_dltrace.export.rundir.reader import read_summaries
from tests.support.processes import Place
from tests.support.servers import free_port

ROUNDS = 4
PROGRAM = f"""
    import os
    import numpy as np
    import otel_dltrace
    from otel_dltrace.pushpull.engine import Engine
    from otel_dltrace.pushpull.options import read_env

    engine = Engine(*read_env(os.environ))
    engine.start()
    tensor = engine.declare("w")
    for _ in range({ROUNDS}):
        with otel_dltrace.step():
            engine.wait(engine.push_pull(tensor, np.ones(100, np.float32), average=False))
    engine.stop()
"""
ON, PROFILE, TRACE = {"OTEL_DLTRACE": "1"}, {"BYTEPS_SERVER_ENABLE_PROFILE": "1"}, {"BYTEPS_TRACE_ON": "1"}
TOLD = {"DMLC_NUM_WORKER": "2", "DMLC_NUM_SERVER": "2", "DMLC_SERVER_ID": "1", "PUSHPULL_TOKEN": "secret"}
RUN, JOB = "OTEL_DLTRACE_RUN", "OTEL_DLTRACE_JOB"


def launch_command(place: Place, *arguments: str) -> list[str]:
    """Return the command that launches the program; who is alone ends at once."""
    script = str(place.write(PROGRAM, "job.py"))
    return [sys.executable, "-m", "otel_dltrace", "pushpull", "launch", *arguments, "--", sys.executable, script]


KILLED = """
    import os, pathlib, signal, time
    import numpy as np
    from otel_dltrace.pushpull.engine import Engine
    from otel_dltrace.pushpull.errors import PushPullError
    from otel_dltrace.pushpull.options import read_env

    engine = Engine(*read_env(os.environ))
    engine.start()
    tensor, under_way = engine.declare("w"), pathlib.Path("under_way")
    def begin():
        return engine.push_pull(tensor, np.ones(100, np.float32), average=False)
    for _ in range(9):
        engine.wait(begin())
    if os.environ["DMLC_WORKER_ID"] == "0":
        while not under_way.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    tenth = begin()
    under_way.touch()
    try:
        engine.wait(tenth)
    except PushPullError:
        print("caught", flush=True)
"""


def processes_of(place: Place) -> Counter[tuple[str, int, int]]:
    """Return role, rank and world size of each process in the only run directory."""
    (run,) = place.runs()
    binds = [process["bind"] for told in read_summaries(run) for process in told["processes"]]
    return Counter((bind["role"], bind["rank"], bind["world_size"]) for bind in binds)


def requests_in(place: Place) -> Counter[str]:
    """Return the names of the requests in the servers' profiles."""
    profiles = (json.loads(path.read_text())["traceEvents"] for path in place.folder.glob("[01]/server_profile.json"))
    return Counter(event["name"] for events in profiles for event in events if event["ph"] == "B")


def events_in(place: Place, worker: int) -> Counter[str]:
    """Return what is in the file of a worker, without keys: how often its tensor was completed, and each stage."""
    path = place.folder / f"trace/worker{worker}/0/comm.json"
    return Counter(event["name"] for event in json.loads(path.read_text())["traceEvents"])


def test_a_push_pull_that_failed_is_no_completion(place):
    """Of the nine that came back the window has eight; what was done of the tenth is in no file."""
    window = {"BYTEPS_TRACE_START_STEP": "2", "BYTEPS_TRACE_END_STEP": "20"}
    command = [*launch_command(place, "--workers", "2")[:-1], str(place.write(KILLED, "killed.py"))]
    done = place.finish(place.popen(command, **TRACE, **window))

    assert (done.returncode, done.stdout) == (137, "caught\n"), done.stderr
    stages = ("REDUCE", "COPYD2H", "PUSH", "PULL", "COPYH2D", "BROADCAST")
    whole = dict.fromkeys(("Comm.w", *(f"Comm.w.{stage}" for stage in stages)), 8)
    assert [events_in(place, worker) for worker in range(2)] == [whole, whole]


def test_a_profile_alone_is_there_when_the_launcher_ends(place):
    """Servers are traced, workers are not: one run, and nothing is left to be read."""
    done = place.finish(place.popen(launch_command(place, "--workers", "2", "--servers", "2"), **PROFILE))

    (run,) = place.runs()
    told = f"{2 * 2 * ROUNDS} spans recorded, none lost; in {run.name}; read them with: otel-dltrace report {run.name}"
    assert (done.returncode, done.stderr) == (0, f"otel-dltrace: {told}\n")
    assert requests_in(place) == dict.fromkeys(("push-9", "push-11", "pull-9", "pull-11"), ROUNDS)
    assert processes_of(place) == {("server", 0, 2): 1, ("server", 1, 2): 1}


OTHER_KEY = {"BYTEPS_SERVER_KEY_TO_PROFILE": "7"}
COARSE = {**ON, "OTEL_DLTRACE_COMM_DIR": "traces", "OTEL_DLTRACE_LEVEL": "step"}
UNASKED = "/server_profile.json is not written: no server has recorded a push or pull; is there only one worker"


@pytest.mark.parametrize(
    ("workers", "under", "env", "says"),
    [
        pytest.param("2", (), TRACE, "/trace is not written: the run has no push_pull", id="ended before the window"),
        pytest.param("2", (), COARSE, "/traces is not written: the run has no push_pull", id="level step"),
        pytest.param("1", (), PROFILE, UNASKED, id="one worker"),
        pytest.param("2", (), PROFILE | OTHER_KEY, UNASKED, id="no such key"),
        pytest.param("2", ("run", "--no-report", "--"), PROFILE | OTHER_KEY, UNASKED, id="no such key, under run"),
    ],
)
def test_a_file_that_is_not_written_is_said_at_the_end(workers, under, env, says, place):
    """Once, in the last line, which there is one of: the job has ended well, and nobody would look for it elsewhere."""
    command = launch_command(place, "--workers", workers)
    command = [*command[:3], *under, *command] if under else command
    done = place.finish(place.popen(command, **env))

    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert f"{place.folder}{says}" in line
    assert line.count(" is not written") == 1


@pytest.mark.parametrize(
    ("pipe", "env"),
    [
        pytest.param("profile.json", PROFILE | {"BYTEPS_SERVER_PROFILE_OUTPUT_PATH": "profile.json"}, id="server"),
        pytest.param("trace/worker0/0/comm.json", TRACE | {"BYTEPS_TRACE_START_STEP": "1"}, id="worker"),
    ],
)
def test_no_drain_waits_for_the_reader_of_a_pipe(pipe, env, place):
    """The launcher, which waits for the files, would never end; what is not written is said."""
    path = place.folder / pipe
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    done = place.finish(place.popen(launch_command(place, "--workers", "2"), **env, BYTEPS_TRACE_END_STEP="3"))

    says = f"{path} cannot be written (nobody reads the pipe); `otel-dltrace export` does it again"
    assert (done.returncode, says in done.stderr.splitlines()[-1]) == (0, True), done.stderr
    assert path.is_fifo()


def test_servers_on_other_hosts_are_in_the_run_of_the_workers(place):
    """Started by themselves, told the run and the job; each knows that it is a server."""
    port = str(free_port())
    common = {**ON, **PROFILE, RUN: "0123456789abcdef", JOB: "trained", "PUSHPULL_TOKEN": "secret"}
    told = {**common, **TOLD, "DMLC_PS_ROOT_PORT": port, "BYTEPS_LOCAL_SIZE": "2"}
    serve = [sys.executable, "-m", "otel_dltrace", "pushpull", "serve"]
    servers = [place.popen(serve, **told | {"DMLC_SERVER_ID": str(server)}) for server in range(2)]
    counts = ["--workers", "2", "--local-ranks", "2", "--servers", "2", "--root", f"127.0.0.1:{port}"]
    commands = [launch_command(place, *counts, "--only-worker", str(worker)) for worker in range(2)]
    workers = [place.popen(command, **common) for command in commands]
    ended = [place.finish(process) for process in (*workers, *servers)]
    place.wait_for_drains()

    assert [done.returncode for done in ended] == [0] * 4, [done.stderr for done in ended]
    assert [run.name.rpartition("-")[0] for run in place.runs()] == ["dltrace-trained"]
    ranks = [("server", 0), ("server", 1), *(("worker", rank) for rank in range(4))]
    assert processes_of(place) == {(*rank, 4): 1 for rank in ranks}
    assert requests_in(place) == dict.fromkeys(("push-9", "push-11", "pull-9", "pull-11"), ROUNDS)


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        pytest.param({}, "DMLC_NUM_WORKER, DMLC_NUM_SERVER, PUSHPULL_TOKEN", id="nothing"),
        pytest.param(TOLD | {"DMLC_SERVER_ID": ""}, "DMLC_SERVER_ID", id="which of several"),
    ],
)
def test_a_server_has_to_be_told_of_its_job(env, missing, monkeypatch, capsys):
    """Else it would refuse the workers, and stay."""
    for name in TOLD:
        monkeypatch.setenv(name, env.get(name, ""))
    assert main(["pushpull", "serve"]) == 2
    assert capsys.readouterr().err == f"otel-dltrace: serve: a server needs to know its job; not set: {missing}\n"


@pytest.mark.parametrize(
    ("env", "missing"),
    [
        pytest.param({}, None, id="off"),
        pytest.param(PROFILE, f"{RUN} and {JOB}", id="neither"),
        pytest.param(ON | {JOB: "j"}, RUN, id="no run"),
        pytest.param(ON | {RUN: "r"}, JOB, id="no name"),
        pytest.param(ON | {RUN: "r", "OTEL_SERVICE_NAME": "s", "OTEL_DLTRACE_LEVEL": "step"}, None, id="given"),
    ],
)
def test_a_server_records_as_those_of_the_launcher_do(env, missing, capsys):
    """In its role and at their level; what would have it traced apart from its job is said."""
    level = {"OTEL_DLTRACE_LEVEL": env.get("OTEL_DLTRACE_LEVEL", "partition")} if env else {}
    assert server_environment(TOLD | env) == TOLD | env | level | {"DMLC_ROLE": "server"}
    says = f"otel-dltrace: give all hosts of the job the same {missing}, or each is traced separately\n"
    assert capsys.readouterr().err == (says if missing else "")


def test_what_no_drain_can_use_does_not_keep_a_job_from_training(place):
    """Each process says why it is not traced, as it does without the launcher."""
    bad = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_TIMEOUT": "abc"}
    ended = place.finish(place.popen(launch_command(place, "--workers", "1"), **ON, **bad))

    assert (ended.returncode, place.runs()) == (0, [])
    said = "OTEL_EXPORTER_OTLP_TIMEOUT='abc' is not a number of seconds above 0: write 10, for example; tracing is off"
    assert set(ended.stderr.splitlines()) == {f"otel_dltrace: {said}"}

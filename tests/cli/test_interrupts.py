"""Ctrl-C, SIGTERM, a working directory that is gone: commands end as a shell expects, and say where spans are."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from otel_dltrace.cli.relay import Relay
from tests.support import servers
from tests.support.processes import Place, waiting

PATIENT = """
    import os, signal, sys, time
    signal.signal(signal.SIGINT, lambda *_: sys.exit(8))
    import otel_dltrace as d
    for i in range(2):
        with d.step(i):
            pass
    time.sleep(60)
"""
IMPATIENT = """
    import os, signal, time
    import otel_dltrace as d
    from otel_dltrace.record.tracer import live
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for i in range(2):
        with d.step(i):
            pass
    while not os.path.exists("go"):
        time.sleep(0.01)
    # It hears a Ctrl-C in what `otel_dltrace` does at the end, and not before.
    live.tracer.leaving.append(lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
"""
OUTLIVING = """
    import sys
    import otel_dltrace.cli.held_drain as held_drain
    from otel_dltrace.cli.main import main
    held_drain.DRAIN_ENDS_S = 0.5
    until_read = "until grep -qs '.so_far.: 2' dltrace-*/hosts/*/drain.json; do sleep 0.05; done"
    script = f"{sys.executable} {sys.argv[1]} & {until_read}"
    sys.exit(main(["run", "--no-report", "--", "sh", "-c", script]))
"""
SLOW = """
    import pathlib, sys, time
    from otel_dltrace.cli import report
    from otel_dltrace.cli.main import main
    def read(*_args, **_more):
        pathlib.Path("reads").touch()
        time.sleep(600)
    report.selected_of = read
    sys.exit(main(["run", "--", sys.executable, sys.argv[1]]))
"""
SOON = {"OTEL_BSP_SCHEDULE_DELAY": "50"}
HEARS = ["env", "--default-signal=INT,QUIT,HUP"]
"""Before a command: tests that run in the background, or under nohup, inherit that these are ignored."""


AS_ITSELF = ("-m", "otel_dltrace", "run", "--", sys.executable)


def start_run(place: Place, command: Sequence[str] = AS_ITSELF, **env: str) -> "subprocess.Popen[str]":
    """Start `otel-dltrace run` as a shell does, in a process group of its own, and wait for its run directory."""
    command = [*HEARS, sys.executable, *command, str(place.write(PATIENT, "patient.py"))]
    pipe, env = subprocess.PIPE, place.env(**SOON, **env)
    run = subprocess.Popen(
        command, cwd=place.folder, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    place.children.append(run)
    servers.wait_until(lambda: list(place.folder.glob("dltrace-*/hosts/*/spans-*")), what="the run directory")
    return run


def interrupt(run: "subprocess.Popen[str]") -> None:
    """Press Ctrl-C."""
    os.killpg(run.pid, signal.SIGINT)


def hears(process: "subprocess.Popen[str]") -> bool:
    """Return whether a Ctrl-C ends *process*."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (caught,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught, 16) & 1 << signal.SIGINT - 1)


def waits_for_its_drain(run: "subprocess.Popen[str]") -> bool:
    """Return whether there is no program any more that a Ctrl-C is for."""
    return len(Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()) == 1


def test_a_second_ctrl_c_does_not_wait_for_the_drain(place):
    """It goes on by itself, and reads all; the command ends at once and says where the spans are."""
    run = start_run(place, OTEL_DLTRACE_DRAIN="off")  # the program does not wait for it either
    (drain,) = place.drains()
    drain.suspend()
    interrupt(run)
    servers.wait_until(lambda: waits_for_its_drain(run), what="the end of the program")
    interrupt(run)
    ended = place.finish(run, 30)
    drain.resume()
    place.wait_for_drains()

    (folder,) = place.runs()
    told = f"otel-dltrace: the drain goes on in the background: the rest of the spans goes to {folder.name}\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", told)
    assert sum(map(len, place.spans())) == 2
    assert list(place.rings.iterdir()) == []


BUSY = """
    import sys
    from otel_dltrace.cli import held_drain
    from otel_dltrace.cli.main import main

    held_drain.DRAIN_ENDS_S = 0.0
    sys.exit(main(["run", "--", "true"]))
"""


def test_a_drain_that_is_busy_for_too_long_goes_on(place):
    """As after a second Ctrl-C; that nothing was traced is not known yet."""
    ended = place.finish(place.popen([sys.executable, str(place.write(BUSY))]), 60)
    place.wait_for_drains()

    told = f"the drain goes on in the background: the rest of the spans goes to a run directory in {place.folder}"
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", f"otel-dltrace: {told}\n")


def test_a_process_that_outlives_the_program_is_not_waited_for_for_ever(place):
    """Its run is told all the same, and that more may come."""
    patient = place.write(PATIENT, "patient.py")
    ended = place.run(OUTLIVING, str(patient), **SOON)

    (folder,) = place.runs()
    told = [
        f"the drain goes on in the background: the rest of the spans goes to {folder.name}",
        f"2 spans recorded; the drain is still at work; in {folder.name}",
    ]
    assert (ended.returncode, ended.stderr.splitlines()) == (0, [f"otel-dltrace: {line}" for line in told])


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)], ids=["SIGINT", "SIGTERM"])
def test_a_report_can_be_interrupted(place, number, code):
    """Here one that reads for ten minutes."""
    run = start_run(place, [str(place.write(SLOW))])
    (folder,) = place.runs()
    interrupt(run)
    servers.wait_until((place.folder / "reads").exists, what="the report")
    os.killpg(run.pid, number)
    ended = place.finish(run, 30)

    assert (ended.returncode, ended.stdout) == (code, "")
    assert "Traceback" not in ended.stderr
    assert number == signal.SIGTERM or ended.stderr == f"otel-dltrace: 2 spans recorded, none lost; in {folder.name}\n"
    assert place.drains() == []


@pytest.mark.parametrize(
    ("command", "library"), [("report", "rich"), ("doctor", "rich"), ("recover", "pyarrow"), ("run", "selectors")]
)
def test_a_command_that_is_being_loaded_can_be_interrupted(place, command, library):
    """It may take a second on a busy machine; here the Ctrl-C comes with a library that it loads."""
    place.write("import os, signal\nos.kill(os.getpid(), signal.SIGINT)", f"{library}.py")
    path = f"{place.folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    ended = place.finish(place.popen([*HEARS, sys.executable, "-m", "otel_dltrace", command, "x"], PYTHONPATH=path))

    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_a_program_that_has_ended_is_interrupted_without_a_traceback(place):
    """It only waits for its drain, and waits no longer."""
    program = place.start(waiting(IMPATIENT), OTEL_DLTRACE="1", **SOON)
    servers.wait_until(place.drains, what="the drain")[0].suspend()
    (place.folder / "go").touch()
    servers.wait_until(lambda: hears(program), what="the end")
    program.send_signal(signal.SIGINT)

    assert place.finish(program, 30).stderr == ""


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["run", "--", "true"], id="run"),
        pytest.param(["recover"], id="recover"),
        pytest.param(["drain"], id="drain"),
        pytest.param(["report", "dltrace-x"], id="report"),
        pytest.param(["compare", "dltrace-x", "dltrace-y"], id="compare"),
        pytest.param(["export", "dltrace-x", "--to", "chrome", "-o", "trace.json"], id="export"),
    ],
)
def test_a_working_directory_that_is_gone_is_one_sentence(place, arguments):
    """Whatever would be written there, or looked for."""
    gone = place.folder / "gone"
    gone.mkdir()
    leave = 'cd gone && rmdir ../gone && exec "$@"'
    done = place.finish(place.popen(["sh", "-c", leave, "sh", sys.executable, "-m", "otel_dltrace", *arguments]))

    (said,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert said in (
        "otel-dltrace: the working directory has been removed: cd to one that exists",
        "otel-dltrace: OTEL_DLTRACE_DIR='.' is relative to the working directory, which has been removed: "
        "name one that exists",
        "otel-dltrace: dltrace-x is not a run directory: it has no folder hosts/; give one that a traced run printed",
    )


ONE_STEP = """
    import otel_dltrace as d
    with d.step():
        pass
    print("printed")
"""


def test_nothing_of_ours_is_on_the_output_of_a_program_without_standard_error(place):
    """As a batch system may start it; what is printed may be read by another program."""
    program = str(place.write(ONE_STEP))
    done = place.finish(place.popen(["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, program], OTEL_DLTRACE="1"))

    assert (done.returncode, done.stdout) == (0, "printed\n")


def test_what_libraries_say_on_a_standard_error_that_is_closed_is_in_no_ring(place):
    """They write to its number, which the next file gets that is opened."""
    program = """
    import os, otel_dltrace as d
    os.close(0), os.close(1), os.close(2)
    with d.step():
        for number in (1, 2):
            try:
                os.write(number, b"[W] a warning of a library")
            except OSError:
                pass
    """
    assert place.run(program, OTEL_DLTRACE="1").returncode == 0
    place.wait_for_rings()

    assert [len(batch) for batch in place.spans()] == [1]


@pytest.mark.parametrize("opened", [pytest.param(3, id="anew"), pytest.param(0, id="not again")])
def test_what_a_program_does_with_its_standard_output_meanwhile_stays(place, opened):
    """As another thread that makes a daemon of it, which closes all and opens its own."""
    program = f"""
    import os
    from otel_dltrace.record.ring_file import above_standard
    os.closerange(0, 3)
    with above_standard():
        os.closerange(0, 3)
        for _ in range({opened}):
            os.open(os.devnull, os.O_RDWR)
    for number in range({opened}):
        os.fstat(number)
    os._exit(0)
    """
    assert place.run(program).returncode == 0


def test_a_folder_that_the_locale_cannot_say_is_found_again(place):
    """The drain tells `run` its bytes."""
    env = {"PYTHONIOENCODING": "ascii"}
    program = str(place.write(ONE_STEP))
    done = place.command("run", "--no-report", "--dir", "größe", "--", sys.executable, program, **env)

    assert done.returncode == 0
    assert "1 spans recorded, none lost" in done.stderr


def test_modules_of_the_working_directory_are_not_the_drain_s(place):
    """A program elsewhere has none of them either."""
    (place.folder / "queue.py").write_text("raise RuntimeError('not the one of Python')")
    (place.folder / "programs").mkdir()
    program = str(place.write(ONE_STEP, "programs/one_step.py"))
    done = place.command("run", "--no-report", "--", sys.executable, program)

    assert done.returncode == 0
    assert "1 spans recorded, none lost" in done.stderr


@pytest.mark.skipif(sys.version_info < (3, 11), reason="`-m` looks in the working directory whatever is asked for")
def test_a_file_called_as_we_are_in_the_working_directory_is_not_the_drain(place):
    """It may be a stranger's, in a folder where all may write."""
    (place.folder / "otel_dltrace.py").write_text("open('ran', 'w')")
    (place.folder / "programs").mkdir()
    program = str(place.write(ONE_STEP, "programs/one_step.py"))
    done = place.finish(place.popen([sys.executable, program], OTEL_DLTRACE="1"))

    assert "1 spans recorded, none lost" in done.stderr
    assert not (place.folder / "ran").exists()


LISTENING = """
    import os, signal, sys
    if len(sys.argv) > 2:
        getattr(os, sys.argv[2])()
    heard = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
    signal.pthread_sigmask(signal.SIG_BLOCK, heard)
    print("ready", flush=True)
    for _ in range(int(sys.argv[1])):
        print(signal.Signals(signal.sigwait(heard)).name, flush=True)
"""


def children_of(run: "subprocess.Popen[str]") -> set[str]:
    """Return the processes that *run* has started: one is new when it has found another to have a signal, too."""
    return set(Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split())


@pytest.mark.parametrize("leave", [[], ["setpgrp"], ["setsid"]], ids=["our group", "another group", "another session"])
def test_a_program_hears_each_signal_once(place, leave):
    """Whether it is sent to `run` alone, as a batch system does, or to the whole group, as a terminal does."""
    names = ["SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGUSR1"]
    program = [sys.executable, str(place.write(LISTENING)), str(2 * len(names)), *leave]
    command = [*HEARS, sys.executable, "-m", "otel_dltrace", "run", "--no-report", "--", *program]
    pipe = subprocess.PIPE
    run = subprocess.Popen(
        command, cwd=place.folder, env=place.env(), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    place.children.append(run)
    heard = [run.stdout.readline()]
    for name in names:
        witness = children_of(run)
        os.killpg(run.pid, signal.Signals[name])
        heard.append(run.stdout.readline())
        while children_of(run) <= witness:  # the next one would be the same to it as long as it is at this one
            time.sleep(0.01)
        os.kill(run.pid, signal.Signals[name])
        heard.append(run.stdout.readline())

    assert (heard, run.wait(60)) == (["ready\n", *(f"{name}\n" for name in names for _ in range(2))], 0)


def test_a_signal_that_comes_before_the_program_ends_it(monkeypatch):
    """It would go on by itself, without us."""
    start = subprocess.Popen

    def started_late(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        if command[0] == "sleep":
            os.kill(os.getpid(), signal.SIGTERM)
        return start(command, **options)

    monkeypatch.setattr("otel_dltrace.cli.relay.subprocess.Popen", started_late)

    assert Relay().run(["sleep", "60"], dict(os.environ)) == -signal.SIGTERM


def test_a_signal_is_passed_on_where_no_witness_can_be_started(monkeypatch):
    """As where no more processes may be: the program, which was, is not left to itself."""
    start = subprocess.Popen

    def at_the_limit(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        if command[0] == sys.executable:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return start(command, **options)

    monkeypatch.setattr("otel_dltrace.cli.relay.subprocess.Popen", at_the_limit)
    program = 'trap "exit 7" TERM; kill $PPID; while :; do sleep 0.05; done'

    assert Relay().run(["sh", "-c", program], dict(os.environ)) == 7


def test_a_signal_that_comes_while_another_is_passed_on_is_not_lost(monkeypatch):
    """Wherever it comes: here at the last look for more."""
    relay, sent = Relay(), []

    class Late(list[int]):
        """Nothing, and by the time it is seen to be nothing another signal has come."""

        def __bool__(self) -> bool:
            relay._came = []
            relay._hear(signal.SIGUSR1, None)
            return False

    def passed_on() -> None:
        sent.extend(relay._came)
        relay._came = Late() if len(sent) == 1 else []

    monkeypatch.setattr(relay, "_pass_on", passed_on)
    relay._is_busy = False
    relay._hear(signal.SIGTERM, None)

    assert sent == [signal.SIGTERM, signal.SIGUSR1]

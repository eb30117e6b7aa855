"""Settings: good ones are read once, bad ones are one sentence, and training goes on."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from otel_dltrace import Config
from otel_dltrace.configure.outcome import host_is_drained, read_summary, say_where, short_path
from otel_dltrace.export.rundir.host_folder import host_folder_name
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.identity import Bind, run_directory_name
from otel_dltrace.record import guard
from otel_dltrace.record.launch import DrainStarter
from otel_dltrace.record.locks import is_listened_to
from otel_dltrace.record.process_id import boot_id
from otel_dltrace.settings.config import VARIABLES
from tests.support import servers


def test_every_setting_has_a_variable_and_reads_back():
    """What `to_env` says, `from_env` understands."""
    config = Config(
        level="partition",
        steps="10-20",
        directory="/tmp/runs",
        ring_directory="/dev/shm/r",
        ring_size=1 << 20,
        span_budget=5,
        quota=1 << 30,
        drain="off",
        metrics=True,
        job="j",
        run="r",
        world="w",
        launch="l",
        comm_directory="/tmp/comm",
        comm_steps="10-20",
        server_profile="/tmp/profile.json",
        server_spans="on",
        server_key="196608",
    )

    assert Config.from_env(config.to_env()) == config
    assert eval(repr(config)) == config  # whoever prints one sees all that makes it another
    assert replace(config, job=" j ", level="partition\n", world="w ", steps="10-20 ") == config
    assert sorted(VARIABLES.values()) == sorted(
        f"OTEL_DLTRACE_{name}"
        for name in "LEVEL STEPS DIR RING_DIR RING_SIZE SPAN_BUDGET QUOTA DRAIN METRICS JOB RUN WORLD LAUNCH "
        "COMM_DIR COMM_STEPS SERVER_PROFILE SERVER_SPANS SERVER_KEY".split()
    )


def test_sizes_may_be_written_with_a_unit():
    """4M is 4 MiB."""
    assert Config.from_env({"OTEL_DLTRACE_RING_SIZE": "8M", "OTEL_DLTRACE_QUOTA": "2G"}) == Config(
        ring_size=8 << 20, quota=2 << 30
    )


BAD = [
    pytest.param("OTEL_DLTRACE_LEVEL", "verbose", "use one of step, collective, phase, partition", id="level"),
    pytest.param("OTEL_DLTRACE_STEPS", "10-", "use first=N", id="window"),
    pytest.param("OTEL_DLTRACE_STEPS", "20-10", "ends before it starts", id="window backwards"),
    pytest.param("OTEL_DLTRACE_STEPS", "every=0", "use first=N", id="every nothing"),
    pytest.param("OTEL_DLTRACE_RING_SIZE", "big", "whole number", id="ring size"),
    pytest.param("OTEL_DLTRACE_RING_SIZE", "12", "at least", id="ring too small"),
    pytest.param("OTEL_DLTRACE_RING_SIZE", "64K", "RING_SIZE='64K' is too small", id="ring too small, with a unit"),
    pytest.param("OTEL_DLTRACE_RING_SIZE", "9" * 5000, "whole number", id="ring that nobody can read"),
    pytest.param("OTEL_DLTRACE_SERVER_KEY", "9" * 5000, "is not a key", id="key that nobody can read"),
    pytest.param("OTEL_DLTRACE_SPAN_BUDGET", "-1", "whole number", id="budget"),
    pytest.param("OTEL_DLTRACE_DRAIN", "maybe", "not one of auto, thread, off", id="drain"),
    pytest.param("OTEL_DLTRACE_METRICS", "perhaps", "neither 1 nor 0", id="metrics"),
    pytest.param("OTEL_DLTRACE_DIR", "/proc/nowhere", "cannot be written", id="directory"),
    pytest.param("OTEL_DLTRACE_RING_DIR", "/proc/nowhere", "cannot be written", id="ring directory"),
    pytest.param("OTEL_DLTRACE_RING_DIR", "/etc/passwd", "Not a directory", id="ring directory is a file"),
    pytest.param("OTEL_DLTRACE_RING_SIZE", "\u00b2", "whole number", id="a digit that is no number"),
    pytest.param("OTEL_DLTRACE_DIR", "~nobody-of-this-name/x", "no home directory", id="no such user"),
    pytest.param("OTEL_DLTRACE_DIR", "x" * 300, "cannot be written", id="a name too long"),
    pytest.param("OTEL_DLTRACE_SERVER_PROFILE", "/tmp", "is a folder; name a file in it", id="a folder for a file"),
    pytest.param("OTEL_DLTRACE", "yup", "neither 1 nor 0", id="the switch"),
    pytest.param("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon", "OTEL_EXPORTER_OTLP_PROTOCOL", id="protocol"),
]


@pytest.mark.parametrize("name", ["ring_size", "span_budget", "quota"])
def test_a_number_that_says_no_limit_is_one(name):
    """The drain reads it as well."""
    assert getattr(Config.from_env({VARIABLES[name]: "9" * 20}), name) == 10**20 - 1
    with pytest.raises(ConfigError, match="at most"):
        Config.from_env({VARIABLES[name]: "9" * 20 + "K"})


@pytest.mark.parametrize(("variable", "value", "cure"), BAD[:15])
def test_a_bad_value_raises_where_it_is_asked_for(variable, value, cure):
    """`Config.from_env` says what, which value, and what to do."""
    with pytest.raises(ConfigError, match=cure) as caught:
        Config.from_env({variable: value}).check_writable({variable: value})
    assert value in str(caught.value)
    assert variable in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        pytest.param({"level": 3}, "level=3 is of type int; it must be a text", id="level"),
        pytest.param({"steps": None}, "steps=None is of type NoneType; it must be a text", id="steps"),
        pytest.param({"metrics": "yes"}, "metrics='yes' is of type str; it must be True or False", id="bool"),
        pytest.param({"quota": "5G"}, "quota='5G' is of type str; it must be a whole number", id="number"),
        pytest.param({"world": ""}, "world='' is not a name", id="no world"),
        pytest.param({"directory": "/x/\udcff"}, "directory='/x/\\udcff' is not UTF-8", id="no text"),
        pytest.param({"ring_directory": "/proc/x"}, "ring_directory='/proc/x' cannot be written", id="rings"),
        pytest.param({"level": Path("phase")}, "level=PosixPath('phase') is of type PosixPath", id="path for a level"),
        pytest.param({"job": Path("jj")}, "job=PosixPath('jj') is of type PosixPath", id="path for a job"),
        pytest.param(
            {"span_budget": True}, "span_budget=True is of type bool; it must be a whole number", id="flag for a number"
        ),
        pytest.param({"directory": "/a\0b"}, "directory='/a\\x00b' is not a path", id="NUL"),
        pytest.param({"steps": "1-" + "9" * 5000}, "steps='1-9999", id="window that nobody can read"),
        pytest.param({"steps": "first=" + "9" * 5000}, "steps='first=9999", id="number that nobody can read"),
    ],
)
def test_a_bad_field_raises(fields, told):
    """`Config` says which field it is, which value, and what it must be."""
    with pytest.raises(ConfigError) as caught:
        Config(**fields).check_writable(told=fields)

    assert str(caught.value).startswith(told)


def test_a_bad_value_is_called_as_it_was_said():
    """By the field that the program told, else by the variable that was set, which may be one of BytePS's."""
    env = {"OTEL_DLTRACE_LEVEL": "x", "BYTEPS_TRACE_DIR": "~nobody-of-this-name/x"}
    said = []
    for more, told in (({}, {}), ({}, {"level": "y"}), ({"BYTEPS_TRACE_ON": "1"}, {}), ({}, {"nonsense": 1})):
        with pytest.raises(ConfigError) as caught:
            Config.from_env({**env, **more}, **told)
        said.append(str(caught.value).partition(";")[0])

    assert said == [
        "OTEL_DLTRACE_LEVEL='x' is not a level",
        "level='y' is not a level",
        "BYTEPS_TRACE_DIR='~nobody-of-this-name/x' names a user who has no home directory",
        "'nonsense' is not a field of the configuration",
    ]


def test_what_is_not_to_be_written_need_not_be_writable():
    """Who only reads a configuration may stand anywhere."""
    Config.from_env({"OTEL_DLTRACE_DIR": "/proc"}, here="/proc")
    with pytest.raises(ConfigError, match=r"^OTEL_DLTRACE_DIR='/proc' cannot be written"):
        Config.from_env({"OTEL_DLTRACE_DIR": "/proc"}).check_writable({"OTEL_DLTRACE_DIR": "/proc"})


GONE = """
import os, sys
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
import otel_dltrace
otel_dltrace.instrument()
with otel_dltrace.step():
    pass
print("trained")
"""


def test_a_working_directory_that_is_gone_ends_no_program(place):
    """It is needed only where no folder is told."""
    untold = place.run(GONE, OTEL_DLTRACE_DIR="")
    told = place.run(GONE, OTEL_DLTRACE_DIR=str(place.folder))

    gone = "is relative to the working directory, which has been removed: name one that exists"
    said = f"OTEL_DLTRACE_DIR='.' {gone}; tracing is off"
    assert (untold.stdout, untold.stderr) == ("trained\n", f"otel_dltrace: {said}\n")
    place.wait_for_rings()

    assert (told.stdout, sum(map(len, place.spans()))) == ("trained\n", 1)


def test_a_folder_that_is_told_is_the_one_that_must_be_writable(place):
    """Not the one that the program stands in."""
    program = f"""
import os
os.chdir("/proc")
import otel_dltrace
otel_dltrace.start(directory={str(place.folder)!r})
with otel_dltrace.step():
    pass
"""
    place.run(program, OTEL_DLTRACE_DIR="")
    place.wait_for_rings()

    assert sum(map(len, place.spans())) == 1


def test_the_same_configuration_is_the_same_behind_a_chdir(place):
    """Paths are those of where the recording began."""
    program = """
import os, otel_dltrace
os.mkdir("elsewhere")
otel_dltrace.start(level="step", directory="runs")
os.chdir("elsewhere")
otel_dltrace.start(level="step", directory="runs")
print("asked twice")
"""
    result = place.run(program)

    assert (result.stdout, result.stderr) == ("asked twice\n", "")


def test_of_folders_under_one_path_each_has_a_drain_of_its_own(tmp_path, monkeypatch):
    """As of containers that share /dev/shm: one's drain would write the other's spans into the first one's files."""
    here, config = tmp_path / "workspace", Config()
    homes = []
    for other in ("one", "another"):
        here.mkdir()
        monkeypatch.chdir(here)
        homes.append([config.home, config.home_from(str(here))])
        here.rename(tmp_path / other)

    assert [len(set(of_one)) for of_one in homes] == [1, 1]
    assert homes[0] != homes[1]


def test_a_drain_is_told_nothing_that_its_configuration_has_not(place):
    """A program that says itself what to record is drained, whatever BytePS's variables say."""
    program = f"""
import otel_dltrace
otel_dltrace.start(otel_dltrace.Config(ring_directory={str(place.rings)!r}), level="step")
with otel_dltrace.step():
    pass
"""
    place.run(program, BYTEPS_TRACE_ON="1", BYTEPS_TRACE_END_STEP="1", OTEL_DLTRACE="0")
    place.wait_for_rings()

    assert sum(map(len, place.spans())) == 1


@pytest.mark.parametrize("called", ["runs ", "runs\n"])
def test_a_folder_may_end_in_a_blank(place, called):
    """The run directory is where the program says that it is, and nowhere else."""
    program = """
import os, otel_dltrace
os.mkdir({0!r}), os.chdir({0!r})
otel_dltrace.start()
with otel_dltrace.step():
    pass
"""
    place.run(program.format(called))
    place.wait_for_rings()

    assert [path.parent.name for path in place.folder.glob("*/dltrace-*")] == [called]


def test_a_misspelt_variable_is_told(place):
    """Tracing goes on; one that only begins like ours may be Kubernetes'."""
    more = {"OTEL_DLTRACE_LEVELL": "step", "OTEL_DLTRACE_SERVICE_HOST": "10.0.0.1"}
    result = place.run("import otel_dltrace\nwith otel_dltrace.step():\n    pass", OTEL_DLTRACE="1", **more)
    misspelt, _summary = result.stderr.splitlines()
    place.wait_for_rings()

    what = "OTEL_DLTRACE_LEVELL is not a variable we know, and has no effect; did you mean OTEL_DLTRACE_LEVEL?"
    assert misspelt == f"otel_dltrace: {what}"
    assert sum(map(len, place.spans())) == 1


@pytest.mark.parametrize("variable", ["OTEL_DLTRACE_RUN", "OTEL_SERVICE_NAME"])
def test_blanks_are_nothing_said(place, variable):
    """There is one run directory, which is called after the program."""
    result = place.command("run", "--no-report", "--", sys.executable, str(place.write(STEP)), **{variable: "  "})

    assert result.returncode == 0, result.stderr
    assert [path.name.rpartition("-")[0] for path in place.runs()] == ["dltrace-program"]


@pytest.mark.parametrize(
    ("said", "env"),
    [
        pytest.param("", {"OTEL_DLTRACE_JOB": "bert "}, id="variable"),
        pytest.param("job='bert '", {}, id="field"),
    ],
)
def test_a_job_is_the_same_whoever_says_it(place, said, env):
    """Blanks are no part of its id, and its id is its name; so ranks that are told differently are of one run."""
    program = f"import otel_dltrace\notel_dltrace.start({said})\nwith otel_dltrace.step():\n    pass\n"
    place.run(program, OTEL_DLTRACE_RUN="0123456789abcdef", **env)
    place.wait_for_rings()

    assert [path.name for path in place.runs()] == [run_directory_name(Bind("bert", "1.0123456789abcdef", "bert"))]


STEP = """
import otel_dltrace
with otel_dltrace.step():
    pass
"""


def test_run_says_that_the_sdk_is_disabled(place):
    """Nothing is traced then, and nobody else would say why."""
    result = place.command("run", "--", "true", OTEL_SDK_DISABLED="true")

    assert result.stderr == "otel-dltrace: nothing was traced: OTEL_SDK_DISABLED=true forbids it\n"


@pytest.mark.parametrize(
    ("env", "printed"),
    [
        pytest.param({}, "['process', 'torch_world'] True", id="neither"),
        pytest.param({"OTEL_SDK_DISABLED": "true"}, "[] False", id="all"),
        pytest.param({"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "dltrace_process"}, "[] True", id="one source"),
    ],
)
def test_what_opentelemetry_disables_no_program_enables(place, env, printed):
    """As where `OTEL_DLTRACE=1` asks for tracing."""
    program = """
import otel_dltrace
otel_dltrace.instrument("process")
from otel_dltrace.instrument.registry import _registry
from otel_dltrace.record.tracer import live
print(sorted(_registry._on), live.tracer is not None)
"""
    assert place.run(program, **env).stdout == f"{printed}\n"


@pytest.mark.parametrize("options", [(), ("-X", "faulthandler"), ("-u",)], ids=" ".join)
def test_a_command_says_itself_what_is_wrong(place, options):
    """Whatever options its Python has."""
    command = [sys.executable, *options, "-m", "otel_dltrace", "report", "x"]
    result = place.finish(place.popen(command, OTEL_DLTRACE="1", OTEL_DLTRACE_LEVEL="bogus"))

    assert "tracing is off" not in result.stderr


@pytest.mark.parametrize(
    ("here", "said"),
    [
        pytest.param("/var/tmp", "runs/a", id="above it"),
        pytest.param("/var/tmp/runs/b", "../a", id="beside it"),
        pytest.param("/usr/share/doc", "/var/tmp/runs/a", id="elsewhere"),
        pytest.param("/", "/var/tmp/runs/a", id="a container's working directory"),
    ],
)
def test_a_path_is_said_as_seen_from_here_where_that_is_shorter(monkeypatch, here, said):
    """A slash less is nothing won."""
    monkeypatch.setattr(os, "getcwd", lambda: here)

    assert short_path(Path("/var/tmp/runs/a")) == said


def test_where_the_spans_will_be_is_said_of_a_drain_that_is_slow(capsys, tmp_path, monkeypatch):
    """It has not made the run directory yet."""
    monkeypatch.setattr(guard, "_said", set())
    monkeypatch.chdir(tmp_path)
    say_where(
        tmp_path / "dltrace-job-1", False, DrainStarter("home", tmp_path, "auto", {}, lambda _ring: None), is_over=False
    )

    assert capsys.readouterr().err == (
        "otel_dltrace: the drain did not finish (it has not answered yet; if it is gone, `otel-dltrace recover` "
        "finishes its work); the spans will be in dltrace-job-1; read them with: otel-dltrace report dltrace-job-1\n"
    )


def test_figures_that_cannot_be_written_are_told_of_a_ring_that_has_been_read(capsys, tmp_path, monkeypatch):
    """As where the run directory has become somebody else's: the drain is not at work any more."""
    monkeypatch.setattr(guard, "_said", set())
    monkeypatch.chdir(tmp_path)
    run, why = tmp_path / "dltrace-job-1", "cannot be written ([Errno 13] Permission denied); they are tried again"
    run.mkdir()
    (tmp_path / "home.log").write_text(
        f"otel_dltrace: the figures of {run} {why}\notel_dltrace: the figures of {run}2 x\n"
    )
    say_where(run, True, DrainStarter("home", tmp_path, "auto", {}, lambda _ring: None), is_over=False)

    assert capsys.readouterr().err == (
        f"otel_dltrace: so far the figures of {run} {why}; in dltrace-job-1; "
        "read them with: otel-dltrace report dltrace-job-1\n"
    )


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="alone"),
        pytest.param({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "4"}, id="first rank of a host"),
    ],
)
def test_rings_that_nobody_drains_are_told_at_the_end(place, env):
    """The spans wait there for as long as the host runs; what is told reads them."""
    done = place.run(STEP, OTEL_DLTRACE="1", OTEL_DLTRACE_DRAIN="off", OTEL_DLTRACE_RUN="one", **env)
    cure = done.stderr.split("`")[1].replace("otel-dltrace", f"{sys.executable} -m otel_dltrace")
    recovered = place.finish(place.popen(["sh", "-c", cure]))
    (run,) = place.runs()

    assert done.stderr == (
        f"otel_dltrace: the spans wait in {place.rings}, which no drain serves (OTEL_DLTRACE_DRAIN=off); "
        f"`OTEL_DLTRACE_RING_DIR={place.rings} otel-dltrace recover`, or a drain started with --stay, puts them into "
        f"{run.name}; read them with: otel-dltrace report {run.name}\n"
    )
    assert recovered.stdout.startswith(f"{run.name}: 1 spans recovered, 0 of them open\n"), recovered.stderr


@pytest.mark.parametrize("is_for_all", [True, False], ids=["all rings", "this one's"])
def test_rings_that_a_sidecar_drains_are_not_told(place, is_for_all):
    """Nor those of a host's other ranks: the first one's sentence is for all of them."""
    off = {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_DRAIN": "off"}
    other = place.run(STEP, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", **off)
    asked = place.run("from otel_dltrace.settings.config import Config\nprint(Config.from_env().home)", **off)
    home = [] if is_for_all else ["--home", asked.stdout.strip()]
    sidecar = place.popen([sys.executable, "-m", "otel_dltrace", "drain", "--stay", *home])
    servers.wait_until(lambda: any(map(is_listened_to, place.rings.glob("*.bell"))), what="the sidecar")
    drained = place.run(STEP, **off)
    sidecar.terminate()
    place.finish(sidecar)

    assert (other.stderr, drained.stderr) == ("", "")


def test_a_process_waits_two_seconds_at_its_end_in_all(place):
    """What others have to tell it is waited for in the same time as the drain."""
    done = place.run(
        """
        import time
        import otel_dltrace
        from otel_dltrace.record.launch import DrainStarter
        from otel_dltrace.record.tracer import live
        otel_dltrace.start()
        with otel_dltrace.step():
            pass
        DrainStarter.finish = lambda _starter, _ring, timeout: print(0 <= timeout <= 0.5)
        live.tracer.leaving.append(lambda: time.sleep(1.5))
        otel_dltrace.stop()
        """
    )
    assert (done.returncode, done.stdout) == (0, "True\n")


def test_of_ranks_that_are_started_by_hand_the_first_one_of_the_host_tells(place):
    """Without LOCAL_RANK each takes itself for that one; the drain knows all."""
    code = """
        import os, time
        import otel_dltrace
        for _ in range(3):  # who it is is settled by then
            with otel_dltrace.step():
                pass
        while not os.path.exists(f"end {os.environ['RANK']}"):
            time.sleep(0.05)
        """
    env = {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_RUN": "one", "WORLD_SIZE": "2"}
    ranks = [place.start(code, RANK=str(rank), **env) for rank in range(2)]
    told = place.folder.glob
    servers.wait_until(
        lambda: any(path.read_text().count('"pid"') == 2 for path in told("dltrace-*/hosts/*/drain.json")),
        what="both ranks in the drain's figures",
    )
    said = []
    for rank in (1, 0):
        (place.folder / f"end {rank}").touch()
        said.append(place.finish(ranks[rank]).stderr)
    (run,) = place.runs()

    read = f"read them with: otel-dltrace report {run.name}"
    assert said == ["", f"otel_dltrace: 6 spans recorded, none lost; in {run.name}; {read}\n"]


def test_a_host_waits_for_its_own_processes(tmp_path):
    """Another whose name only begins like its own is another."""
    host = host_folder_name(os.uname().nodename, boot_id().hex())
    told = json.dumps({"summary": {"processes": 1}, "processes": [{}]})
    drained = []
    for name in (f"{os.uname().nodename}-2-0123abcd", host, f"{host}-2"):
        (tmp_path / "hosts" / name).mkdir(parents=True)
        (tmp_path / "hosts" / name / "drain.json").write_text(told)
        drained.append([host_is_drained(tmp_path, ranks, 0.0) for ranks in (1, 2)])

    assert drained == [[False, False], [True, False], [True, True]]


def test_of_several_hosts_each_tells_its_own_spans_and_run_all_with_their_names(tmp_path, monkeypatch, capsys):
    """Nobody knows yet that none is lost on a host whose ranks have not been read to their end."""
    monkeypatch.setattr(guard, "_said", set())
    monkeypatch.chdir(tmp_path)
    run, here = tmp_path / "dltrace-job-1", os.uname().nodename
    for name, host, spans, read in (
        (host_folder_name(here, boot_id().hex()), here, 6, 2),
        ("node-0123abcd", "~", 4, 1),
    ):
        told = {"summary": {"spans": spans, "processes": read}, "processes": [{"host": host}, {"host": host}]}
        (run / "hosts" / name).mkdir(parents=True)
        (run / "hosts" / name / "drain.json").write_text(json.dumps(told))
    say_where(run, True, DrainStarter("home", tmp_path, "auto", {}, lambda _ring: None), is_over=True)

    assert capsys.readouterr().err == (
        f"otel_dltrace: {here}: 6 spans recorded, none lost; in dltrace-job-1; "
        "read them with: otel-dltrace report dltrace-job-1\n"
    )
    assert sorted(read_summary(run).split("; ")) == sorted(
        [f"{here}: 6 spans recorded, none lost", "~: 4 spans recorded so far"]
    )


def test_spans_in_the_folder_of_another_container_are_told(tmp_path):
    """One drain reads the rings that both share, and its folder has the name of the first."""
    (tmp_path / "hosts" / "other-0123abcd").mkdir(parents=True)
    told = {"summary": {"spans": 6, "processes": 2}, "processes": [{"host": "other"}, {"host": "own"}]}
    (tmp_path / "hosts" / "other-0123abcd" / "drain.json").write_text(json.dumps(told))

    assert read_summary(tmp_path, "own-0123abcd*") == "6 spans recorded, none lost"


def test_a_folder_may_be_a_path(tmp_path):
    """As everywhere in Python."""
    assert Config(directory=tmp_path) == Config(directory=str(tmp_path))


@pytest.mark.parametrize("command", [("run", "--", "true"), ("drain",), ("recover",)], ids=lambda words: words[0])
def test_a_ring_folder_that_cannot_be_made_ends_a_command_with_code_2(place, command):
    """One sentence, and no traceback."""
    result = place.command(*command, OTEL_DLTRACE_RING_DIR="/proc/zz")

    said = "otel-dltrace: OTEL_DLTRACE_RING_DIR='/proc/zz' cannot be written: No such file or directory\n"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", said)


@pytest.mark.parametrize("call", ["start", "instrument"])
def test_a_bad_variable_ends_no_program(place, call):
    """What the environment says wrong is one sentence, also where the program asks for tracing itself."""
    result = place.run(f"import otel_dltrace\notel_dltrace.{call}()\nprint('trained')\n", OTEL_DLTRACE_LEVEL="banana")

    levels = "step, collective, phase, partition"
    said = f"otel_dltrace: OTEL_DLTRACE_LEVEL='banana' is not a level; use one of {levels}; tracing is off\n"
    assert (result.returncode, result.stdout, result.stderr) == (0, "trained\n", said)


NAMED = """
import otel_dltrace
otel_dltrace.start(world="rollout", level="collective")
for _ in range(2):
    with otel_dltrace.step(), otel_dltrace.phase("not recorded"):
        pass
otel_dltrace.instrument(world="another")
"""


def test_fields_of_the_configuration_may_be_given_by_name(place):
    """`start(world=...)` is the environment's configuration but for that; one that comes too late is told so."""
    result = place.run(NAMED, OTEL_DLTRACE_LEVEL="partition")
    place.wait_for_rings()

    (batch,) = place.spans()
    assert batch.process.bind is not None
    assert (batch.process.bind.world, {batch.descriptor_of(i).name for i in range(len(batch))}) == (
        "rollout",
        {"rank.step"},
    )
    assert "tracing is already on and stays as it is" in result.stderr


JOB = """
import sys, otel_dltrace
import torch
import torch.distributed as dist

otel_dltrace.instrument(job="nightly")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dist.destroy_process_group()
"""


def test_the_program_may_name_its_job(place, tmp_path):
    """Its name is the job's id, before what the launcher calls it, and also where ranks agree through torch's store."""
    pytest.importorskip("torch")
    place.run(JOB, str(tmp_path / "store"), JOB_UID="of the launcher")
    place.wait_for_rings()

    assert [batch.process.bind and batch.process.bind.job for batch in place.spans()] == ["nightly"]


def test_only_true_disables_the_sdk(place):
    """OpenTelemetry takes every other value for false and warns; so do we, once."""
    code = "import otel_dltrace\nwith otel_dltrace.step():\n    pass\nprint('trained')"
    result = place.run(code, OTEL_DLTRACE="1", OTEL_SDK_DISABLED="1")
    warning, _summary = result.stderr.splitlines()
    place.wait_for_rings()

    assert (result.stdout, warning) == (
        "trained\n",
        "otel_dltrace: OTEL_SDK_DISABLED='1' disables nothing; OpenTelemetry accepts only true",
    )
    assert sum(map(len, place.spans())) == 1


def test_an_attribute_that_is_no_pair_is_told_and_left_out(place):
    """OpenTelemetry's SDK warns of it, too; the others are there, and so are the spans."""
    code = "import otel_dltrace\nwith otel_dltrace.step():\n    pass"
    result = place.run(code, OTEL_DLTRACE="1", OTEL_RESOURCE_ATTRIBUTES="team:red, run=5%2C6,")
    warning, _summary = result.stderr.splitlines()
    place.wait_for_rings()

    assert warning == "otel_dltrace: OTEL_RESOURCE_ATTRIBUTES: 'team:red' is not name=value, and is left out"
    assert [dict(batch.process.resource)["run"] for batch in place.spans()] == ["5,6"]


@pytest.mark.parametrize(("variable", "value", "cure"), BAD)
def test_a_bad_value_in_the_environment_leaves_the_program_alone(place, variable, value, cure):
    """One sentence on standard error, no tracing, the program's own exit code."""
    env = {"OTEL_DLTRACE": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", variable: value}
    result = place.run("print('trained')", **env)

    assert (result.returncode, result.stdout) == (0, "trained\n")
    sentences = [line for line in result.stderr.splitlines() if line]
    assert len(sentences) == 1, result.stderr
    assert cure in sentences[0]
    assert sentences[0].startswith("otel_dltrace: ")
    assert place.runs() == []


def test_what_nobody_thought_of_leaves_the_program_alone(place):
    """A value on which Python's own functions stumble is one sentence as well."""
    result = place.run("print('trained')", OTEL_DLTRACE="1", OTEL_DLTRACE_DIR="~nobody-of-this-name/runs")

    assert (result.returncode, result.stdout) == (0, "trained\n")
    assert result.stderr.startswith("otel_dltrace: ")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(("variable", "value", "cure"), [bad for bad in BAD if bad.values[0] != "OTEL_DLTRACE"])
def test_a_bad_value_ends_a_command_with_code_2(place, variable, value, cure):
    """`run` refuses before it starts anything."""
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", variable: value}
    result = place.command("run", "--", "echo", "trained", **env)

    assert result.returncode == 2
    assert result.stdout == ""
    assert cure in result.stderr


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({}, id="nothing set"),
        pytest.param({"OTEL_DLTRACE": "0"}, id="off"),
        pytest.param({"OTEL_DLTRACE": "1", "OTEL_SDK_DISABLED": "TRUE"}, id="OpenTelemetry disabled"),
    ],
)
def test_what_is_off_leaves_no_trace(place, env):
    """No ring, no module of ours beyond the switch."""
    code = "import sys; print(sorted(m for m in sys.modules if m.startswith('otel_dltrace.record.rec')))"
    result = place.run(code, **env)

    loaded = ["otel_dltrace.record.recorder"] if env.get("OTEL_DLTRACE") == "1" else []
    assert result.stdout.strip() == str(loaded)
    assert list(place.rings.iterdir()) == []


def test_a_program_that_records_nothing_has_no_ring(place):
    """Launchers, compile workers and DataLoader workers never make one."""
    result = place.run("print('ok')", OTEL_DLTRACE="1")

    assert result.stderr == ""
    assert list(place.rings.iterdir()) == []


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        pytest.param("'no_such'", "'no_such' cannot be traced; choose from ", id="unknown"),
        pytest.param(
            "'byteps'", "'byteps' was asked for, but byteps is not installed: pip install byteps", id="absent"
        ),
        pytest.param(
            "'torch', 'horovod'",
            "'horovod' was asked for, but horovod is not installed: pip install '.[horovod]'",
            id="absent, of an extra of ours",
        ),
        pytest.param("3", "start() takes a Config, or its fields by name, not 3", id="no name"),
    ],
)
def test_a_framework_that_is_asked_for_by_name_must_be_there(place, asked, said):
    """One sentence that names the cure, and nothing is traced."""
    program = f"""
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("byteps", "horovod") else find(name, *more)
import otel_dltrace
try:
    otel_dltrace.instrument({asked})
except ValueError as error:
    print(error)
from otel_dltrace.instrument.registry import _registry
from otel_dltrace.record.tracer import live
assert not _registry._on and live.tracer is None
"""
    assert place.run(program).stdout.startswith(said)


def test_what_is_asked_for_by_name_is_traced_alone(place):
    """A package is all of its sources, and a source is itself; who the ranks are is known with any of them."""
    program = """
import otel_dltrace
from otel_dltrace.instrument.registry import _registry
otel_dltrace.instrument("torch_ddp", "pushpull")
print(sorted(_registry._on))
otel_dltrace.uninstrument()
otel_dltrace.instrument("torch")
print(sorted(_registry._on))
"""
    assert place.run(program).stdout.splitlines() == [
        "['pushpull', 'torch_ddp', 'torch_world']",
        "['torch_ddp', 'torch_device', 'torch_distributed', 'torch_fsdp', 'torch_training', 'torch_world']",
    ]

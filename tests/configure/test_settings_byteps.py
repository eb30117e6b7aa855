"""The variables of BytePS say what ours leave open."""

import re

import pytest

from otel_dltrace import Config
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.settings.switch import is_switched_off, is_switched_on

ON = {"BYTEPS_TRACE_ON": "1"}
PROFILE = {"BYTEPS_SERVER_ENABLE_PROFILE": "1"}
SERVER = {"DMLC_ROLE": "server"}


@pytest.mark.parametrize(
    ("env", "config"),
    [
        pytest.param(ON, Config("partition", "9-19", comm_directory="trace", comm_steps="10-20"), id="defaults"),
        pytest.param(
            ON | {"BYTEPS_TRACE_START_STEP": "1", "BYTEPS_TRACE_END_STEP": "2", "BYTEPS_TRACE_DIR": "/traces"},
            Config("partition", "0-1", comm_directory="/traces", comm_steps="1-2"),
            id="the first two steps, counted from 1",
        ),
        pytest.param({"BYTEPS_TRACE_ON": "2", "BYTEPS_TRACE_END_STEP": "0"}, Config(), id="2 is not on"),
        pytest.param({"BYTEPS_TRACE_DIR": "/traces"}, Config(), id="off"),
        pytest.param(
            ON | {"OTEL_DLTRACE_LEVEL": "step", "OTEL_DLTRACE_STEPS": "all", "OTEL_DLTRACE_COMM_DIR": "/here"},
            Config("partition", "all", comm_directory="/here", comm_steps="10-20"),
            id="ours go before theirs, but for the level that a timeline needs",
        ),
        pytest.param(PROFILE, Config(server_spans="on", server_profile="server_profile.json"), id="profile"),
        pytest.param(
            PROFILE | {"BYTEPS_SERVER_PROFILE_OUTPUT_PATH": "/p.json", "BYTEPS_SERVER_KEY_TO_PROFILE": "65536"},
            Config(server_spans="on", server_profile="/p.json", server_key="65536"),
            id="one key's profile",
        ),
        pytest.param({"BYTEPS_SERVER_ENABLE_PROFILE": "0"}, Config(server_spans="off"), id="no profile"),
    ],
)
def test_what_they_say_is_what_we_do(env, config):
    """A window, a directory, and which keys; as the drain is told it, too."""
    assert Config.from_env(env) == config
    assert Config.from_env({**env, **config.to_env()}) == config


@pytest.mark.parametrize(
    ("env", "cure"),
    [
        pytest.param(
            {"BYTEPS_SERVER_ENABLE_PROFILE": "1", "BYTEPS_SERVER_KEY_TO_PROFILE": "abc"},
            "BYTEPS_SERVER_KEY_TO_PROFILE='abc' is not a key",
            id="key that is none",
        ),
        pytest.param({"BYTEPS_TRACE_START_STEP": "0"}, "BYTEPS_TRACE_START_STEP='0' is not a step", id="from 0"),
        *(
            pytest.param({name: value}, re.escape(f"{name}={value!r} is not a step"), id=f"{name[13:]} {value}")
            for name in ("BYTEPS_TRACE_START_STEP", "BYTEPS_TRACE_END_STEP")
            for value in ("ten", "1.5", "10x", "+30", "-1", "20 30", "1e2", "\u00b2", "1" + "0" * 23, "2147483648")
        ),
        pytest.param({"BYTEPS_TRACE_END_STEP": "10"}, "BYTEPS_TRACE_END_STEP=10 must be greater", id="one step"),
        pytest.param({"BYTEPS_TRACE_START_STEP": "30"}, "BYTEPS_TRACE_START_STEP=30", id="beyond the default's end"),
    ],
)
def test_steps_that_are_none_are_an_error(env, cure):
    """BytePS aborts the process, or writes nothing."""
    with pytest.raises(ConfigError, match=cure):
        Config.from_env(ON | env)


@pytest.mark.parametrize(
    ("env", "cure"),
    [
        pytest.param(ON | {"BYTEPS_TRACE_DIR": "/proc/q"}, "BYTEPS_TRACE_DIR='/proc/q' cannot be written", id="traces"),
        pytest.param(
            PROFILE | {"BYTEPS_SERVER_PROFILE_OUTPUT_PATH": "/proc/q/p.json"},
            "BYTEPS_SERVER_PROFILE_OUTPUT_PATH='/proc/q' cannot be written",
            id="profile",
        ),
    ],
)
def test_a_place_that_cannot_be_written_is_said_at_once(env, cure):
    """The files are written at the end, when nobody looks any more."""
    with pytest.raises(ConfigError, match=cure):
        Config.from_env(env).check_writable(env)


@pytest.mark.parametrize(
    ("env", "is_on", "is_off"),
    [
        pytest.param(ON, True, False, id="timeline"),
        pytest.param(ON | {"OTEL_DLTRACE": "0"}, False, True, id="ours goes before theirs"),
        pytest.param(ON | {"OTEL_SDK_DISABLED": "true"}, False, True, id="OpenTelemetry disabled"),
        pytest.param(PROFILE | SERVER, True, False, id="a server's profile"),
        pytest.param(PROFILE, False, False, id="a server's profile on a worker"),
    ],
)
def test_they_switch_tracing_on(env, is_on, is_off):
    """Unless we are told otherwise."""
    assert (is_switched_on(env), is_switched_off(env)) == (is_on, is_off)


def test_a_server_may_be_told_otherwise_than_the_workers():
    """They are served by one drain all the same."""
    workers, server = Config(), Config(server_spans="on", server_profile="/p.json", server_key="1")
    assert (server.of_role("server").level, server.of_role("worker").level) == ("partition", "phase")
    assert Config(level="partition", server_spans="off").of_role("server").level == "collective"
    assert workers.home == server.home == Config(level="partition").home


def test_what_cannot_be_said_of_servers_is_an_error():
    """Which words there are, and what a key is."""
    with pytest.raises(ConfigError, match=r"^server_spans='maybe' is not one of auto, on, off"):
        Config(server_spans="maybe")
    with pytest.raises(ConfigError, match=r"^server_key='weight' is not a key"):
        Config(server_key="weight")


@pytest.mark.parametrize(
    ("env", "level"),
    [
        pytest.param(ON, 4, id="timeline"),
        pytest.param(PROFILE | SERVER, 4, id="a server's profile"),
        pytest.param(PROFILE, None, id="a server's profile on a worker"),
        pytest.param(ON | {"BYTEPS_TRACE_START_STEP": "0"}, None, id="a step that is none"),
    ],
)
def test_a_program_is_traced_because_of_them_alone(place, env, level):
    """Nothing of ours is set; what cannot be used is one sentence, and the program goes on."""
    program = "from otel_dltrace.record.tracer import live; print(live.tracer and live.tracer.recorder.level)"
    done = place.run(program, **env)

    assert (done.returncode, done.stdout) == (0, f"{level}\n")
    assert ("BYTEPS_TRACE_START_STEP='0' is not a step" in done.stderr) == ("BYTEPS_TRACE_START_STEP" in env)

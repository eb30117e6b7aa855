"""What BytePS's own variables say of the configuration; BytePS reads them in C, so numbers are read as C does."""

import re
from collections.abc import Mapping

from otel_dltrace.model.errors import ConfigError
from otel_dltrace.settings.said import said

_OF_WORKER = {"comm_directory": "BYTEPS_TRACE_DIR"}
_OF_SERVER = {"server_profile": "BYTEPS_SERVER_PROFILE_OUTPUT_PATH", "server_key": "BYTEPS_SERVER_KEY_TO_PROFILE"}
_NUMBER = re.compile(r"[0-9]{1,10}")
_MOST_STEPS = (1 << 31) - 1  # an int of C


def is_traced(env: Mapping[str, str]) -> bool:
    """Return whether ``BYTEPS_TRACE_ON`` is 1, for which the timeline needs the finest level."""
    return _atoi(env, "BYTEPS_TRACE_ON") == 1


def is_profiled(env: Mapping[str, str]) -> bool:
    """Return whether ``BYTEPS_SERVER_ENABLE_PROFILE`` is 1, for which servers write their profile."""
    return _atoi(env, "BYTEPS_SERVER_ENABLE_PROFILE") == 1


def asks(env: Mapping[str, str]) -> bool:
    """Return whether they switch tracing on in this process: a worker's timeline, or a server's profile."""
    return is_traced(env) or (env.get("DMLC_ROLE") == "server" and is_profiled(env))


def said_by_byteps(env: Mapping[str, str]) -> dict[str, object]:
    """Return the fields of the configuration that they say.

    Raises:
        ConfigError: The steps are none; BytePS would end the process.
    """
    return {**_worker(env), **_server(env)}


def variable_of(field: str, env: Mapping[str, str]) -> str:
    """Return the variable of theirs that says *field* of the configuration in *env*, "" if none does."""
    asked = (_OF_WORKER if is_traced(env) else {}) | (_OF_SERVER if is_profiled(env) else {})
    return asked.get(field, "")


def _worker(env: Mapping[str, str]) -> dict[str, object]:
    """Return what ``BYTEPS_TRACE_*`` say: steps are counted from 1 there, and the last one is traced, too."""
    if not is_traced(env):
        return {}
    start, end = _step(env, "BYTEPS_TRACE_START_STEP", 10), _step(env, "BYTEPS_TRACE_END_STEP", 20)
    if end <= start:
        raise ConfigError(
            f"BYTEPS_TRACE_END_STEP={end} must be greater than BYTEPS_TRACE_START_STEP={start} (20 and 10 unless set)"
        )
    folder = said(env, "BYTEPS_TRACE_DIR") or "./trace"
    return {"steps": f"{start - 1}-{end - 1}", "comm_steps": f"{start}-{end}", "comm_directory": folder}


def _step(env: Mapping[str, str], name: str, default: int) -> int:
    """Return the step in the variable *name*. BytePS reads a word as 0 and ``1.5`` as 1: nobody has meant that."""
    text = said(env, name)
    if not text:
        return default
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= _MOST_STEPS:
        raise ConfigError(
            f"{name}={text!r} is not a step: BytePS counts steps from 1, in whole numbers up to {_MOST_STEPS}"
        )
    return int(text)


def _server(env: Mapping[str, str]) -> dict[str, object]:
    """Return what ``BYTEPS_SERVER_*`` say of the server profile."""
    if not said(env, "BYTEPS_SERVER_ENABLE_PROFILE"):
        return {}
    if not is_profiled(env):
        return {"server_spans": "off"}
    path = said(env, "BYTEPS_SERVER_PROFILE_OUTPUT_PATH") or "server_profile.json"
    key = said(env, "BYTEPS_SERVER_KEY_TO_PROFILE")
    if key and not key.isdecimal():
        raise ConfigError(f"BYTEPS_SERVER_KEY_TO_PROFILE={key!r} is not a key: write a pid from server_profile.json")
    return {"server_spans": "on", "server_profile": path, "server_key": key}


def _atoi(env: Mapping[str, str], name: str) -> int:
    """Return the whole number that the variable *name* begins with, as C reads it: 0 where it begins with none."""
    found = re.match(r"[+-]?[0-9]{1,18}", said(env, name))
    return int(found[0]) if found else 0

"""The configuration: what is recorded, what goes out, and where to, as the environment says it or a program."""

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from otel_dltrace.model.errors import ConfigError, FieldError
from otel_dltrace.model.identity import h64
from otel_dltrace.model.numbers import MOST, whole_number
from otel_dltrace.model.plan import Window, parse_completions, parse_level
from otel_dltrace.model.topology import job_from_env
from otel_dltrace.record.ring import DEFAULT_SIZE
from otel_dltrace.record.ring_file import private_folder, squatted
from otel_dltrace.settings import byteps
from otel_dltrace.settings.paths import (
    absolute,
    as_said,
    began_in,
    check_writable,
    seen_from,
    which,
    working_directory,
)
from otel_dltrace.settings.said import said

SWITCH = "OTEL_DLTRACE"
"""The variable that switches tracing on; the names of the others begin with it."""
_ON, _OFF = ("1", "true", "on", "yes"), ("", "0", "false", "off", "no")
_OF_EXPORTERS = ("OTEL_EXPORTER_", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER", "OTEL_METRIC_EXPORT_", "OTEL_BSP_")
"""How the names of variables begin that say where spans and metrics go, and when."""
_KEY_DIGITS = 20
"""Of the largest key that BytePS can have, 64 bits wide."""
_KINDS = {str: "a text", int: "a whole number", bool: "True or False"}
_APART = {"apart": True}
"""Of the fields in which processes that one drain serves may differ."""
_PATHS = ("directory", "ring_directory", "comm_directory", "server_profile")


@dataclass(frozen=True)
class Config:
    """What is recorded, what goes out, and where to.

    Attributes:
        level: The finest level recorded: step, collective, phase or partition.
        steps: The steps that go out in full over OTLP: ``first=50,every=50``, ``10-20``, ``all``.
        directory: Where run directories are made.
        ring_directory: Where rings are, on a tmpfs; "" for ``/dev/shm/otel-dltrace-<uid>``.
        ring_size: Bytes of a process's ring, to which it records.
        span_budget: The most spans of a trace over OTLP, 0 for no limit.
        quota: Bytes that one host may keep of a job.
        drain: Who reads the rings: ``auto``, ``thread`` (no process may be started) or ``off`` (a sidecar does).
        metrics: Whether the drain samples the host, its GPUs and its ranks, and ranks record what only they know.
        job: The job's id; "" to agree on one.
        run: The id of this run, where ranks share no store; "" for none.
        world: The world's name, in jobs with several.
        launch: Which of several jobs of one run this is; "" if there is only one.
        comm_directory: Where the workers' ``comm.json``, as BytePS writes it, goes at the end; "" for nowhere.
        comm_steps: Which completions of each tensor are in it: ``10-20``, counted from 1 as BytePS does; "" for all.
        server_profile: The file for the servers' profile, as BytePS writes it, at the end; "" for none.
        server_spans: Whether parameter servers record pushes and pulls: ``on``, ``off``, ``auto`` (at level partition).
        server_key: The only key that they record; "" for all.

    Raises:
        ConfigError: A value cannot be used; it is a `ValueError`.
    """

    # A drain reads records of every level: it may serve processes that record at several.
    level: str = field(default="phase", metadata=_APART)
    steps: str = "first=50,every=50"
    directory: str = "."
    ring_directory: str = ""
    ring_size: int = DEFAULT_SIZE
    span_budget: int = 10_000
    quota: int = 5 << 30
    drain: str = "auto"
    metrics: bool = False
    job: str = ""
    run: str = ""
    world: str = "default"
    # These do not make a drain another one: a run has one for all its jobs, for workers and servers.
    launch: str = field(default="", metadata=_APART)
    comm_directory: str = field(default="", metadata=_APART)
    comm_steps: str = field(default="", metadata=_APART)
    server_profile: str = field(default="", metadata=_APART)
    server_spans: str = field(default="auto", metadata=_APART)
    server_key: str = field(default="", metadata=_APART)

    def __post_init__(self) -> None:
        """Check every value; whether paths can be written matters to those alone that write: `check_writable`."""
        for known in fields(self):
            _check_kind(known.name, getattr(self, known.name), type(known.default))
        self._leave_blanks()
        parse_level(self.level)
        Window.parse(self.steps)
        if self.drain not in ("auto", "thread", "off"):
            raise FieldError("drain", self.drain, " is not one of auto, thread, off")
        if self.server_spans not in ("auto", "on", "off"):
            raise FieldError("server_spans", self.server_spans, " is not one of auto, on, off")
        if self.server_key and not (self.server_key.isdecimal() and len(self.server_key) <= _KEY_DIGITS):
            raise FieldError("server_key", self.server_key, " is not a key: write declared key << 16 | partition")
        for name, least in (("ring_size", 1 << 17), ("span_budget", 0), ("quota", 0)):
            value = getattr(self, name)
            if value < least:
                raise FieldError(name, value, f" is too small; it must be at least {least}")
            if value > MOST:
                raise FieldError(name, value, f" is too large; it must be at most {MOST}")
        if not self.world:
            raise FieldError("world", "", " is not a name; jobs with one world use `default`")
        parse_completions(self.comm_steps)
        self._settle_paths()

    def _leave_blanks(self) -> None:
        """Leave out the blanks around texts, as of variables (`said`): ranks that are told by either are of one job."""
        for known in fields(self):
            value = getattr(self, known.name)
            if isinstance(value, str) and known.name not in _PATHS:
                object.__setattr__(self, known.name, value.strip())

    def _settle_paths(self) -> None:
        if not self.ring_directory:
            object.__setattr__(self, "ring_directory", str(private_folder()))
        for name in _PATHS:
            if getattr(self, name) or name == "directory":
                object.__setattr__(self, name, absolute(name, getattr(self, name)))

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None, here: str = "", **told: Any) -> "Config":
        """Return what the ``OTEL_DLTRACE_*`` variables in *env* (the process's own by default) say.

        BytePS's own variables say what these leave open; its timeline needs the finest level.

        Args:
            env: The variables.
            here: What paths are relative to, by default the working directory.
            told: Fields that are told otherwise, whatever *env* says.

        Raises:
            ConfigError: A variable or a field has a value that cannot be used, or is none.
        """
        env = os.environ if env is None else env
        values: dict[str, Any] = byteps.said_by_byteps(env)
        for name, variable in VARIABLES.items():
            if name not in told and (text := said(env, variable)):
                values[name] = _parse(variable, text, cls.__dataclass_fields__[name].type)
        if byteps.is_traced(env):
            values["level"] = "partition"
        values |= known_fields(told)
        if "directory" not in values:
            values["directory"] = began_in(env, here or working_directory()) or "."
        if here:
            values |= {name: seen_from(here, values[name]) for name in _PATHS if values.get(name)}
        with _called_as(env, told):
            return cls(**values)

    def check_writable(self, env: Mapping[str, str] | None = None, told: Collection[str] = ()) -> None:
        """Raise unless its paths can be written: some are only at the end, when nobody looks.

        Args:
            env: The variables that said them, the process's own by default.
            told: The names of the fields that no variable said.

        Raises:
            ConfigError: One cannot be, or is another user's under the name of ours.
        """
        with _called_as(os.environ if env is None else env, told):
            if why := squatted(self.rings):
                raise FieldError("ring_directory", self.ring_directory, f" {why}: name another folder on a tmpfs")
            for name in _PATHS:
                if path := getattr(self, name):
                    check_writable(name, Path(path).parent if name == "server_profile" else Path(path))
            if self.server_profile and Path(self.server_profile).is_dir():
                raise FieldError("server_profile", self.server_profile, " is a folder; name a file in it")

    def to_env(self) -> dict[str, str]:
        """Return the variables that say the same as this configuration, where BytePS's own say nothing."""
        values = {variable: getattr(self, name) for name, variable in VARIABLES.items()}
        texts = {k: str(int(v)) if isinstance(v, bool) else str(v) for k, v in values.items()}
        return texts | {VARIABLES[name]: as_said(getattr(self, name)) for name in _PATHS}

    def of_role(self, role: str) -> "Config":
        """Return this configuration with the level at which a process of *role* records."""
        if role != "server" or self.server_spans == "auto":
            return self
        return replace(self, level="partition" if self.server_spans == "on" else "collective")

    @property
    def home(self) -> str:
        """The name of the drain that serves this, for a process that begins to record where we are now."""
        return self.home_from(working_directory())

    def home_from(self, here: str) -> str:
        """Return the name of the drain that serves this for a process that began to record in the folder *here*.

        There is one per host, user, folder, configuration, receiver and job. Ranks of a run that has an id may be
        started by several launchers; it is one job all the same. Of containers that share the rings each has folders of
        its own under the same paths: one's drain would write the other's spans where they end with it.
        """
        began = began_in(os.environ, here)
        receiver = sorted(pair for pair in os.environ.items() if pair[0].startswith(_OF_EXPORTERS))
        job = "" if self.run else job_from_env(os.environ)
        shared = repr([getattr(self, known.name) for known in fields(self) if known.metadata != _APART])
        return f"{h64(str(os.getuid()), began, which(began), shared, repr(receiver), job):016x}"

    @property
    def rings(self) -> Path:
        """Where rings live."""
        return Path(self.ring_directory)


def known_fields(told: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *told*, each of which is a field of the configuration.

    Raises:
        ConfigError: One is none.
    """
    for name in told:
        if name not in VARIABLES:
            raise ConfigError(f"{name!r} is not a field of the configuration; the fields are {', '.join(VARIABLES)}")
    return told


@contextmanager
def _called_as(env: Mapping[str, str], told: Collection[str]) -> Iterator[None]:
    """Have a sentence about a field name what said it: a variable in *env*, unless its name is in *told*."""
    try:
        yield
    except FieldError as error:
        if error.name in told:
            raise
        variable = VARIABLES[error.name]
        if not said(env, variable):
            variable = byteps.variable_of(error.name, env) or variable
        # A number as it stands there: of 64K nobody finds 65536.
        value = said(env, variable) if isinstance(error.value, int) else error.value
        raise FieldError(variable, value, error.why) from None


def _check_kind(name: str, value: object, kind: type) -> None:
    is_path = name in _PATHS and isinstance(value, os.PathLike)
    is_flag = isinstance(value, bool) and kind is not bool  # which Python has for a whole number
    if is_flag or not (isinstance(value, kind) or is_path):
        raise FieldError(name, value, f" is of type {type(value).__name__}; it must be {_KINDS[kind]}")


_SHORT = {"directory": "DIR", "ring_directory": "RING_DIR", "comm_directory": "COMM_DIR"}
VARIABLES = {f.name: f"{SWITCH}_{_SHORT.get(f.name, f.name.upper())}" for f in fields(Config)}


def _parse(variable: str, text: str, kind: object) -> object:
    if kind is bool:
        return truth(variable, text)
    if kind is not int:
        return text
    number = whole_number(text)
    if number is None:
        raise ConfigError(f"{variable}={text!r} is not a whole number (K, M or G may follow it)")
    return number


def truth(variable: str, text: str) -> bool:
    """Return what *text*, the value of *variable*, says of yes and no.

    Raises:
        ConfigError: Neither.
    """
    if text.lower() in _ON:
        return True
    if text.lower() in _OFF:
        return False
    raise ConfigError(f"{variable}={text!r} is neither 1 nor 0")

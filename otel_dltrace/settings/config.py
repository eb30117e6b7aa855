"""The configuration: what is recorded, what goes out, and where to, as the environment says it or a program."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.identity import h64
from otel_dltrace.model.numbers import whole_number
from otel_dltrace.model.plan import Window, parse_completions, parse_level
from otel_dltrace.model.topology import job_from_env
from otel_dltrace.record.ring import DEFAULT_SIZE
from otel_dltrace.settings import byteps

SWITCH = "OTEL_DLTRACE"
"""The variable that switches tracing on; the names of the others begin with it."""
BEGAN_IN = "_OTEL_DLTRACE_BEGAN_IN"
"""Set by ``otel-dltrace run``: its working directory, which its program may leave before it starts what is traced."""
_ON, _OFF = ("1", "true", "on", "yes"), ("", "0", "false", "off", "no")
_OF_EXPORTERS = ("OTEL_EXPORTER_", "OTEL_TRACES_EXPORTER", "OTEL_METRICS_EXPORTER", "OTEL_METRIC_EXPORT_", "OTEL_BSP_")
"""How the names of variables begin that say where spans and metrics go, and when."""
_KEY_DIGITS = 20
"""Of the largest key that BytePS can have, 64 bits wide."""
_KINDS = {str: "a text", int: "a whole number", bool: "True or False"}


@dataclass(frozen=True)
class Config:
    """What is recorded, what goes out, and where to.

    Attributes:
        level: The finest level recorded: step, collective, phase or partition.
        steps: The steps that go out in full over OTLP: ``first=50,every=50``, ``10-20``, ``all``.
        directory: Where run directories are made.
        ring_directory: Where rings live, a tmpfs; "" for ``/dev/shm/otel-dltrace-<uid>``.
        ring_size: Bytes of a ring.
        span_budget: Spans per trace over OTLP, 0 for no limit.
        quota: Bytes that one host may keep of a job.
        drain: ``auto``, ``thread`` (no process may be started) or ``off`` (a sidecar drains).
        metrics: Whether the drain samples the host, its GPUs and its ranks, and ranks record what only they know.
        job: The job's id; "" to agree on one.
        run: The id of this run, where ranks share no store; "" for none.
        world: The world's name, in jobs with several.
        launch: Which of several jobs of one run this is; "" where there is but one.
        comm_directory: Where the workers' ``comm.json``, as BytePS writes it, goes at the end; "" for nowhere.
        comm_steps: Which completions of each tensor are in it: ``10-20``, counted from 1 as BytePS does; "" for all.
        server_profile: The file for the servers' profile, as BytePS writes it, at the end; "" for none.
        server_spans: Whether parameter servers record pushes and pulls: ``on``, ``off``, ``auto`` (at level partition).
        server_key: The one key of which they do; "" for all.

    Raises:
        ConfigError: A value cannot be used.
    """

    # A drain reads records of every level: it may serve processes that record at several.
    level: str = field(default="phase", repr=False)
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
    launch: str = field(default="", repr=False)
    comm_directory: str = field(default="", repr=False)
    comm_steps: str = field(default="", repr=False)
    server_profile: str = field(default="", repr=False)
    server_spans: str = field(default="auto", repr=False)
    server_key: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        """Check every value."""
        for known in fields(self):
            _check_kind(known.name, getattr(self, known.name), type(known.default))
        parse_level(self.level)
        Window.parse(self.steps)
        if self.drain not in ("auto", "thread", "off"):
            raise ConfigError(f"{SWITCH}_DRAIN={self.drain!r} is none of auto, thread, off")
        if self.server_spans not in ("auto", "on", "off"):
            raise ConfigError(f"{SWITCH}_SERVER_SPANS={self.server_spans!r} is none of auto, on, off")
        if self.server_key and not (self.server_key.isdecimal() and len(self.server_key) <= _KEY_DIGITS):
            raise ConfigError(f"{SWITCH}_SERVER_KEY={self.server_key!r} is no key: declared key << 16 | partition")
        for name, least in (("ring_size", 1 << 17), ("span_budget", 0), ("quota", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{SWITCH}_{name.upper()}={value!r} is too small; it must be at least {least}")
        if not self.world:
            raise ConfigError(f"{VARIABLES['world']}='' is no name; it is `default` in jobs with one world")
        parse_completions(self.comm_steps)
        self._settle_paths()

    def _settle_paths(self) -> None:
        """Make paths absolute, and see that they can be written: some are only at the end, when nobody looks."""
        if not self.ring_directory:
            object.__setattr__(self, "ring_directory", _ring_directory())
        for name in ("directory", "ring_directory", "comm_directory", "server_profile"):
            if getattr(self, name):
                path = _absolute(name, getattr(self, name))
                object.__setattr__(self, name, path)
                _check_writable(name, Path(path).parent if name == "server_profile" else Path(path))
        if self.server_profile and Path(self.server_profile).is_dir():
            raise ConfigError(f"{_variables('server_profile')}={self.server_profile!r} is a folder; name a file in it")

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "Config":
        """Return what the ``OTEL_DLTRACE_*`` variables in *env* (the process's own by default) say.

        BytePS's own variables say what these leave open; its timeline needs the finest level.

        Raises:
            ConfigError: A variable has a value that cannot be used.
        """
        env = os.environ if env is None else env
        values: dict[str, object] = byteps.said_by_byteps(env)
        for name, variable in VARIABLES.items():
            text = env.get(variable, "").strip()
            if text:
                values[name] = _parse(variable, text, cls.__dataclass_fields__[name].type)
        values.setdefault("directory", _began_in(env))
        if byteps.is_traced(env):
            values["level"] = "partition"
        return cls(**values)  # type: ignore[arg-type]  # each value was parsed by its field's own type

    def to_env(self) -> dict[str, str]:
        """Return the variables that say the same as this configuration."""
        values = {variable: getattr(self, name) for name, variable in VARIABLES.items()}
        return {k: str(int(v)) if isinstance(v, bool) else str(v) for k, v in values.items()}

    def of_role(self, role: str) -> "Config":
        """Return this configuration with the level at which a process of *role* records."""
        if role != "server" or self.server_spans == "auto":
            return self
        return replace(self, level="partition" if self.server_spans == "on" else "collective")

    @property
    def home(self) -> str:
        """The name of the drain that serves this: one per host, user, folder, configuration, receiver and job.

        Ranks of a run that has an id may be started by several launchers; it is one job all the same.
        """
        receiver = sorted(pair for pair in os.environ.items() if pair[0].startswith(_OF_EXPORTERS))
        job = "" if self.run else job_from_env(os.environ)
        return f"{h64(str(os.getuid()), _began_in(os.environ), repr(self), repr(receiver), job):016x}"

    @property
    def rings(self) -> Path:
        """Where rings live."""
        return Path(self.ring_directory)


def _began_in(env: Mapping[str, str]) -> str:
    """Return the folder that this job began in: that of ``otel-dltrace run``, if it can be written here, or ours."""
    began = env.get(BEGAN_IN, "")
    return began if os.access(began, os.W_OK) else str(Path.cwd())


def _ring_directory() -> str:
    """Return where rings live unless told: always tmpfs, never a file system that may be remote."""
    return f"/dev/shm/otel-dltrace-{os.getuid()}"  # noqa: S108  -- private to the user, mode 0700


def _check_kind(name: str, value: object, kind: type) -> None:
    is_path = kind is str and isinstance(value, os.PathLike)
    if not isinstance(value, kind) and not is_path:
        said = f"{VARIABLES[name]}={value!r} is of type {type(value).__name__}"
        raise ConfigError(f"{said}; it must be {_KINDS[kind]}")


def _absolute(name: str, path: str) -> str:
    try:
        absolute = str(Path(path).expanduser().absolute())
        absolute.encode()
    except RuntimeError:
        raise ConfigError(f"{VARIABLES[name]}={path!r} names a user who has no home directory") from None
    except UnicodeEncodeError:
        raise ConfigError(f"{VARIABLES[name]}={absolute!r} is not UTF-8; Arrow's files need a folder that is") from None
    return absolute


def _variables(name: str) -> str:
    """Return the variables that may say the field *name*."""
    return " or ".join(filter(None, (VARIABLES[name], byteps.OF_FIELD.get(name))))


def _check_writable(name: str, directory: Path) -> None:
    """Raise unless *directory*, or what is there of its parents, takes new files; leave nothing behind."""
    try:
        there = next(path for path in (directory, *directory.parents) if _is_there(path))
        probe = there / f".otel_dltrace-{os.getpid()}"
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{_variables(name)}={str(directory)!r} cannot be written: {error.strerror}") from None


def _is_there(path: Path) -> bool:
    """Return whether there is something at *path*; since Python 3.14 `Path.exists` takes any error for a no.

    Raises:
        OSError: It cannot be told, as of a name that is too long.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


_SHORT = {"directory": "DIR", "ring_directory": "RING_DIR", "comm_directory": "COMM_DIR"}
VARIABLES = {f.name: f"{SWITCH}_{_SHORT.get(f.name, f.name.upper())}" for f in fields(Config)}


def _parse(variable: str, text: str, kind: object) -> object:
    if kind in (bool, "bool"):
        return truth(variable, text)
    if kind not in (int, "int"):
        return text
    number = whole_number(text)
    if number is None:
        raise ConfigError(f"{variable}={text!r} is not a whole number (with K, M or G after it, if you like)")
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

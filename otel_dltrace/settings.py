"""What the environment says: the configuration, the names, and who this process is, each read here alone."""

import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.identity import Bind, h64
from otel_dltrace.model.plan import Window, parse_completions, parse_level
from otel_dltrace.model.semconv import DL_LAUNCHER_SPAN_ID, DL_LAUNCHER_TRACE_ID
from otel_dltrace.model.topology import World
from otel_dltrace.record import guard
from otel_dltrace.record.carrier import read_traceparent
from otel_dltrace.record.ring import DEFAULT_SIZE

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_ON, _OFF = ("1", "true", "on", "yes"), ("", "0", "false", "off", "no")
_KINDS = {str: "a text", int: "a whole number", bool: "True or False"}
_NUMBER = re.compile(r"[0-9]{1,10}")
_MOST_STEPS = (1 << 31) - 1  # an int of C
_PREFIX = "OTEL_DLTRACE"
_SDK_DISABLED = "OTEL_SDK_DISABLED"
JOB_NAME = "_OTEL_DLTRACE_JOB_NAME"
"""Set by a launcher of ours for processes that run other programs than the job's own."""
INSTRUMENTOR_PREFIX = "dltrace_"
"""Before the name of a source it is the name of the instrumentor that traces it."""


class Viewer(NamedTuple):
    """Where traces are looked at: the variable that says its address, and the address that it has by default."""

    variable: str
    address: str


VIEWERS = {
    "jaeger": Viewer(f"{_PREFIX}_JAEGER_URL", "http://localhost:16686"),
    "tempo": Viewer(f"{_PREFIX}_TEMPO_URL", "http://localhost:3200"),
    "grafana": Viewer(f"{_PREFIX}_GRAFANA_URL", "http://localhost:3000"),
    "perfetto": Viewer(f"{_PREFIX}_PERFETTO_URL", "https://ui.perfetto.dev"),
}


def viewer_url(env: Mapping[str, str], name: str) -> str:
    """Return the address of the viewer *name*, one of `VIEWERS`, without a slash at its end."""
    viewer = VIEWERS[name]
    return (env.get(viewer.variable, "").strip() or viewer.address).rstrip("/")


def default_ring_directory() -> str:
    """Return where rings live unless told: always tmpfs, never a file system that may be remote."""
    return f"/dev/shm/otel-dltrace-{os.getuid()}"  # noqa: S108  -- private to the user, mode 0700


@dataclass(frozen=True)
class Config:
    """What is recorded, what goes out, and where to.

    Attributes:
        level: The finest level recorded: step, collective, phase or partition.
        steps: The steps that go out in full over OTLP: ``first=50,every=50``, ``10-20``, ``all``.
        directory: Where run directories are made.
        ring_directory: Where rings live; a tmpfs.
        ring_size: Bytes of a ring.
        span_budget: Spans per trace over OTLP, 0 for no limit.
        quota: Bytes of spans that one host may keep in a run directory.
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
            raise ConfigError(f"{_PREFIX}_DRAIN={self.drain!r} is none of auto, thread, off")
        if self.server_spans not in ("auto", "on", "off"):
            raise ConfigError(f"{_PREFIX}_SERVER_SPANS={self.server_spans!r} is none of auto, on, off")
        if self.server_key and not self.server_key.isdecimal():
            raise ConfigError(f"{_PREFIX}_SERVER_KEY={self.server_key!r} is no key: declared key << 16 | partition")
        for name, least in (("ring_size", 1 << 17), ("span_budget", 0), ("quota", 0)):
            value = getattr(self, name)
            if value < least:
                raise ConfigError(f"{_PREFIX}_{name.upper()}={value!r} is too small; it must be at least {least}")
        if not self.world:
            raise ConfigError(f"{VARIABLES['world']}='' is no name; it is `default` in jobs with one world")
        parse_completions(self.comm_steps)
        self._settle_paths()

    def _settle_paths(self) -> None:
        """Make paths absolute, and see that they can be written: some are only at the end, when nobody looks."""
        if not self.ring_directory:
            object.__setattr__(self, "ring_directory", default_ring_directory())
        for name in ("directory", "ring_directory", "comm_directory", "server_profile"):
            if getattr(self, name):
                path = _absolute(name, getattr(self, name))
                object.__setattr__(self, name, path)
                _check_writable(name, Path(path).parent if name == "server_profile" else Path(path))

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "Config":
        """Return what the ``OTEL_DLTRACE_*`` variables in *env* (the process's own by default) say.

        BytePS's own variables say what these leave open; its timeline needs the finest level.

        Raises:
            ConfigError: A variable has a value that cannot be used.
        """
        env = os.environ if env is None else env
        values: dict[str, object] = {**_byteps_worker(env), **_byteps_server(env)}
        for name, variable in VARIABLES.items():
            text = env.get(variable, "").strip()
            if text:
                values[name] = _parse(variable, text, cls.__dataclass_fields__[name].type)
        if _atoi(env, "BYTEPS_TRACE_ON") == 1:
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
        """The name of the drain that serves this configuration: one per host, user, folder and configuration."""
        return f"{h64(str(os.getuid()), str(Path.cwd()), repr(self)):016x}"

    @property
    def rings(self) -> Path:
        """Where rings live."""
        return Path(self.ring_directory)


def _check_kind(name: str, value: object, kind: type) -> None:
    is_path = kind is str and isinstance(value, os.PathLike)
    if not isinstance(value, kind) and not is_path:
        said = f"{VARIABLES[name]}={value!r} is of type {type(value).__name__}"
        raise ConfigError(f"{said}; it must be {_KINDS[kind]}")


def _absolute(name: str, path: str) -> str:
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:
        raise ConfigError(f"{VARIABLES[name]}={path!r} names a user who has no home directory") from None


def _check_writable(name: str, directory: Path) -> None:
    """Raise unless *directory*, or what is there of its parents, takes new files; leave nothing behind."""
    try:
        there = next(path for path in (directory, *directory.parents) if path.exists())
        probe = there / f".otel_dltrace-{os.getpid()}"
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        probe.unlink(missing_ok=True)
    except OSError as error:
        variable = " or ".join(filter(None, (VARIABLES[name], _OF_BYTEPS.get(name))))
        raise ConfigError(f"{variable}={str(directory)!r} cannot be written: {error.strerror}") from None


_OF_BYTEPS = {"comm_directory": "BYTEPS_TRACE_DIR", "server_profile": "BYTEPS_SERVER_PROFILE_OUTPUT_PATH"}
_SHORT = {"directory": "DIR", "ring_directory": "RING_DIR", "comm_directory": "COMM_DIR"}
VARIABLES = {f.name: f"{_PREFIX}_{_SHORT.get(f.name, f.name.upper())}" for f in fields(Config)}


def _byteps_worker(env: Mapping[str, str]) -> dict[str, object]:
    """Return what ``BYTEPS_TRACE_*`` say: steps are counted from 1 there, and the last one is traced, too.

    Raises:
        ConfigError: The steps are none; BytePS would end the process.
    """
    if _atoi(env, "BYTEPS_TRACE_ON") != 1:
        return {}
    start, end = _byteps_step(env, "BYTEPS_TRACE_START_STEP", 10), _byteps_step(env, "BYTEPS_TRACE_END_STEP", 20)
    if end <= start:
        raise ConfigError(
            f"BYTEPS_TRACE_END_STEP={end} must be greater than BYTEPS_TRACE_START_STEP={start} (20 and 10 unless set)"
        )
    folder = env.get("BYTEPS_TRACE_DIR", "").strip() or "./trace"
    return {"steps": f"{start - 1}-{end - 1}", "comm_steps": f"{start}-{end}", "comm_directory": folder}


def _byteps_step(env: Mapping[str, str], name: str, default: int) -> int:
    """Return the step in the variable *name*. BytePS reads a word as 0 and ``1.5`` as 1: nobody has meant that."""
    text = env.get(name, "").strip()
    if not text:
        return default
    if not _NUMBER.fullmatch(text) or not 1 <= int(text) <= _MOST_STEPS:
        raise ConfigError(f"{name}={text!r} is no step: BytePS counts them from 1, in whole numbers to {_MOST_STEPS}")
    return int(text)


def _byteps_server(env: Mapping[str, str]) -> dict[str, object]:
    """Return what ``BYTEPS_SERVER_*`` say of the server profile."""
    if not env.get("BYTEPS_SERVER_ENABLE_PROFILE", "").strip():
        return {}
    if _atoi(env, "BYTEPS_SERVER_ENABLE_PROFILE") != 1:
        return {"server_spans": "off"}
    path = env.get("BYTEPS_SERVER_PROFILE_OUTPUT_PATH", "").strip() or "server_profile.json"
    asked = env.get("BYTEPS_SERVER_KEY_TO_PROFILE", "").strip()
    key = str(max(0, _atoi(env, "BYTEPS_SERVER_KEY_TO_PROFILE"))) if asked else ""
    return {"server_spans": "on", "server_profile": path, "server_key": key}


def _atoi(env: Mapping[str, str], name: str, default: int = 0) -> int:
    """Return the whole number that the variable *name* begins with, as C reads it: 0 where it begins with none."""
    text = env.get(name, "").strip()
    if not text:
        return default
    found = re.match(r"[+-]?[0-9]+", text)
    return int(found[0]) if found else 0


def _parse(variable: str, text: str, kind: object) -> object:
    if kind in (bool, "bool"):
        return _truth(variable, text)
    if kind not in (int, "int"):
        return text
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    if not number.isdecimal() or unit not in _UNITS:
        raise ConfigError(f"{variable}={text!r} is not a whole number (with K, M or G after it, if you like)")
    return int(number) * _UNITS[unit]


def _truth(variable: str, text: str) -> bool:
    if text.lower() in _ON:
        return True
    if text.lower() in _OFF:
        return False
    raise ConfigError(f"{variable}={text!r} is neither 1 nor 0")


def is_switched_on(env: Mapping[str, str]) -> bool:
    """Return whether *env* asks for tracing; where it says nothing, whether BytePS's own variables do.

    Raises:
        ConfigError: ``OTEL_DLTRACE`` is neither true nor false.
    """
    said = env.get(_PREFIX, "").strip()
    return (_truth(_PREFIX, said) if said else _byteps_asks(env)) and not _is_sdk_disabled(env)


def _is_sdk_disabled(env: Mapping[str, str]) -> bool:
    """Return whether ``OTEL_SDK_DISABLED`` is ``true``; OpenTelemetry takes every other value for false, and warns."""
    said = env.get(_SDK_DISABLED, "").strip()
    if said.lower() not in ("", "true", "false"):
        guard.say(f"{_SDK_DISABLED}={said!r} disables nothing; OpenTelemetry knows true alone", _SDK_DISABLED)
    return said.lower() == "true"


def _byteps_asks(env: Mapping[str, str]) -> bool:
    is_server = env.get("DMLC_ROLE") == "server"
    return _atoi(env, "BYTEPS_TRACE_ON") == 1 or (is_server and _atoi(env, "BYTEPS_SERVER_ENABLE_PROFILE") == 1)


def is_switched_off(env: Mapping[str, str]) -> bool:
    """Return whether *env* forbids tracing, whoever else asks for it.

    Raises:
        ConfigError: ``OTEL_DLTRACE`` is neither true nor false.
    """
    is_said = bool(env.get(_PREFIX, "").strip())
    return not is_switched_on({**env, _PREFIX: env[_PREFIX] if is_said else "1"})


def enabled_sources(sources: Iterable[str], env: Mapping[str, str]) -> list[str]:
    """Return those of *sources* whose instrumentor ``OTEL_PYTHON_DISABLED_INSTRUMENTATIONS`` does not name."""
    disabled = {name.strip() for name in env.get("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "").split(",")}
    return [source for source in sources if not disabled & {"*", INSTRUMENTOR_PREFIX + source}]


def environment_bind(config: Config, world: World, job_name: str) -> Bind:
    """Return who the environment says this process is; what it does not say is "" (contract 1)."""
    run = config.run or world.run
    generation = ""
    if run:
        start = f"{run}.{config.launch}" if config.launch else run
        is_id = len(start) == 16 and all(c in "0123456789abcdef" for c in start)
        generation = f"1.{start if is_id else format(h64(start), '016x')}"
    return Bind(
        job=config.job or world.job or run,
        generation=generation,
        job_name=job_name,
        world=config.world,
        role=world.role,
        rank=world.rank,
        local_rank=world.local_rank,
        node_rank=world.node_rank,
        world_size=world.world_size,
        local_world_size=world.local_world_size,
        servers=world.servers,
        attempt=world.attempt,
    )


def horovod_timeline(env: Mapping[str, str]) -> str:
    """Return where Horovod, initialised now, writes its own timeline, "" for nowhere."""
    return env.get("HOROVOD_TIMELINE", "")


def job_name_of(env: Mapping[str, str]) -> str:
    """Return the job's name for people: the service's, or the program's."""
    name = env.get("OTEL_SERVICE_NAME") or env.get(f"{_PREFIX}_JOB") or env.get(JOB_NAME)
    if name:
        return name
    main = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return Path(main).stem or (spec.name if spec else "") or "job"


def resource_of(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``OTEL_RESOURCE_ATTRIBUTES``, and the launcher's span that ``TRACEPARENT`` names.

    A pair that is none is left out, as the specification says. A step is a trace of its own, so
    the launcher's span is nobody's parent: it is named.
    """
    pairs = (pair.partition("=") for pair in env.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    out = {name.strip(): unquote(value.strip()) for name, equals, value in pairs if equals and name.strip()}
    if env.get("OTEL_SERVICE_NAME"):
        out["service.name"] = env["OTEL_SERVICE_NAME"]
    launcher = read_traceparent(env.get("TRACEPARENT", ""))
    if launcher is not None:
        out |= {DL_LAUNCHER_TRACE_ID: launcher.trace_id, DL_LAUNCHER_SPAN_ID: launcher.span_id}
    return out

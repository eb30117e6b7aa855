"""The one reader of the environment; switches the live side of a process on and off."""

import atexit
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from otel_dltrace.model.errors import ConfigError, DltraceError
from otel_dltrace.model.identity import Bind, h64, run_directory_name
from otel_dltrace.model.plan import Window, parse_level
from otel_dltrace.model.summary import summary_line
from otel_dltrace.model.topology import World, world_from_env
from otel_dltrace.record import guard
from otel_dltrace.record.launch import DrainStarter, ring_bell
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.ring import DEFAULT_SIZE, RingWriter
from otel_dltrace.record.steps import Tracer, live

if TYPE_CHECKING:
    from otel_dltrace.export.drain import Drain

UNDER_RUN = "_OTEL_DLTRACE_UNDER_RUN"
"""Set by ``otel-dltrace run``, which says itself where the spans are."""
EXIT_S = 2.0
"""How long a process waits at its end for the drain."""
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_ON, _OFF = ("1", "true", "on", "yes"), ("", "0", "false", "off", "no")
_PREFIX = "OTEL_DLTRACE"


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
        metrics: Whether host metrics are sampled.
        job: The job's id; "" to agree on one.
        run: The id of this run, where ranks share no store; "" for none.
        world: The world's name, in jobs with several.

    Raises:
        ConfigError: A value cannot be used.
    """

    level: str = "phase"
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

    def __post_init__(self) -> None:
        """Check every value."""
        parse_level(self.level)
        Window.parse(self.steps)
        if self.drain not in ("auto", "thread", "off"):
            raise ConfigError(f"{_PREFIX}_DRAIN={self.drain!r} is none of auto, thread, off")
        for name, least in (("ring_size", 1 << 17), ("span_budget", 0), ("quota", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{_PREFIX}_{name.upper()}={value!r} is too small; it must be at least {least}")
        object.__setattr__(self, "directory", str(Path(self.directory).expanduser().absolute()))
        _check_writable(Path(self.directory))
        rings = self.ring_directory or default_ring_directory()
        object.__setattr__(self, "ring_directory", str(Path(rings).expanduser().absolute()))

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> "Config":
        """Return what the ``OTEL_DLTRACE_*`` variables in *env* (the process's own by default) say.

        Raises:
            ConfigError: A variable has a value that cannot be used.
        """
        env = os.environ if env is None else env
        values: dict[str, object] = {}
        for name, variable in VARIABLES.items():
            text = env.get(variable, "").strip()
            if text:
                values[name] = _parse(variable, text, cls.__dataclass_fields__[name].type)
        return cls(**values)  # type: ignore[arg-type]  # each value was parsed by its field's own type

    def to_env(self) -> dict[str, str]:
        """Return the variables that say the same as this configuration."""
        values = {variable: getattr(self, name) for name, variable in VARIABLES.items()}
        return {k: str(int(v)) if isinstance(v, bool) else str(v) for k, v in values.items()}

    @property
    def home(self) -> str:
        """The name of the drain that serves this configuration: one per host, user, folder and configuration."""
        return f"{h64(str(os.getuid()), str(Path.cwd()), repr(self)):016x}"

    @property
    def rings(self) -> Path:
        """Where rings live."""
        return Path(self.ring_directory)


def _check_writable(directory: Path) -> None:
    """Raise unless *directory*, or what is there of its parents, takes new files; leave nothing behind."""
    there = next(path for path in (directory, *directory.parents) if path.exists())
    probe = there / f".otel_dltrace-{os.getpid()}"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{_PREFIX}_DIR={str(directory)!r} cannot be written: {error.strerror}") from None


_SHORT = {"directory": "DIR", "ring_directory": "RING_DIR"}
VARIABLES = {f.name: f"{_PREFIX}_{_SHORT.get(f.name, f.name.upper())}" for f in fields(Config)}


def _parse(variable: str, text: str, kind: object) -> object:
    if kind in (bool, "bool"):
        return _truth(variable, text)
    if kind not in (int, "int"):
        return text
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    if not number.isdigit() or unit not in _UNITS:
        raise ConfigError(f"{variable}={text!r} is not a whole number (with K, M or G after it, if you like)")
    return int(number) * _UNITS[unit]


def _truth(variable: str, text: str) -> bool:
    if text.lower() in _ON:
        return True
    if text.lower() in _OFF:
        return False
    raise ConfigError(f"{variable}={text!r} is neither 1 nor 0")


def is_switched_on(env: Mapping[str, str]) -> bool:
    """Return whether *env* asks for tracing.

    Raises:
        ConfigError: ``OTEL_DLTRACE`` or ``OTEL_SDK_DISABLED`` is neither true nor false.
    """
    disabled = _truth("OTEL_SDK_DISABLED", env.get("OTEL_SDK_DISABLED", "").strip())
    return _truth(_PREFIX, env.get(_PREFIX, "").strip()) and not disabled


def start(config: Config | None = None) -> None:
    """Begin to record in this process; the ring is made at the first record.

    Args:
        config: What to record; by default what the environment says.

    Raises:
        ConfigError: A value cannot be used.
    """
    if live.tracer is not None:
        return
    config = config or Config.from_env()
    if any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ):
        from otel_dltrace.export.otlp_settings import OtlpSettings

        OtlpSettings.from_env(os.environ)  # the drain would stumble over a bad one where nobody sees it
    world = world_from_env(os.environ)
    job_name = _job_name()
    home = {
        "drain": config.home,
        "directory": config.directory,
        "host": socket.gethostname(),
        "resource": _resource(os.environ),
        "bind": asdict(environment_bind(config, world, job_name)),
    }
    starter = DrainStarter(config.home, config.rings, config.drain, config.to_env(), _drain_in_thread(config))
    recorder = Recorder(
        config.rings, config.ring_size, parse_level(config.level), home, lambda: starter.start(recorder.ring)
    )
    tracer = Tracer(recorder, job_name, world, config.world, starter)
    tracer.steps.on_begin = lambda: _bind_single(tracer)
    live.tracer = tracer
    _register_once()


def _drain_in_thread(config: Config) -> Callable[[RingWriter], Callable[[float], None]]:
    def begin(ring: RingWriter) -> Callable[[float], None]:
        from otel_dltrace.export.drain_thread import start_drain_thread

        return start_drain_thread(drain_for(config, None), ring)

    return begin


def drain_for(config: Config, home: str | None, orphans_only: bool = False) -> "Drain":
    """Return the drain that *config* and the ``OTEL_EXPORTER_OTLP_*`` variables describe.

    Args:
        config: What goes out, and where run directories are made.
        home: Its name; None to serve every ring.
        orphans_only: Serve only rings whose writer is gone, each where its own writer wanted it.

    Raises:
        ConfigError: An OTLP variable cannot be used.
    """
    from otel_dltrace.export.drain import Drain, Serving
    from otel_dltrace.export.otlp_settings import OtlpSettings

    settings = OtlpSettings.from_env(os.environ)
    serving = Serving(
        config.rings,
        None if home is None else Path(config.directory),
        home,
        orphans_only,
        Window.parse(config.steps),
        config.span_budget,
        quota=config.quota,
    )
    if settings is None:
        return Drain(serving)
    from otel_dltrace.export.outlet import Outlet

    return Drain(serving, Outlet(settings))


def environment_bind(config: Config, world: World, job_name: str) -> Bind:
    """Return who the environment says this process is; what it does not say is "" (contract 1)."""
    run = config.run or world.run
    generation = ""
    if run:
        is_id = len(run) == 16 and all(c in "0123456789abcdef" for c in run)
        generation = f"1.{run if is_id else format(h64(run), '016x')}"
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


def _bind_single(tracer: Tracer) -> None:
    """Bind a process that nobody launched once its second step begins: no process group has come by then."""
    recorder = tracer.recorder
    if recorder.bound is None and tracer.environment.world_size == 1 and recorder.step >= 1:
        bind_by_environment(tracer)


@guard.guarded
def bind_by_environment(tracer: Tracer) -> None:
    """Bind this process as its environment says, alone where it says nothing."""
    recorder = tracer.recorder
    if recorder.bound is not None or recorder.ring is None:
        return
    known = dict(recorder.home["bind"])
    nonce = recorder.ring.nonce.hex()
    known["generation"] = known["generation"] or f"1.{h64(nonce):016x}"
    known["job"] = known["job"] or nonce
    recorder.bind(Bind.read(known))


@guard.guarded
def stop() -> None:
    """End the current step, hand everything to the drain and wait for it, at most two seconds."""
    tracer, live.tracer = live.tracer, None
    if tracer is None:
        return
    tracer.steps.end()
    bind_by_environment(tracer)
    recorder = tracer.recorder
    ring, bind, directory = recorder.ring, recorder.bound, recorder.home["directory"]
    recorder.close()
    if ring is None or tracer.starter is None:
        return
    drained = tracer.starter.finish(ring.path, EXIT_S)
    if bind is not None and bind.local_rank == 0 and not os.environ.get(UNDER_RUN):
        _say_where(Path(directory) / run_directory_name(bind), drained, tracer.starter)


def short_path(path: Path) -> str:
    """Return *path* relative to here, if that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


def read_summary(run: Path) -> str:
    """Return in one line what became of the spans of *run*, as far as its drains have written it down."""
    lines = []
    for path in sorted(run.glob("hosts/*/drain.json")):
        try:
            lines.append(summary_line(json.loads(path.read_text())["summary"]))
        except (OSError, ValueError, KeyError):
            continue  # being written
    return "; ".join(lines) or "the drain is still at work"


def _say_where(path: Path, drained: bool, starter: DrainStarter) -> None:
    if drained or path.exists():
        where = short_path(path)
        guard.say(f"{read_summary(path)}; in {where}; read them with: otel-dltrace report {where}")
    elif starter.mode == "auto":
        trouble = starter.trouble() or "it has not answered yet"
        guard.say(f"the drain did not finish ({trouble}); if it is gone, `otel-dltrace recover` does its work")


def flush(timeout: float = EXIT_S) -> bool:
    """Have the drain read everything recorded so far; return whether it said so within *timeout* seconds."""
    tracer = live.tracer
    if tracer is None or tracer.recorder.ring is None or tracer.starter is None:
        return True
    cursor = tracer.recorder.ring.path.with_suffix(".cursor")
    before = _changed_at(cursor)
    deadline = time.monotonic() + timeout
    ring_bell(tracer.starter.bell)
    while time.monotonic() < deadline:
        if _changed_at(cursor) != before:
            return True
        time.sleep(0.005)
    return False


def _changed_at(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _job_name() -> str:
    name = os.environ.get("OTEL_SERVICE_NAME") or os.environ.get(f"{_PREFIX}_JOB")
    if name:
        return name
    main = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return Path(main).stem or (spec.name if spec else "") or "job"


def _resource(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``OTEL_RESOURCE_ATTRIBUTES``; a pair that is none is left out, as the specification says."""
    pairs = (pair.partition("=") for pair in env.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","))
    out = {name.strip(): unquote(value.strip()) for name, equals, value in pairs if equals and name.strip()}
    if env.get("OTEL_SERVICE_NAME"):
        out["service.name"] = env["OTEL_SERVICE_NAME"]
    return out


def _after_fork() -> None:
    if live.tracer is not None:
        live.tracer.recorder.after_fork()


_registered = False


def _register_once() -> None:
    global _registered  # noqa: PLW0603  -- hooks of the interpreter cannot be taken back
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(stop)


def instrument(config: Config | None = None) -> None:
    """Trace the frameworks that this program has imported or will import, and begin to record."""
    from otel_dltrace.instrument import registry

    start(config)
    registry.instrument()


def uninstrument() -> None:
    """Give the frameworks their own functions back, the same objects; recording goes on until `stop`."""
    from otel_dltrace.instrument import registry

    registry.uninstrument()


def autostart() -> None:
    """Do what ``OTEL_DLTRACE`` asks for; a bad value is one sentence, and the program goes on untraced."""
    try:
        if is_switched_on(os.environ):
            instrument()
    except DltraceError as error:
        guard.say(f"{error}; tracing is off")

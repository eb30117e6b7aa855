"""Switches the live side of a process on and off."""

import atexit
import importlib.util
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import otel_dltrace.instrument  # noqa: F401  -- the room, now: a first import later on would hide our function
from otel_dltrace.export.choice import exporters
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.model.errors import ConfigError, DltraceError
from otel_dltrace.model.identity import Bind, h64, run_directory_name
from otel_dltrace.model.plan import Window, parse_level
from otel_dltrace.model.summary import summary_line
from otel_dltrace.model.topology import world_from_env
from otel_dltrace.record import guard
from otel_dltrace.record.launch import DrainStarter, ring_bell
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.ring import RingWriter
from otel_dltrace.record.steps import Tracer, live
from otel_dltrace.settings import (
    Config,
    enabled_sources,
    environment_bind,
    horovod_timeline,
    is_switched_off,
    is_switched_on,
    job_name_of,
    resource_of,
)

if TYPE_CHECKING:
    from otel_dltrace.export.drain import Drain

UNDER_RUN = "_OTEL_DLTRACE_UNDER_RUN"
"""Set by ``otel-dltrace run``, which says itself where the spans are."""
METRICS_PART = 10
"""Metrics may fill the tenth part of a host's quota."""
EXIT_S = 2.0
"""How long a process waits at its end for the drain."""


def start(config: Config | None = None, **fields: Any) -> None:
    """Begin to record in this process; the ring is made at the first record.

    Where recording is on already it goes on as it is; if something else is asked for, one sentence tells so.

    Args:
        config: What to record; by default what the environment says.
        fields: Those of `Config` that are to differ from it, as in ``start(world="rollout")``.

    Raises:
        ConfigError: A value cannot be used.
    """
    if fields:
        config = replace(config or Config.from_env(), **fields)
    if live.tracer is not None:
        if config is not None and not _is_as(config, live.tracer):
            guard.say("tracing is on already and stays as it is; stop() it to start with another configuration")
        return
    config = config or Config.from_env()
    if any(name.startswith("OTEL_EXPORTER_OTLP_") for name in os.environ):
        from otel_dltrace.export.otlp.settings import OtlpSettings

        OtlpSettings.from_env(os.environ)  # the drain would stumble over a bad one where nobody sees it
    metrics = _metric_settings()
    prints = bool(exporters(os.environ) or (metrics and metrics.exporters))
    if config.metrics and importlib.util.find_spec("psutil") is None:
        guard.say("OTEL_DLTRACE_METRICS=1 needs psutil, which is missing: pip install psutil; no host is sampled")
    world = world_from_env(os.environ)
    job_name = job_name_of(os.environ)
    home = {
        "drain": config.home,
        "directory": config.directory,
        "at_end": {
            "worker": config.comm_directory,
            "server": config.server_profile,
            "comm_steps": config.comm_steps,
        },
        "host": os.uname().nodename,
        "resource": resource_of(os.environ),
        "bind": asdict(environment_bind(config, world, job_name)),
    }
    in_thread = _drain_in_thread(config)
    starter = DrainStarter(config.home, config.rings, config.drain, config.to_env(), in_thread, prints)
    recorder = Recorder(
        config.rings,
        config.ring_size,
        parse_level(config.of_role(world.role).level),
        home,
        lambda: starter.start(recorder.ring),
    )
    key = int(config.server_key or -1)
    tracer = Tracer(recorder, job_name, world, config.world, starter, config.span_budget, key)
    tracer.horovod_timeline = partial(horovod_timeline, os.environ)
    _follow_steps(tracer)
    if config.metrics:
        _follow_process(tracer)
    live.tracer = tracer
    _register_once()


def _is_as(config: Config, tracer: Tracer) -> bool:
    """Return whether *tracer* records as *config* asks for."""
    level = parse_level(config.of_role(tracer.environment.role).level)
    return (config.home, level) == (tracer.recorder.home["drain"], tracer.recorder.level)


def _drain_in_thread(config: Config) -> Callable[[RingWriter], Callable[[float], None]]:
    def begin(ring: RingWriter) -> Callable[[float], None]:
        from otel_dltrace.export.drain_thread import start_drain_thread

        if config.metrics:
            guard.say("the drain is a thread of this process, so no host is sampled and no metrics are sent")
        drain = drain_for(config, None, in_thread=True)
        if drain.outlet is not None:
            drain.outlet.patience = 0.0  # the program's end waits for us
        return start_drain_thread(drain, ring)

    return begin


def drain_for(config: Config, home: str | None, orphans_only: bool = False, in_thread: bool = False) -> "Drain":
    """Return the drain that *config*, ``OTEL_*_EXPORTER`` and the ``OTEL_EXPORTER_OTLP_*`` variables describe.

    Args:
        config: What goes out, and where run directories are made.
        home: Its name; None to serve every ring.
        orphans_only: Serve only rings whose writer is gone, each where its own writer wanted it.
        in_thread: It is a thread of the training process: no metrics are sampled or sent there.

    Raises:
        ConfigError: One of these variables cannot be used.
    """
    from otel_dltrace.export.drain import Drain, Serving
    from otel_dltrace.export.metrics.metering import Metering
    from otel_dltrace.export.otlp.settings import OtlpSettings

    others, settings = exporters(os.environ), OtlpSettings.from_env(os.environ)
    serving = Serving(
        config.rings,
        None if home is None else Path(config.directory),
        home,
        orphans_only,
        Window.parse(config.steps),
        config.span_budget,
        quota=config.quota,
    )
    sampled = config.metrics and not (orphans_only or in_thread)
    quota = config.quota // METRICS_PART
    metering = Metering(None if in_thread else _metric_settings(), sampled, serving.window, quota)
    if settings is None and not others:
        return Drain(serving, metering=metering)
    from otel_dltrace.export.outlets import outlets_of

    return Drain(serving, outlets_of(others, settings), metering)


def _metric_settings() -> MetricSettings | None:
    """Return where metrics go; None, after one sentence, where the environment says it wrong: spans go on."""
    try:
        return MetricSettings.from_env(os.environ)
    except ConfigError as error:
        guard.say(f"{error}; no metrics are sent")
        return None


def _follow_steps(tracer: Tracer) -> None:
    """Have each step of *tracer* bind a single process, and join the user's own spans once it is bound."""
    from otel_dltrace.instrument.opentelemetry import step_begins, step_left

    def begun() -> None:
        _bind_single(tracer)
        step_begins(tracer)

    tracer.steps.on_begin, tracer.steps.on_left = begun, step_left


def _follow_process(tracer: Tracer) -> None:
    """Have *tracer* record what only this process knows of itself."""
    from otel_dltrace.instrument.process import follow_memory

    tracer.metrics = True
    follow_memory(tracer)


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
    deadline = time.monotonic() + EXIT_S
    drained = tracer.starter.finish(ring.path, EXIT_S)
    if bind is not None and (bind.role, bind.local_rank) == ("worker", 0) and not os.environ.get(UNDER_RUN):
        run = Path(directory) / run_directory_name(bind)
        whole = drained and _host_is_drained(run, bind.local_world_size, deadline)
        _say_where(run, drained, tracer.starter, is_over=whole)


def short_path(path: Path) -> str:
    """Return *path* relative to here, if that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


def read_summary(run: Path, *, is_over: bool = True) -> str:
    """Return in one line what became of the spans of *run*, as far as its drains, which may be at work, have told."""
    lines = [summary_line(figures, is_over=is_over) for figures in _figures(run, "*")]
    if not (lines and is_over):
        lines.append("the drain is still at work")
    return "; ".join(lines)


def _figures(run: Path, hosts: str) -> list[dict[str, Any]]:
    found = []
    for path in sorted(run.glob(f"hosts/{hosts}/drain.json")):
        try:
            found.append(json.loads(path.read_text())["summary"])
        except (OSError, ValueError, KeyError):
            continue  # being written
    return found


def _host_is_drained(run: Path, ranks: int, deadline: float) -> bool:
    """Wait until *ranks* processes of this host have been read to their end; return whether they were in time."""
    while sum(figures.get("processes", 0) for figures in _figures(run, f"{os.uname().nodename}-*")) < ranks:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.01)
    return True


def _say_where(path: Path, drained: bool, starter: DrainStarter, *, is_over: bool) -> None:
    if drained or path.exists():
        where = short_path(path)
        so_far = "" if is_over else "so far "
        guard.say(
            f"{so_far}{read_summary(path, is_over=is_over)}; in {where}; read them with: otel-dltrace report {where}"
        )
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


def instrument(config: Config | None = None, **fields: Any) -> None:
    """Trace the frameworks that this program has imported or will import, and begin to record as `start` does."""
    from otel_dltrace.instrument import registry

    start(config, **fields)
    registry.instrument()


def uninstrument() -> None:
    """Give the frameworks their own functions back, the same objects; recording goes on until `stop`."""
    from otel_dltrace.instrument import registry

    registry.uninstrument()


@guard.guarded
def autostart() -> None:
    """Do what ``OTEL_DLTRACE`` asks for; a bad value is one sentence, and the program goes on untraced."""
    try:
        if is_switched_on(os.environ):
            from otel_dltrace.instrument import registry

            start()
            registry.instrument(enabled_sources(registry.TABLES, os.environ))
    except DltraceError as error:
        guard.say(f"{error}; tracing is off")


@guard.guarded
def instrument_source(source: str, **fields: Any) -> None:
    """Trace *source*, as its instrumentor asks for it; a bad value is one sentence, as in `autostart`.

    Args:
        source: Its name.
        fields: Those of `Config` that differ from what the environment says.
    """
    try:
        if not is_switched_off(os.environ):
            from otel_dltrace.instrument import registry

            start(**fields)
            registry.instrument([source])
    except DltraceError as error:
        guard.say(f"{error}; tracing is off")


def uninstrument_source(source: str) -> None:
    """Trace *source* no longer; the others go on."""
    from otel_dltrace.instrument import registry

    registry.uninstrument([source])

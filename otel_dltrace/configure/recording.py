"""The live side of a process: its recording begins, hands over what there is, and ends."""

import atexit
import importlib.util
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from otel_dltrace.configure.children import after_fork, end_in_children
from otel_dltrace.configure.drains import check_outlets, drain_in_thread
from otel_dltrace.configure.outcome import host_is_drained, is_first_here, say_where
from otel_dltrace.instrument._launcher import launcher_bind
from otel_dltrace.model.errors import ConfigError, FieldError
from otel_dltrace.model.identity import bind_from_home, run_directory_name
from otel_dltrace.model.plan import parse_level
from otel_dltrace.model.topology import MPICH, World
from otel_dltrace.record import guard
from otel_dltrace.record.blocks import note_end
from otel_dltrace.record.launch import DrainStarter
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live
from otel_dltrace.settings.config import VARIABLES, Config, known_fields
from otel_dltrace.settings.hydra import own_world
from otel_dltrace.settings.known import misspelt
from otel_dltrace.settings.paths import working_directory
from otel_dltrace.settings.process import (
    UNDER_RUN,
    environment_bind,
    horovod_timeline,
    is_alone,
    job_name_of,
    nccl_timing,
    resource_of,
)
from otel_dltrace.settings.switch import is_sdk_disabled

EXIT_S = 2.0
"""How long a process waits at its end, for what others have to tell it, and for the drain."""


def start(config: Config | None = None, **fields: Any) -> None:
    """Begin to record in this process; the ring is made at the first record.

    Where recording is on already it goes on as it is; if something else is asked for, one sentence tells so. So it does
    of a bad value in the environment, and nothing is recorded: a typing error there ends no training.

    Args:
        config: What to record; by default what the environment says.
        fields: Those of `Config` that are to differ from it, as in ``start(world="rollout")``.

    Raises:
        ConfigError: A value of *config* or *fields* cannot be used; it is a `ValueError`.
    """
    if config is not None and not isinstance(config, Config):
        raise ConfigError(f"start() takes a Config, or its fields by name, not {config!r}")
    is_told = config is not None or bool(fields)
    if live.tracer is not None and not is_told:
        return
    told = VARIABLES if config is not None else known_fields(fields)
    try:
        config = _config(config, fields)
        config.check_writable(told=told)
        prints = check_outlets()
    except ConfigError as error:
        if isinstance(error, FieldError) and error.name in told:
            raise
        guard.say(f"{error}; tracing is off" if live.tracer is None else f"{error}; tracing stays as it is")
        return
    if live.tracer is not None:
        if not _is_as(config, live.tracer):
            guard.say("tracing is already on and stays as it is; call stop() first to start with another configuration")
    elif not is_sdk_disabled(os.environ):
        for sentence in misspelt(os.environ):
            guard.say(sentence)
        live.tracer, live.is_refused = _tracer(config, prints), False
        _register_once()


def _config(config: Config | None, fields: dict[str, Any]) -> Config:
    """Return *config*, or what the environment says, with *fields*; a recording that is on goes by where it began."""
    if config is not None:
        return replace(config, **known_fields(fields))
    return Config.from_env(here="" if live.tracer is None else live.tracer.began_in, **fields)


def _is_as(config: Config, tracer: Tracer) -> bool:
    """Return whether *tracer* records as *config* asks for."""
    level = parse_level(config.of_role(tracer.environment.role).level)
    return (config.home_from(tracer.began_in), level) == (tracer.recorder.home["drain"], tracer.recorder.level)


def _tracer(config: Config, prints: bool) -> Tracer:
    """Return what records as *config* and the environment say, and starts the drain at its first record."""
    if config.metrics and importlib.util.find_spec("psutil") is None:
        guard.say("OTEL_DLTRACE_METRICS=1 needs psutil, which is missing: pip install psutil; the host is not sampled")
    world, job_name = own_world(), job_name_of(os.environ, config.job)
    world = replace(world, job=config.job or world.job)  # whoever binds this process asks the world
    starter = DrainStarter(config.home, config.rings, config.drain, config.to_env(), drain_in_thread(config), prints)
    recorder = Recorder(
        config.rings,
        config.ring_size,
        parse_level(config.of_role(world.role).level),
        _home(config, world, job_name),
        lambda: _begun(starter, recorder),
    )
    key = int(config.server_key or -1)
    tracer = Tracer(recorder, job_name, world, config.world, starter, config.span_budget, key)
    tracer.began_in = working_directory()
    tracer.horovod_timeline = partial(horovod_timeline, os.environ)
    tracer.nccl_timing = partial(nccl_timing, os.environ)
    _follow_steps(tracer)
    if config.metrics:
        _follow_process(tracer)
    return tracer


def _begun(starter: DrainStarter, recorder: Recorder) -> None:
    """Have what is recorded drained, now that there is something.

    At its end the program is looked at before what it has set up by now says goodbye, as a parameter server's worker
    does: others fail of that, and later than the error behind it.
    """
    global _is_looked_at  # noqa: PLW0603  -- hooks of the interpreter cannot be taken back
    starter.start(recorder.ring)
    if not _is_looked_at:
        _is_looked_at = True
        atexit.register(_note_what_ended_the_program)


def _home(config: Config, world: World, job_name: str) -> dict[str, Any]:
    """Return what the ring's header tells the drain of this process: where its spans belong, and who it is."""
    return {
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
        "alone": is_alone(config, world, os.environ),
    }


def _follow_steps(tracer: Tracer) -> None:
    """Have the steps of *tracer* bind what no framework binds, and join the user's own spans once it is bound."""
    from otel_dltrace.instrument.opentelemetry import follow, step_left

    on_begin = tracer.steps.on_begin

    def begun() -> None:
        if tracer.recorder.step >= 1 and _is_settled(tracer):  # no process group has come by then
            bind_by_environment(tracer)
        if tracer.recorder.bound is not None:
            on_begin.remove(begun)

    on_begin.append(begun)
    follow(tracer)
    tracer.steps.on_left = step_left


def _follow_process(tracer: Tracer) -> None:
    """Have *tracer* record what only this process knows of itself."""
    from otel_dltrace.instrument.process import follow_memory

    tracer.metrics = True
    follow_memory(tracer)


def _is_settled(tracer: Tracer) -> bool:
    """Return whether the environment alone says whose run this is: torch's ranks may yet agree on one of their own."""
    return tracer.environment.world_size == 1 or ("torch" not in sys.modules and launcher_bind(tracer) is not None)


@guard.guarded
def bind_by_environment(tracer: Tracer) -> None:
    """Bind this process as its environment says, alone where it says nothing."""
    recorder = tracer.recorder
    if recorder.bound is not None or recorder.ring is None:
        return
    recorder.bind(bind_from_home(recorder.home, recorder.ring.nonce.hex()))
    _say_whether_ranks_are_apart(tracer)


def _say_whether_ranks_are_apart(tracer: Tracer) -> None:
    """Say, for rank 0 of MPICH's, that nothing names the run of all, which MPI knows to be one."""
    world, said = tracer.environment, tracer.recorder.home["bind"]
    if world.launcher == MPICH and not (world.rank or world.is_spawned or said["generation"]) and world.world_size > 1:
        cure = "start them with `otel-dltrace run`, or set OTEL_DLTRACE_RUN alike on all ranks, anew for each run"
        guard.say(
            f"nothing says which {world.world_size} ranks of MPI are one run, so each has a run of its own: {cure}"
        )


def stop() -> None:
    """End the current step, hand everything to the drain and wait for it, at most two seconds.

    A drain that is a thread of this process gets a minute at the interpreter's end.
    """
    live.is_refused = False  # whoever asks after this begins anew
    end_recording()


@guard.guarded
def end_recording() -> None:
    """Do what `stop` does, but remember whether an instrumentor was told what cannot be used."""
    tracer, live.tracer, live.told = live.tracer, None, None
    if tracer is None:
        return
    deadline = time.monotonic() + EXIT_S
    for leave in tracer.leaving:
        guard.guarded(leave)()
    tracer.steps.end()
    bind_by_environment(tracer)
    recorder = tracer.recorder
    ring, bind, directory = recorder.ring, recorder.bound, recorder.home["directory"]
    if ring is not None and not ring.is_held():
        guard.say("the program has closed the file descriptor of its ring: what it recorded after that may be lost")
    if tracer.starter is not None:
        tracer.starter.look_at(ring)
    recorder.close()
    if ring is None or tracer.starter is None:
        return
    drained = tracer.starter.finish(ring.path, max(0.0, deadline - time.monotonic()))
    if bind is not None and (bind.role, bind.local_rank) == ("worker", 0) and not os.environ.get(UNDER_RUN):
        run = Path(directory) / run_directory_name(bind)
        whole = drained and host_is_drained(run, bind.local_world_size, deadline)
        if is_first_here(run, bind.rank):
            say_where(run, drained, tracer.starter, is_over=whole)


def _stop_at_exit() -> None:
    """Stop; a Ctrl-C meanwhile is meant for the wait, and no error of anybody's."""
    with suppress(KeyboardInterrupt):
        _note_what_ended_the_program()
        stop()


@guard.guarded
def _note_what_ended_the_program() -> None:
    """Have it told which error the interpreter has told of, which nobody had caught.

    An interactive one goes on after it, and one that it had told of before is of something else.
    """
    global _told_before  # noqa: PLW0603  -- hooks of the interpreter cannot be taken back
    error = getattr(sys, "last_value", None)
    tracer = live.tracer
    if tracer is None or error is _told_before or hasattr(sys, "ps1") or not isinstance(error, BaseException):
        return
    _told_before = error
    note_end(tracer, error)


def flush(timeout: float = EXIT_S) -> bool:
    """Have the drain read everything recorded so far; return whether it said so within *timeout* seconds."""
    tracer = live.tracer
    if tracer is None or tracer.recorder.ring is None or tracer.starter is None:
        return True
    seconds = guard.tried(float, timeout)
    if isinstance(seconds, Exception):
        guard.say(f"flush() takes a number of seconds, not a {type(timeout).__name__}; using {EXIT_S:g}")
        seconds = EXIT_S
    return tracer.starter.catch_up(tracer.recorder.ring.path, seconds)


_registered = _is_looked_at = False
_told_before: object = None
"""The error that the interpreter had told of before the recording began, or that is noted already."""


def _register_once() -> None:
    global _registered, _told_before  # noqa: PLW0603  -- hooks of the interpreter cannot be taken back
    _told_before = getattr(sys, "last_value", None)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=partial(after_fork, stop))
        atexit.register(_stop_at_exit)
        end_in_children(stop)

"""Start a push_pull job: its servers, and its workers with their local ranks.

    otel-dltrace pushpull launch --workers 2 --local-ranks 2 --servers 2 -- python train.py
    otel-dltrace pushpull serve      one server, as DMLC_* and PUSHPULL_* describe it

Over several hosts: start each server with `serve`, with DMLC_NUM_WORKER, DMLC_NUM_SERVER and its DMLC_SERVER_ID in the
environment, and each worker with --only-worker and --root on its host. All need the same PUSHPULL_TOKEN. The exit code
is that of the process that failed first.
"""

import argparse
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from otel_dltrace.cli.held_drain import hold_drain
from otel_dltrace.cli.printing import tell
from otel_dltrace.configure.outcome import how_to_read
from otel_dltrace.configure.sources import autostart
from otel_dltrace.model.errors import ConfigError, DltraceError
from otel_dltrace.pushpull.launch import Plan, launch
from otel_dltrace.pushpull.options import read_env
from otel_dltrace.record import guard
from otel_dltrace.record.tracer import live
from otel_dltrace.settings.config import VARIABLES, Config
from otel_dltrace.settings.process import JOB_NAME, UNDER_RUN
from otel_dltrace.settings.program import program_name
from otel_dltrace.settings.said import said
from otel_dltrace.settings.switch import is_switched_on

_ONE_OR_MORE = {"workers": 1, "local_ranks": 1, "servers": 0}
_ROLE = "DMLC_ROLE"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action", help="launch or serve")
    starts = actions.add_parser("launch", help="start servers and workers on this host, and end them together")
    starts.add_argument("--workers", type=int, default=1, metavar="N", help="machines, or processes in their place (1)")
    starts.add_argument("--local-ranks", type=int, default=1, metavar="N", help="training processes of each worker (1)")
    starts.add_argument("--servers", type=int, default=1, metavar="N", help="parameter servers (1)")
    starts.add_argument("--only-worker", type=int, metavar="ID", help="start only this worker; needs --root")
    starts.add_argument(
        "--root", default="", metavar="HOST:PORT", help="where server 0 listens (by default a free port)"
    )
    starts.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="what each local rank runs")
    actions.add_parser("serve", help="run one server in the foreground")


def run(args: argparse.Namespace) -> int:
    """Start what is asked for; return its exit code."""
    if args.action == "serve":
        return _serve()
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        raise ConfigError("launch: no program given; write it after --, as in: ... launch -- python train.py")
    _check_job(args)
    plan = Plan(program, args.workers, args.local_ranks, args.servers, args.root, args.only_worker)
    alone = args.only_worker is None
    env = traced_environment(program, os.environ, alone=alone)
    with _drain_held(env, alone=alone) as told:
        return launch(plan, told)


def _check_job(args: argparse.Namespace) -> None:
    """See that there is such a job: else each of its processes would say that there is not."""
    for name, least in _ONE_OR_MORE.items():
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: there must be {least} or more")
    if args.only_worker is not None and not args.root:
        raise ConfigError("--only-worker needs --root HOST:PORT: where is server 0?")
    if args.only_worker is not None and not 0 <= args.only_worker < args.workers:
        raise ConfigError(
            f"--only-worker {args.only_worker}: with --workers {args.workers} the last one is {args.workers - 1}"
        )
    host, _, port = args.root.rpartition(":")
    if args.root and not (host.strip() and port.isdecimal() and len(port) < 6 and 0 < int(port) < 1 << 16):
        raise ConfigError(f"--root {args.root!r} is not HOST:PORT")


def _serve() -> int:
    os.environ.update(server_environment(os.environ))  # before tracing begins, which goes by role and level
    layout, options = read_env(os.environ)
    autostart()
    _show_server()
    from otel_dltrace.pushpull.serving import serve

    serve(layout, options)
    return 0


@guard.guarded
def _show_server() -> None:
    """Make our ring at once where a profile is asked for: with a server that nobody asks the drain can say so."""
    tracer = live.tracer
    if tracer is not None and tracer.recorder.home["at_end"]["server"]:
        tracer.recorder.lease(tracer.recorder.lane())


@contextmanager
def _drain_held(env: Mapping[str, str], *, alone: bool) -> Iterator[Mapping[str, str]]:
    """Hold the drain of a traced job, and yield what its processes are told: the last line is ours, not each worker's.

    BytePS's files, where they are asked for, are there when the command ends, or that line says why not. Where another
    drain is at work, as under `run`, that one ends later.
    """
    config = Config.from_env(env) if _is_traced(env, alone=alone) else None
    if config is None or config.drain != "auto":
        yield env
        return
    with ExitStack() as stack:
        try:
            held = stack.enter_context(hold_drain(config))
        except DltraceError:  # each process says why it is not traced, and trains
            yield env
            return
        yield {UNDER_RUN: "1", **env} if held.is_ours else env
    if held.is_ours and not (held.roots or held.is_busy):
        tell(held.why_nothing())
    for root in held.roots:
        tell(f"{held.outcome(root)}; {how_to_read(root)}")


def _is_traced(env: Mapping[str, str], *, alone: bool) -> bool:
    """Return whether *env* asks for tracing of a process that is started here: of its servers, too, if *alone*."""
    return is_switched_on({**env, _ROLE: "server" if alone else "worker"})


def traced_environment(program: Sequence[str], env: Mapping[str, str], *, alone: bool) -> Mapping[str, str]:
    """Return *env*, and where it asks for tracing what servers and workers have to know in common: run and name.

    Several jobs of one run are told apart: their steps are not the same. Unless told, stages of partitions are
    recorded, and what servers do: without them nobody could say which key or server is slow.

    Args:
        program: What the workers run.
        env: Our environment.
        alone: Whether the whole job is started here.

    Raises:
        ConfigError: A variable cannot be used; each process would say so.
    """
    if not _is_traced(env, alone=alone):
        return env
    Config.from_env(env).check_writable(env)
    run, launch = VARIABLES["run"], VARIABLES["launch"]
    if not alone:
        _say_apart(env, (run,))
    agreed = {JOB_NAME: _job_name(program), run: os.urandom(8).hex()}
    if alone and said(env, run):
        agreed[launch] = os.urandom(8).hex()
    return _at_partition({**env, **{name: value for name, value in agreed.items() if not said(env, name)}})


def server_environment(env: Mapping[str, str]) -> Mapping[str, str]:
    """Return *env* with what makes this process a server, recording as `launch` has its own record.

    Raises:
        ConfigError: It is not told what a server has to know of its job.
    """
    needed = ["DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "PUSHPULL_TOKEN"]
    if (said(env, "DMLC_NUM_SERVER") or "1") != "1":
        needed.append("DMLC_SERVER_ID")
    if missing := [name for name in needed if not said(env, name)]:
        raise ConfigError(f"serve: a server needs to know its job; not set: {', '.join(missing)}")
    env = {**env, _ROLE: "server"}
    if not is_switched_on(env):
        return env
    job = VARIABLES["job"]
    is_named = any(said(env, name) for name in ("OTEL_SERVICE_NAME", job, JOB_NAME))
    _say_apart(env, (VARIABLES["run"],) if is_named else (VARIABLES["run"], job))
    return _at_partition(env)


def _at_partition(env: Mapping[str, str]) -> dict[str, str]:
    level = VARIABLES["level"]
    return {**env, level: said(env, level) or "partition"}


def _say_apart(env: Mapping[str, str], names: Sequence[str]) -> None:
    """Say which of *names* are missing in *env*, by which the hosts of a job know that they are of one."""
    if missing := [name for name in names if not said(env, name)]:
        same = " and ".join(missing)
        tell(f"give all hosts of the job the same {same}, or each is traced separately")


def _job_name(program: Sequence[str]) -> str:
    """Return what the job is called where nobody has named it: as its script or module is."""
    return program_name(program) or Path(program[0]).stem

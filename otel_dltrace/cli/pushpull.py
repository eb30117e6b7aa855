"""Start a push_pull job: its servers, and its workers with their local ranks.

    otel-dltrace pushpull launch --workers 2 --local-ranks 2 --servers 2 -- python train.py
    otel-dltrace pushpull serve      one server, as DMLC_* and PUSHPULL_* describe it

Over several hosts: start each server with `serve`, and on each host its worker with --only-worker and --root. All
need the same PUSHPULL_TOKEN. The exit code is that of the process that failed first.
"""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path

from otel_dltrace.cli.held_drain import hold_drain
from otel_dltrace.configure.sources import autostart
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.pushpull.launch import Plan, launch
from otel_dltrace.pushpull.options import read_env
from otel_dltrace.settings.config import VARIABLES, Config
from otel_dltrace.settings.process import JOB_NAME
from otel_dltrace.settings.switch import is_switched_on

_ONE_OR_MORE = {"workers": 1, "local_ranks": 1, "servers": 0}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True, dest="action", help="launch or serve")
    starts = actions.add_parser("launch", help="start servers and workers on this host, and end them together")
    starts.add_argument("--workers", type=int, default=1, metavar="N", help="machines, or what stands for them (1)")
    starts.add_argument("--local-ranks", type=int, default=1, metavar="N", help="training processes of a worker (1)")
    starts.add_argument("--servers", type=int, default=1, metavar="N", help="parameter servers (1)")
    starts.add_argument("--only-worker", type=int, metavar="ID", help="start this worker alone; needs --root")
    starts.add_argument("--root", default="", metavar="HOST:PORT", help="where server 0 listens (a free port here)")
    starts.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="what each local rank runs")
    actions.add_parser("serve", help="run one server in the foreground")


def run(args: argparse.Namespace) -> int:
    """Start what is asked for; return its exit code."""
    if args.action == "serve":
        autostart()
        from otel_dltrace.pushpull.server import serve

        serve(*read_env(os.environ))
        return 0
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        raise ConfigError("launch: no program given; write it after --, as in: ... launch -- python train.py")
    for name, least in _ONE_OR_MORE.items():
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: there must be {least} or more")
    if args.only_worker is not None and not args.root:
        raise ConfigError("--only-worker needs --root HOST:PORT: where is server 0?")
    plan = Plan(program, args.workers, args.local_ranks, args.servers, args.root, args.only_worker)
    env = traced_environment(program, os.environ, alone=args.only_worker is None)
    with _files_at_end(env):
        return launch(plan, env)


def _files_at_end(env: Mapping[str, str]) -> AbstractContextManager[object]:
    """Return what holds the drain where BytePS's files are asked for, so that they are there when the command ends.

    Otherwise the first process starts it, and it ends some seconds behind the job.
    """
    config = Config.from_env(env) if is_switched_on(env) else None
    if config is None or config.drain != "auto" or not (config.comm_directory or config.server_profile):
        return nullcontext()
    return hold_drain(config, env)


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
    if not is_switched_on(env):
        return env
    Config.from_env(env)
    run, launch, level = VARIABLES["run"], VARIABLES["launch"], VARIABLES["level"]
    if not alone and not env.get(run):
        sys.stderr.write(f"otel-dltrace: give all hosts of the job the same {run}, or each is traced apart\n")
    own = {launch: os.urandom(8).hex()} if alone and env.get(run) else {}
    return {JOB_NAME: _job_name(program), run: os.urandom(8).hex(), **own, **env, level: env.get(level) or "partition"}


def _job_name(program: Sequence[str]) -> str:
    """Return what the job is called where nobody has named it: as its script or module is."""
    scripts = (word for word in program if word.endswith(".py"))
    modules = (word for flag, word in pairwise(program) if flag == "-m")
    return Path(next(scripts, "") or next(modules, "") or program[0]).stem

"""Run a program with tracing on, and print the report when it has ended.

    otel-dltrace run -- torchrun --nproc-per-node 2 train.py

The process that reads what is recorded (the drain) is started first. Signals are passed on to the program, and the
exit code is the program's.
"""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path

from otel_dltrace.cli.held_drain import hold_drain
from otel_dltrace.cli.printing import print_no_more, tell
from otel_dltrace.cli.relay import Relay
from otel_dltrace.model.errors import DltraceError
from otel_dltrace.settings.config import VARIABLES, Config
from otel_dltrace.settings.paths import BEGAN_IN
from otel_dltrace.settings.process import JOB_NAME, UNDER_RUN
from otel_dltrace.settings.program import program_name
from otel_dltrace.settings.said import said

_MPIEXEC = ("mpiexec", "mpirun", "orterun", "prterun")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--level", help="what is recorded: step, collective, phase or partition")
    parser.add_argument("--steps", help="the steps that go out in full over OTLP: first=50,every=50, 10-20, all")
    parser.add_argument("--dir", dest="directory", metavar="DIR", help="where the run directory is made")
    parser.add_argument("--no-report", action="store_true", help="print only where the spans are")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- PROGRAM ...", help="what to run")
    parser.epilog = f"variables, their defaults, and what they mean:\n{_variables()}"


def _variables() -> str:
    meaning = dict(re.findall(r"^ +(\w+): (.+)$", Config.__doc__ or "", re.MULTILINE))
    defaults = {f.name: _shown(f.default) for f in fields(Config)}
    width, wide = (max(map(len, column.values())) for column in (VARIABLES, defaults))
    lines = (f"  {VARIABLES[name]:{width}} {defaults[name]:{wide}} {meaning.get(name, '')}" for name in VARIABLES)
    return "\n".join(line.replace("``", "") for line in lines)


def _shown(default: object) -> str:
    """Return *default* as it would be written: 4M, and not 4194304."""
    if not isinstance(default, int):
        return str(default)
    shifts = ((30, "G"), (20, "M"))
    return next((f"{default >> bits}{unit}" for bits, unit in shifts if default >= 1 << bits), str(int(default)))


def run(args: argparse.Namespace) -> int:
    """Start the drain, run the program, print the report; return the program's exit code."""
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    if not program:
        raise DltraceError("run: no program given; write it after --, as in: otel-dltrace run -- python train.py")
    env = {**_name_of_programs(program), **traced_environment(args)}
    config = Config.from_env(env)
    with hold_drain(config) as drain:
        code = _run_program(program, env)
    if not (drain.roots or drain.is_busy):
        tell(drain.why_nothing())
    try:
        if not args.no_report:
            _report([root for root in drain.roots if root.is_dir()])
    finally:  # also behind a report that was interrupted
        for root in drain.roots:
            tell(drain.outcome(root))
    return code


def _report(roots: Sequence[Path]) -> None:
    """Print the reports; whatever comes between, the exit code is the program's."""
    try:
        # Here, since all that a report takes would be loaded before the program is started, and stay beside it.
        from otel_dltrace.cli.report import print_reports

        try:
            print_reports(roots)
        finally:
            print(end="", flush=True)
    except DltraceError as error:
        tell(str(error))
    except (Exception, SystemExit) as error:  # noqa: BLE001  -- rich exits where nobody reads on
        print_no_more()
        if not isinstance(error.__context__ or error, BrokenPipeError):
            tell(f"no report: {type(error).__name__}: {error}")


def traced_environment(args: argparse.Namespace) -> dict[str, str]:
    """Return our environment with tracing on, as *args* want it, under a run id that ranks share."""
    env = {UNDER_RUN: "1", BEGAN_IN: str(Path.cwd()), **os.environ, "OTEL_DLTRACE": "1"}
    if not said(env, VARIABLES["run"]):
        env[VARIABLES["run"]] = env[UNDER_RUN] = os.urandom(8).hex()
    if said(env, VARIABLES["drain"]) == "thread":
        env[VARIABLES["drain"]] = "auto"  # we start one, so nobody else has to
    given = {name: getattr(args, name) for name in ("level", "steps", "directory")}
    options = {name: value for name, value in given.items() if value is not None}
    config = Config.from_env(env, **options)
    config.check_writable(env, options)
    # A script may change its directory before it starts what is traced.
    paths = (name for name in ("directory", "ring_directory") if said(env, VARIABLES[name]))
    told = config.to_env()
    return env | {VARIABLES[name]: told[VARIABLES[name]] for name in {*options, *paths}}


def _name_of_programs(program: list[str]) -> dict[str, str]:
    """Return what names the job if *program* is an mpiexec with several: each rank would name it as its own.

    Only there do we know that they are one job: what a script starts may be several, with a run directory each.
    """
    if ":" not in program or Path(program[0]).name not in _MPIEXEC:
        return {}
    commands = ([*words] for is_between, words in groupby(program, ":".__eq__) if not is_between)
    return {JOB_NAME: "+".join(filter(None, dict.fromkeys(map(program_name, commands))))}


def _run_program(program: list[str], env: dict[str, str]) -> int:
    code = Relay().run(program, env)
    return code if code >= 0 else 128 - code

"""Read another tracer's files into a run directory, for report and export.

    otel-dltrace import byteps traces/ -o RUN
    otel-dltrace import byteps worker0/0/comm.json server_profile.json -o RUN --start-step 10
    otel-dltrace import horovod timeline.json -o RUN

Whatever state a file is in, what can be read of it is read, and what is missing is reported. The same files
give the same ids again.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from otel_dltrace.cli.formats_help import formats_help
from otel_dltrace.cli.printing import show
from otel_dltrace.cli.progress import progress
from otel_dltrace.configure.outcome import short_path
from otel_dltrace.export.foreign.byteps_in import Options, import_byteps
from otel_dltrace.export.foreign.bytescheduler_in import import_bytescheduler
from otel_dltrace.export.foreign.horovod_in import import_horovod
from otel_dltrace.export.foreign.imported import Imported
from otel_dltrace.model.errors import ConfigError, DltraceError


class Format(NamedTuple):
    """A tracer: what its files are, how they are read into a new run directory."""

    about: str
    read: Callable[[argparse.Namespace, Callable[[int], None]], Imported]


def _byteps(args: argparse.Namespace, count: Callable[[int], None]) -> Imported:
    options = Options(args.name or "byteps", args.start_step, args.servers)
    return import_byteps(args.paths, args.output, options, count)


def _bytescheduler(args: argparse.Namespace, count: Callable[[int], None]) -> Imported:
    return import_bytescheduler(args.paths, args.output, args.name or "bytescheduler", count)


def _horovod(args: argparse.Namespace, count: Callable[[int], None]) -> Imported:
    return import_horovod(args.paths, args.output, args.name or "horovod", count)


FORMATS = {
    "byteps": Format(
        "BytePS: comm.json of its workers (its folder is the local rank, the folder above that a\n"
        "machine), server_profile.json of its servers, ps-lite's van profiles. The n-th\n"
        "push_pull of every tensor, from 1, is in step n - 1",
        _byteps,
    ),
    "bytescheduler": Format(
        "ByteScheduler: BYTESCHEDULER_TIMELINE of rank 0; its times count from its beginning, without\na date",
        _bytescheduler,
    ),
    "horovod": Format(
        "Horovod: HOROVOD_TIMELINE of rank 0, of any version. A step begins when a tensor is\n"
        "negotiated that the current step already has",
        _horovod,
    ),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("format", choices=sorted(FORMATS), help="whose files they are, see below")
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a file, or a directory that holds some")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="RUN", help="the run directory to create")
    parser.add_argument("--name", help="the job's name, by default the format's")
    parser.add_argument(
        "--start-step",
        type=_at_least_one,
        metavar="N",
        help="BytePS: what BYTEPS_TRACE_START_STEP was (its default is 10)",
    )
    parser.add_argument(
        "--servers", type=_at_least_one, default=0, metavar="N", help="BytePS: how many servers there were"
    )
    parser.epilog = formats_help({name: form.about for name, form in FORMATS.items()})


_MOST = (1 << 31) - 1
"""What BytePS reads of a variable, and a record holds."""


def _at_least_one(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 1 <= number <= _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to {_MOST:,}: write 10, for example")
    return number


def run(args: argparse.Namespace) -> int:
    """Make the run directory and say what is in it, and what is missing.

    Raises:
        ConfigError: An option is not for this format.
    """
    for option, value in (("--start-step", args.start_step), ("--servers", args.servers)):
        if value and args.format != "byteps":
            raise ConfigError(f"{option} is for byteps, and not for {args.format}: leave it out")
    with progress(f"reading into {args.output}") as count:
        try:
            imported = FORMATS[args.format].read(args, count)
        except OSError as error:
            raise DltraceError(f"{error.filename or args.output}: {error.strerror or error}") from None
    show(
        f"{short_path(args.output)}: {imported.spans:,} spans from {imported.files:,} file{'s' * (imported.files != 1)}"
    )
    for note in imported.notes:
        show(f"note: {note}")
    return 0

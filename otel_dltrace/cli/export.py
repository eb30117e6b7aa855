"""Write a run as a file that other programs read: --to chrome for Perfetto and chrome://tracing.

The name decides about compression: trace.json.gz is gzipped.
"""

import argparse
from pathlib import Path

from otel_dltrace.analysis.select import select
from otel_dltrace.cli.progress import progress
from otel_dltrace.cli.selection import add_selection, read_spans, steps_of
from otel_dltrace.configure import short_path
from otel_dltrace.export.chrome import write_chrome
from otel_dltrace.model.errors import DltraceError

FORMATS = {"chrome": write_chrome}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    parser.add_argument("--to", required=True, choices=sorted(FORMATS), help="the format")
    parser.add_argument("-o", "--output", required=True, type=Path, metavar="FILE", help="where to write it")
    add_selection(parser)


def run(args: argparse.Namespace) -> int:
    """Write the file and say how large it is."""
    batches = select(read_spans(args.runs), steps_of(args), args.rank)
    done = 0
    with progress(f"writing {args.output}") as count:

        def add(rows: int) -> None:
            nonlocal done
            done += rows
            count(done)

        try:
            events = FORMATS[args.to](batches, args.output, add)
        except OSError as error:
            raise DltraceError(f"{args.output} cannot be written: {error.strerror or error}") from None
    size = args.output.stat().st_size
    print(f"{short_path(args.output)}: {events:,} events, {size / 1e6:.1f} MB")
    return 0

"""Compare runs of one job on different numbers of ranks: speed-up, efficiency, communication, negotiation.

    otel-dltrace compare RUN1 RUN2 RUN4
    otel-dltrace compare RUN1 RUN2 RUN4 --steps 100-500 --json

The others are compared with the run that has the fewest ranks. The first epoch, or the first steps if epochs are not
known, are shown separately, so that a slow start does not look like bad scaling.
"""

import argparse
from pathlib import Path

from otel_dltrace.analysis.scaling import scaling
from otel_dltrace.cli.paper import paper
from otel_dltrace.cli.report import WIDTH
from otel_dltrace.cli.selection import add_steps, naming_damage, selected_of, steps_of, tell_damage
from otel_dltrace.configure.outcome import short_path
from otel_dltrace.export.rundir.reader import as_wholes
from otel_dltrace.model.errors import DltraceError, RunNotFoundError
from otel_dltrace.report.json import to_json
from otel_dltrace.report.scaling import write_scaling

_RUNS = "run directories of two or more runs; those of one run on several hosts count as one"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=_RUNS)
    add_steps(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print how the runs compare."""
    given = [*{short_path(path): path for path in args.runs}.values()]
    runs = {", ".join(map(short_path, parts)): parts for parts in as_wholes(given)}
    if len(runs) < 2:
        raise DltraceError("compare: one run has nothing to be compared with; give two or more runs")
    steps = steps_of(args)
    found = scaling({name: selected_of(parts, steps, of_runs=len(given)) for name, parts in runs.items()})
    empty = [run for run in found.runs if not run.steady.steps]
    if empty:
        names = ", ".join(run.title for run in empty)
        with naming_damage([part for run in empty for part in runs[run.name]]):
            raise RunNotFoundError(f"{names}: no step was recorded; without steps nothing can be compared")
    if args.json:
        print(to_json(found))
    else:
        write_scaling(found, *paper(WIDTH))
    tell_damage(given)
    return 0

"""Say where the time of a step went, on which rank, and who made the others wait.

    otel-dltrace report RUN
    otel-dltrace report RUN --by key          which key, which partition, which worker is slow (push_pull)
    otel-dltrace report RUN --by negotiation  how long Horovod or MPI negotiates, who was ready last

docs/report.md explains each part of it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from otel_dltrace.analysis.compose import RunReport, analyse
from otel_dltrace.analysis.negotiation.coordinator import Negotiations, negotiations
from otel_dltrace.analysis.push_pulls.keys import Keys, keys
from otel_dltrace.analysis.scaling import generation_of, titled
from otel_dltrace.analysis.select import by_world, select_metrics
from otel_dltrace.cli.paper import paper
from otel_dltrace.cli.printing import tell
from otel_dltrace.cli.selection import add_selection, selected_of, steps_of, tell_damage
from otel_dltrace.configure.outcome import short_path
from otel_dltrace.export.rundir.damage import damage_of
from otel_dltrace.export.rundir.metric_reader import read_metrics
from otel_dltrace.export.rundir.reader import as_wholes, read_summaries
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.plan import Window
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.report.json import to_json
from otel_dltrace.report.keys import write_keys
from otel_dltrace.report.negotiation import write_negotiations
from otel_dltrace.report.text import write
from otel_dltrace.report.words import plain

WIDTH = 120
"""Characters that the widest table needs."""


_RUNS = "a run directory; each gets its own report, but those of one run on several hosts get one together"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help=_RUNS)
    add_selection(parser)
    parser.add_argument(
        "--by",
        choices=["key", "negotiation"],
        help="another report: the keys of a parameter server, as workers and servers see them; "
        "or how operations of Horovod or MPI are negotiated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text, one document a run and world")


def run(args: argparse.Namespace) -> int:
    """Print a report per run."""
    try:
        print_reports(args.runs, steps_of(args), args.rank, as_json=args.json, by=args.by)
    finally:
        if args.by:  # without it the report's last line says so
            tell_damage(args.runs)
    return 0


def print_reports(
    runs: Sequence[Path],
    steps: Window | None = None,
    ranks: list[int] | None = None,
    as_json: bool = False,
    by: str | None = None,
) -> None:
    """Print the report of each of *runs*, cut to *steps* and *ranks*; *by* names another report.

    Those that hosts without a folder in common have made of one run are one.

    Raises:
        RunNotFoundError: Of one or more of them there is nothing to print; the others are printed.
    """
    console, fold = paper(WIDTH)
    missing: list[RunNotFoundError] = []
    wholes = as_wholes(runs)

    def print_one(parts: Sequence[Path]) -> None:
        worlds = by_world(selected_of(parts, steps, ranks))
        name = ", ".join(map(short_path, parts))
        for world, batches in worlds.items():
            report = _report(parts, batches, by)
            if as_json:
                text = to_json(report, name=name, generation=generation_of(batches), world=world)
                console.out(text, highlight=False)
                continue
            names = [titled(name, generation_of(batches))] if len(wholes) > 1 else []
            names += [f"world {world}"] if len(worlds) > 1 else []
            if names:
                console.print(Rule(Text(plain(", ".join(names)))), width=fold)
            _write(report, console, fold)

    for parts in wholes:
        try:
            print_one(parts)  # apart: what it holds of a run goes before the next is read
        except RunNotFoundError as error:
            missing.append(error)
    for one in missing[:-1]:
        tell(str(one))
    if missing:
        raise missing[-1]


def _write(report: RunReport | Keys | Negotiations, console: Console, fold: int | None) -> None:
    if isinstance(report, Keys):
        write_keys(report, console, fold)
    elif isinstance(report, Negotiations):
        write_negotiations(report, console, fold)
    else:
        write(report, console, fold)


def _report(parts: Sequence[Path], batches: Sequence[SpanBatch], by: str | None) -> RunReport | Keys | Negotiations:
    if by == "key":
        return keys(batches)
    if by == "negotiation":
        return negotiations(batches)
    summaries = [summary for path in parts for summary in read_summaries(path)]
    metrics = [metric for path in parts for metric in read_metrics(path)]
    damage = [one for path in parts for one in damage_of(path)]
    return analyse(batches, summaries, select_metrics(metrics, batches), damage)

"""Say where the time of a step went, on which rank, and who made the others wait."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from otel_dltrace.cli.selection import add_selection, chosen
from otel_dltrace.export.run_reader import read_run, read_summaries
from otel_dltrace.model.spans import SpanBatch


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    add_selection(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    print(report_text(chosen(args), _summaries(args.runs), as_json=args.json))
    return 0

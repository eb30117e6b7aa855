"""The arguments by which commands choose steps and ranks of runs, and the reading of them."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from otel_dltrace.cli.progress import progress
from otel_dltrace.export.damage import nothing_in
from otel_dltrace.export.run_reader import read_run
from otel_dltrace.model.errors import ConfigError, RunNotFoundError
from otel_dltrace.model.plan import Window
from otel_dltrace.model.spans import SpanBatch


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add ``--steps`` and ``--rank``."""
    parser.add_argument("--steps", metavar="A-B", help="only these steps, by ordinal, both ends included")
    parser.add_argument("--rank", type=int, action="append", metavar="N", help="only this rank; may be given again")


def steps_of(args: argparse.Namespace) -> Window | None:
    """Return the steps that *args* choose, None for all.

    Raises:
        ConfigError: ``--steps`` is no range of steps.
    """
    text = args.steps
    if text is None:
        return None
    try:
        return Window.parse(f"{text}-{text}" if text.isdecimal() else text)
    except ConfigError:
        raise ConfigError(f"--steps {text!r} is no range of steps; write A-B, both ends included") from None


def read_spans(runs: Sequence[Path]) -> list[SpanBatch]:
    """Return the spans of *runs*, one batch per process.

    Raises:
        RunNotFoundError: One is no run directory, or none holds a span.
    """
    batches: list[SpanBatch] = []
    with progress("reading spans") as count:
        for run in runs:
            batches += read_run(run)
            count(sum(map(len, batches)))
    if not batches:
        raise RunNotFoundError("; ".join(map(nothing_in, runs)))
    return batches

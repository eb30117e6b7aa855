"""The arguments by which commands choose steps and ranks of runs."""

import argparse

from otel_dltrace.analysis.select import select
from otel_dltrace.cli.progress import progress
from otel_dltrace.export.run_reader import read_run
from otel_dltrace.model.errors import ConfigError, RunNotFoundError
from otel_dltrace.model.plan import Window
from otel_dltrace.model.spans import SpanBatch


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add ``--steps`` and ``--rank``."""
    parser.add_argument("--steps", metavar="A-B", help="only these steps, by ordinal, both ends included (as in first=50, 100-120)")
    parser.add_argument("--rank", type=int, action="append", metavar="N", help="only this rank; may be given again")


def chosen(args: argparse.Namespace) -> list[SpanBatch]:
    """Return the spans that *args* choose, one batch per process.

    Raises:
        ConfigError: ``--steps`` is no range of steps.
        RunNotFoundError: There is no such run, rank or step.
    """
    batches: list[SpanBatch] = []
    with progress("reading spans") as count:
        for run in args.runs:
            batches += read_run(run)
            count(sum(map(len, batches)))
    if not batches:
        raise RunNotFoundError(f"{', '.join(map(str, args.runs))}: no spans are in there yet")
    return list(select(batches, _steps(args.steps), args.rank))


def _steps(text: str | None) -> Window | None:
    if text is None:
        return None
    single = f"{text}-{text}" if text.isdigit() else text
    try:
        return Window.parse(single)
    except ConfigError:
        raise ConfigError(f"--steps {text!r} is no range of steps; write A-B, both ends included") from None



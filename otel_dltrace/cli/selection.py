"""The arguments by which commands choose steps and ranks of runs, and the reading of them."""

import argparse
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from otel_dltrace.analysis.select import select
from otel_dltrace.cli.printing import tell
from otel_dltrace.cli.progress import progress
from otel_dltrace.configure.outcome import short_path
from otel_dltrace.export.rundir.damage import but_for, damage_of, nothing_in
from otel_dltrace.export.rundir.reader import read_ordinals, read_run
from otel_dltrace.export.rundir.size import latest_steps, spans_that_fit
from otel_dltrace.model.errors import ConfigError, RunNotFoundError
from otel_dltrace.model.plan import Window
from otel_dltrace.model.spans import SpanBatch


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add ``--steps`` and ``--rank``."""
    add_steps(parser)
    parser.add_argument("--rank", type=int, action="append", metavar="N", help="only this rank; may be repeated")


def add_steps(parser: argparse.ArgumentParser) -> None:
    """Add ``--steps``."""
    about = "only these steps, counted from 0: A-B including both ends, N for one, or `all`"
    parser.add_argument("--steps", metavar="A-B", help=about)


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
    except ConfigError as error:
        if "ends before" in str(error):
            raise ConfigError(f"--steps {text!r} ends before it starts; write A-B with A not above B") from None
        raise ConfigError(
            f"--steps {text!r} is not a range of steps; write A-B (both ends included), N, or all"
        ) from None


def selected(run: Path, steps: Window | None, ranks: Sequence[int] | None = None, of_runs: int = 1) -> list[SpanBatch]:
    """Return the spans of *run*, one batch per process, cut to *steps* and *ranks*.

    Where memory does not hold all steps of so many runs, and none are asked for, those are the latest; that is said.

    Raises:
        RunNotFoundError: It is no run directory, or holds no span, or none of these.
    """
    with progress("reading spans") as count:
        steps = steps or _latest(run, ranks, of_runs)
        batches = read_run(run, steps, ranks)
        count(sum(map(len, batches)))
    if not batches:
        raise RunNotFoundError(nothing_in(run))
    try:
        if steps is not None and not any(map(len, batches)):
            select(read_ordinals(run), steps, ranks)  # raises, with what there is
            batches = read_run(run, steps, ranks)  # unless it has come meanwhile
        return select(batches, steps, ranks)
    except RunNotFoundError as error:
        raise RunNotFoundError(f"{run}: {error}{but_for(run)}") from None  # there may be several


def selected_of(
    parts: Sequence[Path], steps: Window | None, ranks: Sequence[int] | None = None, of_runs: int | None = None
) -> list[SpanBatch]:
    """Return the same of the *parts* that a run has on several hosts; what is asked for need not be in each.

    With *of_runs* memory is for so many run directories, else for the parts.

    Raises:
        RunNotFoundError: It is in none of them.
    """
    batches, missing = list[SpanBatch](), list[RunNotFoundError]()
    for part in parts:
        try:
            batches += selected(part, steps, ranks, of_runs or len(parts))
        except RunNotFoundError as error:
            missing.append(error)
    if not batches:
        raise missing[0]
    if steps is None and ranks is None:
        for one in missing:
            tell(str(one))
    return batches


def _latest(run: Path, ranks: Sequence[int] | None, of_runs: int) -> Window | None:
    """Return the latest steps of *run* if there is no room for all of them here, None if there is."""
    found = latest_steps(run, spans_that_fit() // of_runs, ranks)
    if found is not None:
        ((first, last),) = found.ranges
        what = f"{short_path(run)} holds more spans than fit into memory here"
        tell(f"{what}: this covers its latest steps only, {first}-{last}; --steps A-B takes others")
    return found


@contextmanager
def naming_damage(runs: Sequence[Path]) -> Iterator[None]:
    """Have the sentence on what the block does not find in *runs* name the files that could have held it."""
    try:
        yield
    except RunNotFoundError as error:
        unsaid = {run: [one for one in damage_of(run) if one not in str(error)] for run in runs}
        but = [f", without what cannot be read in {run}: {'; '.join(some)}" for run, some in unsaid.items() if some]
        raise RunNotFoundError(f"{error}{''.join(but)}") from None


def tell_damage(runs: Sequence[Path]) -> None:
    """Say which files of *runs* are in no figure, as they could not be read."""
    for run in runs:
        if damage := damage_of(run):
            tell(f"without what cannot be read in {run}: {'; '.join(damage)}")


def keep_whole(runs: Sequence[Path], output: Path) -> None:
    """Refuse to write to *output* what is read from *runs*, where that would change one of them.

    Raises:
        ConfigError: It is a file of a run's own, or would be beside its hosts' files.
    """
    place = Path(os.path.realpath(output))
    for run in runs:
        own = Path(os.path.realpath(run))
        if place == own / "run.json" or place.is_relative_to(own / "hosts"):
            raise ConfigError(
                f"{output} is part of the run {run} itself, which is being read: give another place with -o"
            )

"""One time line for the Chrome trace of several hosts, whose wall clocks may be off."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from otel_dltrace.analysis.collectives.clocks import host_of
from otel_dltrace.analysis.collectives.meeting import Moves, moves
from otel_dltrace.cli.printing import tell
from otel_dltrace.export.rundir.reader import as_wholes, host_folders, read_collectives, read_processes
from otel_dltrace.export.rundir.size import newest_steps
from otel_dltrace.model.plan import Window
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.report.words import ms

_STEPS = 50
"""By the collectives of so many steps, the newest, hosts are put on one time line."""


def moves_of(runs: Sequence[Path], steps: Window | None) -> Moves:
    """Return what puts the hosts of each of *runs* on one time line, as the newest of *steps* (None: all) show it."""
    found = [_moves_of_one(parts, steps) for parts in as_wholes(runs)]
    by_process = {nonce: ns for one in found for nonce, ns in one.by_process.items()}
    return Moves(by_process, max(one.uncertainty for one in found), max(one.apart for one in found))


def _moves_of_one(parts: Sequence[Path], steps: Window | None) -> Moves:
    folders = [folder for part in parts for folder in host_folders(part)]
    if len({host_of(process) for folder in folders for process in read_processes(folder).values()}) < 2:
        return Moves({})
    return moves([batch for part in parts for batch in read_collectives(part, newest_steps(part, _STEPS, steps))])


def on_one_line(spans: Iterable[SpanBatch], moved: Moves) -> Iterable[SpanBatch]:
    """Return *spans* by clocks that are where *moved* puts them, and say so; as they are where no clock is."""
    if not moved.apart:
        return spans
    tell(
        f"the hosts' clocks are {ms(moved.apart)} ms apart, as the ends of collectives show: in the trace these ends "
        f"meet, to within {ms(moved.uncertainty)} ms"
    )
    return (_moved(batch, moved) for batch in spans)


def _moved(batch: SpanBatch, moved: Moves) -> SpanBatch:
    ns, anchor = moved.by_process.get(batch.process.nonce), batch.process.anchor
    if ns is None:  # of a run whose clocks are not seen to be off
        return batch
    anchor = replace(anchor, wall=anchor.wall + ns, uncertainty=moved.uncertainty)
    return replace(batch, process=replace(batch.process, anchor=anchor))

"""One time line for the Chrome trace of several hosts, whose wall clocks may be off."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from otel_dltrace.analysis.collectives.clocks import host_of
from otel_dltrace.analysis.collectives.meeting import Moves
from otel_dltrace.cli.printing import tell
from otel_dltrace.export.rundir.reader import host_folders, read_processes
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.report.words import ms


def has_several_hosts(runs: Sequence[Path]) -> bool:
    """Return whether processes of several hosts are in *runs*."""
    folders = [folder for run in runs for folder in host_folders(run)]
    return len({host_of(process) for folder in folders for process in read_processes(folder).values()}) > 1


def on_one_line(spans: Iterable[SpanBatch], moves: Moves) -> Iterable[SpanBatch]:
    """Return *spans* by clocks that are where *moves* puts them, and say so; as they are where no clock is moved."""
    if not moves.apart:
        return spans
    tell(
        f"the hosts' clocks are {ms(moves.apart)} ms apart, as the ends of collectives show: in the trace these ends "
        f"meet, to within {ms(moves.uncertainty)} ms"
    )
    return (_moved(batch, moves) for batch in spans)


def _moved(batch: SpanBatch, moves: Moves) -> SpanBatch:
    anchor = batch.process.anchor
    wall = anchor.wall + moves.by_host.get(host_of(batch.process), 0)
    anchor = replace(anchor, wall=wall, uncertainty=moves.uncertainty)
    return replace(batch, process=replace(batch.process, anchor=anchor))

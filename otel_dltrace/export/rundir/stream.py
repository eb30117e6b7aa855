"""Read runs file by file, for what is written as it is read: what is held does not grow with a run's length."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from otel_dltrace.export.rundir.columns import numbers_of, of_process
from otel_dltrace.export.rundir.damage import nothing_in
from otel_dltrace.export.rundir.reader import Host, host_folders, joined, read_batches, read_processes, role_and_rank
from otel_dltrace.export.rundir.span_files import SpanFile, held_files
from otel_dltrace.export.rundir.span_tables import extent_of, read_table
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import OTHER
from otel_dltrace.model.plan import Window
from otel_dltrace.model.spans import SpanBatch, empty_rows

_AT_ONCE = 1 << 19


def read_outline(run: Path, progress: Callable[[int], None], with_operations: bool = False) -> list[SpanBatch]:
    """Return of each process of *run* its steps, stages and pauses, and what is first and last in each file.

    Args:
        run: The run directory.
        progress: Called with the number of spans that were looked at since its last call.
        with_operations: Return operations, and the waiting for them, too: who waits is not slow.

    Raises:
        RunNotFoundError: It is no run directory, or holds no span.
    """
    parts: dict[int, list[SpanBatch]] = {}
    for batch in read_batches(run):
        parts.setdefault(batch.process.nonce, []).append(batch.take(_of_outline(batch, with_operations)))
        progress(len(batch))
    if not parts:
        raise RunNotFoundError(nothing_in(run))
    return joined(parts)


def _of_outline(batch: SpanBatch, with_operations: bool) -> Column:
    names = (s.GC, s.WAIT) if with_operations else (s.GC,)
    finest = s.Level.COLLECTIVE if with_operations else s.Level.STEP
    mask: Column = (batch["level"] <= finest) | batch.lookup(lambda d: d.name in names, bool)
    if len(batch):
        mask[[np.argmin(batch["start"]), np.argmax(batch["end"])]] = True
    return mask


def stream_spans(runs: Sequence[Path], steps: Window | None, ranks: Collection[int] | None) -> Iterator[SpanBatch]:
    """Yield the spans of *runs* that are in *steps* and of *ranks* (None: all), a batch per process and file."""
    for run in runs:
        yield from _chosen(read_batches(run, steps), steps, ranks)


def stream_in_turns(
    runs: Sequence[Path], steps: Window | None, ranks: Collection[int] | None, spans: int
) -> Iterator[SpanBatch]:
    """Yield the same by time: what all processes did comes in pieces of about so many *spans* of all of them.

    A step of a process is only cut where its file is. Some `_AT_ONCE` spans are held, or a file if that has more.
    """
    for files in _groups(_files(runs)):
        yield from in_turns([batch for file in files for batch in _chosen(file.read(steps), steps, ranks)], spans)


def in_turns(batches: Sequence[SpanBatch], spans: int) -> Iterator[SpanBatch]:
    """Yield *batches* in pieces of about *spans* of all of them together, by when their steps began."""
    begins = [_begins(batch) for batch in batches]
    every = np.sort(np.concatenate([np.zeros(0, np.int64), *begins]))
    borders = every[spans::spans]
    pieces = [np.searchsorted(borders, begin, side="right") for begin in begins]
    for number in range(len(borders) + 1):
        for batch, piece in zip(batches, pieces, strict=True):
            part = batch.take(piece == number)
            if len(part):
                yield part


def _begins(batch: SpanBatch) -> Column:
    """Return for each span when its step began, as far as it is in *batch*, in Unix ns; outside any, when it did."""
    begins: Column = batch["start"] + np.int64(batch.wall)
    if len(batch):
        order = np.argsort(batch["step"], kind="stable")
        steps, firsts, of_row = np.unique(batch["step"][order], return_index=True, return_inverse=True)
        inside = steps[of_row] != NO_STEP
        begins[order[inside]] = np.minimum.reduceat(begins[order], firsts)[of_row[inside]]
    return begins


@dataclass(frozen=True)
class Pieces:
    """The spans of one process, read whenever they are gone through: some at a time, in the order of its files.

    Attributes:
        steps: A row for each of its steps; in those nothing else is told.
        chosen: Which steps are read, None for all.
    """

    steps: SpanBatch
    chosen: Window | None
    _host: Host
    _files: Sequence[SpanFile]

    def __iter__(self) -> Iterator[SpanBatch]:
        """Yield a batch for each piece."""
        for file in self._files:
            for batch in self._host.read_pieces(file, self.steps.process.nonce):
                yield batch if self.chosen is None else batch.in_steps(self.chosen)


def pieces_of(runs: Sequence[Path], steps: Window | None) -> list[Pieces]:
    """Return what the processes of *runs* did in *steps* (None: all), those of a run by role and rank.

    Raises:
        RunNotFoundError: One is no run directory, or none holds a span.
    """
    found: list[Pieces] = []
    for run in runs:
        of_run = [pieces for folder in host_folders(run) for pieces in _of_host(folder, steps)]
        found += sorted(of_run, key=lambda pieces: role_and_rank(pieces.steps))
    if not found:
        raise RunNotFoundError("; ".join(map(nothing_in, runs)))
    return found


def _of_host(folder: Path, steps: Window | None) -> Iterator[Pieces]:
    files: dict[int, list[SpanFile]] = {}
    known: dict[int, Column] = {}
    for file in held_files(folder):
        table = read_table(file.source, ["process", "step"])
        if table is None:
            continue
        for nonce in table.column("process").unique().to_pylist():
            of_one = numbers_of(table.column("step").filter(of_process(table, nonce)))
            known[nonce] = np.unique(np.append(known.get(nonce, of_one[:0]), of_one))
            files.setdefault(nonce, []).append(file)
    host = Host(folder)
    for nonce, ordinals in known.items():
        rows = empty_rows(len(ordinals))
        rows["step"] = ordinals
        yield Pieces(SpanBatch(rows, [OTHER], host.process(nonce)), steps, host, files[nonce])


class _File(NamedTuple):
    """A file of a host: when its first span begins (Unix ns), how many it has, and what yields them."""

    begin: int
    spans: int
    read: Callable[[Window | None], Iterator[SpanBatch]]


def _files(runs: Sequence[Path]) -> list[_File]:
    """Return the files of *runs* by when they begin; those of one host in their order."""
    files = []
    for run in runs:
        for folder in host_folders(run):
            held = held_files(folder)
            host, begin = Host(folder), 0
            wall = next((process.anchor.offset for process in read_processes(folder).values()), 0)
            for file in held:
                start, spans = extent_of(file.source)
                begin = max(begin, start + wall)
                files.append(_File(begin, spans, partial(host.read, file)))
    return sorted(files, key=lambda file: file.begin)


def _groups(files: Sequence[_File]) -> Iterator[list[_File]]:
    """Yield *files*, those together that are read at once: hosts wrote theirs at the same time."""
    group: list[_File] = []
    for file in files:
        if group and sum(one.spans for one in group) + file.spans > _AT_ONCE:
            yield group
            group = []
        group.append(file)
    yield group


def _chosen(batches: Iterator[SpanBatch], steps: Window | None, ranks: Collection[int] | None) -> Iterator[SpanBatch]:
    for batch in batches:
        if ranks is None or batch.rank in ranks:
            yield batch if steps is None else batch.in_steps(steps)

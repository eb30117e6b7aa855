"""Read a run directory back: one batch per process, whatever state its writers left it in."""

import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from otel_dltrace.export.files import read_object
from otel_dltrace.export.rundir import columns
from otel_dltrace.export.rundir.arrow_files import read_stream
from otel_dltrace.export.rundir.authors import authors
from otel_dltrace.export.rundir.drain_json import entries_of, read_drain, read_process
from otel_dltrace.export.rundir.host_copies import copies_among
from otel_dltrace.export.rundir.host_folder import is_locked_here
from otel_dltrace.export.rundir.span_files import NAMES, OPEN, SpanFile, held_files, may_hold
from otel_dltrace.export.rundir.span_tables import read_pieces, read_table
from otel_dltrace.model.descriptors import Descriptors
from otel_dltrace.model.errors import RunNotFoundError, TraceFormatError
from otel_dltrace.model.operation import OTHER, Descriptor
from otel_dltrace.model.plan import Window
from otel_dltrace.model.semconv import COLLECTIVE, Flag
from otel_dltrace.model.spans import Process, SpanBatch, concatenate, empty_rows

FRESH_S = 120.0
"""What processes have open is written each ten seconds, or its drain is gone. Hosts' clocks may differ: by more only
where the drain is on another one."""
_MOST_NAMES = 8


def host_folders(run: Path) -> list[Path]:
    """Return the folders of the hosts that wrote to *run*, none of which somebody has made of another (`copies_in`).

    Raises:
        RunNotFoundError: There is no run directory at *run*, or none that we may read.
        TraceFormatError: A newer version wrote it.
    """
    try:
        if not _is_folder(run / "hosts"):
            raise RunNotFoundError(f"{run} is not a run directory: {_instead(run)}")
        folders = _folders_in(run)
        for folder in folders:
            with suppress(FileNotFoundError):  # removed just now
                next(folder.iterdir(), None)
    except PermissionError as error:
        raise RunNotFoundError(
            f"{error.filename}: permission denied; whoever wrote the run can let you read it"
        ) from None
    except FileNotFoundError:
        raise
    except OSError as error:  # a link that leads to itself, a name that is too long
        raise RunNotFoundError(f"{run} cannot be read: {error.strerror}") from None
    schema = read_object(run / "run.json").get("schema")
    if isinstance(schema, int) and schema > columns.SCHEMA_VERSION:
        raise TraceFormatError(f"{run}: schema {schema} is newer than this version reads; upgrade otel-dltrace")
    copies = copies_among(folders)
    return [folder for folder in folders if folder not in copies]


def as_wholes(runs: Sequence[Path]) -> list[list[Path]]:
    """Return *runs*, those together that hosts without a folder in common have each made of one run.

    They have the run's job and generation, and no host's folder is in two of them, as one is in a run and its copy.
    """
    wholes: list[list[Path]] = []
    known: dict[tuple[str, str], tuple[list[Path], set[str]]] = {}
    for run in runs:
        about = read_object(run / "run.json")
        key, hosts = (str(about.get("job", "")), str(about.get("generation", ""))), _hosts_of(run)
        if all(key) and hosts and key in known and not hosts & known[key][1]:
            known[key][0].append(run)
            known[key][1].update(hosts)
        else:
            wholes.append([run])
            known.setdefault(key, (wholes[-1], hosts))
    return wholes


def _hosts_of(run: Path) -> set[str]:
    with suppress(OSError):
        return {folder.name for folder in _folders_in(run)}
    return set()


def copies_in(run: Path) -> dict[Path, Path]:
    """Return the folders in *run* that somebody has made of another one, which is their value (`copies_among`)."""
    return copies_among(_folders_in(run))


def _folders_in(run: Path) -> list[Path]:
    return sorted(folder for folder in (run / "hosts").iterdir() if folder.is_dir())


def _instead(run: Path) -> str:
    """Return what to give in place of *run*, which is none: one that is in it."""
    inside = sorted(run.glob("dltrace-*/run.json"), key=lambda path: path.stat().st_mtime, reverse=True)
    if not inside:
        return "it has no folder hosts/; give one that a traced run printed"
    names = ", ".join(path.parent.name for path in inside[:_MOST_NAMES])
    more = f" and {len(inside) - _MOST_NAMES} more" * (len(inside) > _MOST_NAMES)
    return f"it holds some; give one of them, the newest first: {names}{more}"


def _is_folder(path: Path) -> bool:
    """Return whether *path* is a folder; since Python 3.14 `Path.is_dir` takes any error for a no.

    Raises:
        OSError: It cannot be told, as where we may not look.
    """
    try:
        return stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def read_batches(run: Path, steps: Window | None = None) -> Iterator[SpanBatch]:
    """Yield *run*'s spans file by file, one batch per process and file, an empty one where none is of *steps*."""
    for folder in host_folders(run):
        yield from read_host(folder, steps)


def read_host(folder: Path, steps: Window | None = None) -> Iterator[SpanBatch]:
    """Yield the spans in a host's *folder* in the same way."""
    files = held_files(folder)
    host = Host(folder)  # last: the names of all that is in them are there by now
    for file in files:
        yield from host.read(file, steps)


class Host:
    """Reads the files in a host's *folder*: knows who wrote there, and their descriptors."""

    def __init__(self, folder: Path) -> None:
        self._processes = read_processes(folder)
        self._names = {nonce: Descriptors.of(table) for nonce, table in read_descriptors(folder).items()}

    def process(self, nonce: int) -> Process:
        """Return the process *nonce*."""
        return self._processes.get(nonce) or Process(nonce, None)

    def read(self, file: SpanFile, steps: Window | None = None) -> Iterator[SpanBatch]:
        """Yield the spans in a file, one batch per process; an empty one where none can be of *steps*."""
        is_wanted = steps is None or may_hold(file.path, steps)
        table = read_table(file.source, columns.SPANS.names if is_wanted else ["process"])
        if table is not None:
            for nonce in table.column("process").unique().to_pylist():
                yield self._batch(table, nonce) if is_wanted else self._nothing_of(nonce)

    def read_pieces(self, file: SpanFile, nonce: int) -> Iterator[SpanBatch]:
        """Yield the spans of the process *nonce* in a file, piece by piece."""
        for piece in read_pieces(file.source):
            yield self._batch(piece, nonce)

    def _nothing_of(self, nonce: int) -> SpanBatch:
        return SpanBatch(empty_rows(0), self._names.get(nonce, [OTHER]), self.process(nonce))

    def _batch(self, table: pa.Table, nonce: int) -> SpanBatch:
        mine = columns.of_process(table, nonce)
        rows, errors = columns.from_arrow(table if pc.all(mine).as_py() else table.filter(mine))
        return SpanBatch(rows, self._names.get(nonce, [OTHER]), self.process(nonce), tuple(errors))


def read_run(run: Path, steps: Window | None = None, ranks: Collection[int] | None = None) -> list[SpanBatch]:
    """Return *run* as one batch per process, ordered by role and rank.

    What a process that stands still has open is there too, cut off where its drain saw it last. Of other *steps* and
    *ranks* than are asked for (None: all) no span is held, a process without any has an empty batch.

    Raises:
        RunNotFoundError: There is no run directory at *run*.
    """

    def asked_for(batch: SpanBatch) -> SpanBatch:
        if ranks is not None and batch.rank not in ranks:
            return batch.take(slice(0))
        return batch if steps is None else batch.in_steps(steps)

    return _read_parts(run, steps, asked_for)


def read_ordinals(run: Path) -> list[SpanBatch]:
    """Return the same with one span of each step: which steps and ranks there are, and nothing else.

    Raises:
        RunNotFoundError: There is no run directory at *run*.
    """
    return _read_parts(run, None, lambda batch: batch.take(np.unique(batch["step"], return_index=True)[1]))


def read_collectives(run: Path, steps: Window | None) -> list[SpanBatch]:
    """Return the same with the collectives alone, of *steps* (None: all).

    Raises:
        RunNotFoundError: There is no run directory at *run*.
    """

    def collectives(batch: SpanBatch) -> SpanBatch:
        mine = batch if steps is None else batch.in_steps(steps)
        return mine.take(mine.is_kind(COLLECTIVE))

    return _read_parts(run, steps, collectives)


def _read_parts(run: Path, steps: Window | None, part_of: Callable[[SpanBatch], SpanBatch]) -> list[SpanBatch]:
    """Return what *part_of* takes of each file's batches, one batch per process; files without *steps* are not read."""
    # First: what ends just now is in the spans by then.
    standing = [batch for folder in host_folders(run) for batch in _read_open(folder)]
    parts: dict[int, list[SpanBatch]] = {}
    for batch in read_batches(run, steps):
        parts.setdefault(batch.process.nonce, []).append(part_of(batch))
    for batch in standing:
        part = parts.setdefault(batch.process.nonce, [])
        known = np.concatenate([np.zeros(0, np.uint64), *(over["span_id"] for over in part)])
        part.append(part_of(batch.take(~np.isin(batch["span_id"], known))))
    return joined(parts)


def joined(parts: Mapping[int, Sequence[SpanBatch]]) -> list[SpanBatch]:
    """Return the batches of each process (by nonce) as one, ordered by role and rank."""
    whole = [batch for part in parts.values() if (batch := concatenate(part)) is not None]
    return sorted(whole, key=role_and_rank)


def role_and_rank(batch: SpanBatch) -> tuple[str, int]:
    """Return what orders the processes of a run; one whose rank is not known comes first."""
    return batch.process.bind.role if batch.process.bind else "", batch.rank


def _read_open(folder: Path) -> Iterator[SpanBatch]:
    if files := sorted(folder.glob(OPEN)):
        host = Host(folder)
        for path in files:
            is_fresh = _is_fresh(path) or is_locked_here(folder)
            yield from (batch if is_fresh else _cut_off(batch) for batch in host.read(SpanFile(path, None)))


def _is_fresh(path: Path) -> bool:
    """Return whether a drain that lives still writes *path*."""
    try:
        return time.time() - path.stat().st_mtime < FRESH_S
    except OSError:
        return True  # it is over just now


def _cut_off(batch: SpanBatch) -> SpanBatch:
    rows = batch.rows.copy()
    rows["flags"] &= ~np.uint16(Flag.OPEN)
    return replace(batch, rows=rows)


def read_processes(folder: Path) -> dict[int, Process]:
    """Return who wrote in a host's folder, by nonce: as its drain.json says or, where that does not, its rows."""
    named = read_named(folder)
    if named and writers_in(folder) <= named.keys():
        return named
    there = next(iter(named.values()), None)  # a folder is of one host and boot
    found = authors(folder)
    if there is not None:
        found = {n: replace(process, host=there.host, boot_id=there.boot_id) for n, process in found.items()}
    return {**found, **named}


def read_named(folder: Path) -> dict[int, Process]:
    """Return the processes that the drain.json of a host's folder names, by nonce."""
    entries = map(read_process, entries_of(read_object(folder / "drain.json")))
    return {process.nonce: process for process in entries if process is not None}


def writers_in(folder: Path) -> set[int]:
    """Return the nonces of the processes that described spans in a host's folder."""
    table = _read_descriptors(folder)
    return set() if table is None else set(table.column("process").unique().to_pylist())


def read_descriptors(folder: Path) -> dict[int, list[Descriptor]]:
    """Return the descriptor tables of a host's processes, by nonce."""
    table = _read_descriptors(folder)
    return columns.descriptors_from_arrow(table) if table is not None else {}


def _read_descriptors(folder: Path) -> pa.Table | None:
    table = read_stream(folder / NAMES) if (folder / NAMES).exists() else None
    return table if table is not None and table.schema.equals(columns.DESCRIPTORS) else None


def read_summaries(run: Path) -> list[dict[str, Any]]:
    """Return what each host's drain wrote about itself."""
    summaries = [read_drain(folder) for folder in host_folders(run)]
    return [summary for summary in summaries if summary]

"""BytePS's files into a run directory."""

import hashlib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

from otel_dltrace.export.foreign.byteps_find import find, natural
from otel_dltrace.export.foreign.byteps_places import Told, server_places, told_by, worker_places
from otel_dltrace.export.foreign.foreign_files import held, read_foreign, refuse_endless, room
from otel_dltrace.export.foreign.imported import Imported, ImportedRun, Place
from otel_dltrace.formats import comm_spans, server_spans, van_spans
from otel_dltrace.formats.byteps_kind import Kind, kind_of
from otel_dltrace.formats.comm_json import read_comm
from otel_dltrace.formats.others import HEAD, instead_of_byteps
from otel_dltrace.formats.server_profile import read_profile
from otel_dltrace.formats.van_profile import read_van
from otel_dltrace.model.errors import TraceFormatError
from otel_dltrace.model.identity import Bind


@dataclass(frozen=True, slots=True)
class Options:
    """What the files do not say.

    Attributes:
        name: The job's.
        first: BYTEPS_TRACE_START_STEP of the run, None if nobody knows.
        servers: How many servers there were, 0 to tell it from their keys.
    """

    name: str = "byteps"
    first: int | None = None
    servers: int = 0


class _File(NamedTuple):
    path: Path
    kind: Kind
    digest: str
    piped: bytes | None
    """What is in it, if it can be read but once."""


def _ignore(_: int) -> None:
    """Show no progress."""


def import_byteps(
    paths: Sequence[Path], run: Path, options: Options, progress: Callable[[int], None] = _ignore
) -> Imported:
    """Read the files of BytePS at *paths* (files, or directories that hold some) into the new run directory *run*.

    Raises:
        TraceFormatError: There are none, or none holds an event, or one is a Chrome trace of ours, or has no end.
        DltraceError: *run* is there already.
        OSError: A file cannot be read, or the directory not be written.
    """
    found, renamed = find(paths)
    files = [_look(path) for path in found]
    workers, notes = worker_places([file.path for file in files if file.kind is Kind.COMM])
    profiles = {file.path: _told(file, options) for file in files if file.kind is Kind.SERVER}
    servers, doubts = server_places(profiles)
    local_size = 1 + max((place.local_rank for place in workers.values()), default=0)
    nodes = len({place.node_rank for place in workers.values()})
    job = hashlib.sha256("".join(sorted(file.digest for file in files)).encode()).hexdigest()
    bind = Bind(
        f"byteps-{job[:16]}",
        f"1.{job[16:32]}",
        options.name,
        world_size=max(nodes * local_size, 1),
        local_world_size=local_size,
        servers=max((told.servers for told in profiles.values()), default=0) or max(options.servers, len(profiles)),
    )
    with ImportedRun(run, bind) as imported:
        imported.notes += [*renamed, *notes, *doubts]
        reading = _Reading(imported, options, local_size, progress)
        for file in sorted(files, key=lambda file: (file.kind is not Kind.COMM, natural(file.path))):
            reading.read(file, workers.get(file.path) or servers.get(file.path))
        if not imported.spans:
            raise TraceFormatError("; ".join([*imported.notes, "there is nothing to import"]))
        if options.first is None and workers:
            imported.notes.append(_UNKNOWN_FIRST)
    return Imported(imported.spans, len(files), tuple(imported.notes))


_UNKNOWN_FIRST = (
    "no file says which occurrence of a tensor it begins with, so they count from 1, and the first is in step 0; "
    "if you know what BYTEPS_TRACE_START_STEP was (10 unless set), give it as --start-step"
)


# -- what each is, and whose ---------------------------------------------------------------------


def _look(path: Path) -> _File:
    with path.open("rb") as file:
        refuse_endless(path, file, room())
        piped = None if file.seekable() else held(path, file)
        source = file if piped is None else io.BytesIO(piped)
        head = source.read(HEAD)
        if instead := instead_of_byteps(head):
            raise TraceFormatError(f"{path} {instead}")
        kind = kind_of(path.name, head)
        source.seek(0)
        digest = hashlib.sha256()
        while chunk := source.read(1 << 20):
            digest.update(chunk)
    return _File(path, kind, digest.hexdigest(), piped)


def _told(file: _File, options: Options) -> Told:
    """Return which server wrote *file*: all have to be known before any is written."""
    return told_by(read_profile(_content(file), options.servers))


def _content(file: _File) -> bytes:
    return read_foreign(file.path) if file.piped is None else file.piped


# -- reading ------------------------------------------------------------------------------------


class _Reading:
    """Reads file after file into *imported*; workers come first, since servers do not know their tensors' names."""

    def __init__(
        self, imported: ImportedRun, options: Options, local_size: int, progress: Callable[[int], None]
    ) -> None:
        self.imported, self.options, self.local_size, self.progress = imported, options, local_size, progress
        self._tensors: dict[int, str] = {}
        self._vans: dict[str, Iterator[int]] = {}

    def read(self, file: _File, place: Place | None) -> None:
        """Write what *file* holds, and remember what it does not."""
        data = _content(file)
        if file.kind is Kind.COMM:
            rows, notes = self._worker(data)
        elif file.kind is Kind.SERVER:
            rows, notes = self._server(data)
        else:
            place, rows, notes = self._van(data)
        assert place is not None
        if not len(rows.rows) and not notes:
            notes = ("it holds no events",)
        self.imported.notes += [f"{file.path}: {note}" for note in notes]
        self.imported.add(place, rows.rows, rows.descriptors)
        self.progress(self.imported.spans)

    def _worker(self, data: bytes) -> tuple[comm_spans.Rows, tuple[str, ...]]:
        comm = read_comm(data)
        rows = comm_spans.rows_of(comm, self.options.first or 1)
        self._tensors.update((series.key >> 16, series.tensor) for series in comm.series if series.stage)
        return rows, (*comm.notes, *rows.notes)

    def _server(self, data: bytes) -> tuple[comm_spans.Rows, tuple[str, ...]]:
        profile = read_profile(data, self.options.servers)
        return server_spans.rows_of(profile, self._tensors, self.local_size), profile.notes

    def _van(self, data: bytes) -> tuple[Place, comm_spans.Rows, tuple[str, ...]]:
        profile = read_van(data)
        role = profile.messages[0].role if profile.messages else "server"
        rank = next(self._vans.setdefault(role, count()))
        return Place(role, rank, f"{role}-{rank}", part="van"), van_spans.van_rows_of(profile), profile.notes

"""Horovod's timelines into a run directory: all are of rank 0, one after the other where there are several."""

import gzip
import hashlib
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO

from otel_dltrace.export.foreign.foreign_files import at_most, pieces_of, refuse_endless
from otel_dltrace.export.foreign.imported import Imported, ImportedRun, Place
from otel_dltrace.formats.horovod_json import BOM, Buffer, Reader, count_ranks
from otel_dltrace.formats.horovod_spans import Builder
from otel_dltrace.formats.others import HEAD, instead_of_horovod
from otel_dltrace.model.errors import TraceFormatError
from otel_dltrace.model.identity import Bind

_AT_ONCE = 1 << 16
_HEAD = 512
_MOST = 64 << 30
"""Bytes of a timeline, unpacked; days of a large job, and some hours of reading."""
_GZIP = b"\x1f\x8b"
_ONE_SIDED = "only rank 0 of Horovod writes a timeline: of the others it tells at most when they were ready"


def import_horovod(paths: Sequence[Path], run: Path, name: str, progress: Callable[[int], None]) -> Imported:
    """Read the timelines at *paths* (files, or directories that hold some) into the new run directory *run*.

    Raises:
        TraceFormatError: There are none, or none holds an event, or one is another tracer's, has no end, or is a gzip
            of which nothing is left.
        DltraceError: *run* is there already.
        OSError: A file cannot be read, or the directory not be written.
    """
    torn: list[str] = []
    with ExitStack() as held:
        # Each is opened once, for a pipe can be read but once.
        files = [(path, held.enter_context(_mapped(path, torn))) for path in _find(paths)]
        with ImportedRun(run, _bind(files, name)) as imported:
            imported.notes += torn
            step = 0
            for number, (path, data) in enumerate(files):
                step = _read(path, data, imported, f"timeline {number}", step, progress)
            if not imported.spans:
                raise TraceFormatError("; ".join([*imported.notes, "there is nothing to import"]))
            imported.notes.append(_ONE_SIDED)
    return Imported(imported.spans, len(files), tuple(imported.notes))


def _bind(files: Sequence[tuple[Path, Buffer]], name: str) -> Bind:
    """Return whose run the timelines *files* are.

    Raises:
        TraceFormatError: One is another tracer's.
    """
    digest, ranks = hashlib.sha256(), 1
    for path, data in files:
        if instead := instead_of_horovod(data[:HEAD]):
            raise TraceFormatError(f"{path} {instead}")
        digest.update(hashlib.sha256(data).digest())
        ranks = max(ranks, count_ranks(data))
    job = digest.hexdigest()
    return Bind(f"horovod-{job[:16]}", f"1.{job[16:32]}", name, world_size=ranks)


def _read(
    path: Path, data: Buffer, imported: ImportedRun, part: str, step: int, progress: Callable[[int], None]
) -> int:
    """Write the spans of one timeline; return the step that the next one begins with."""
    place = Place("worker", 0, "rank-0", part=part)
    reader, builder = Reader(data), Builder(step)
    for count, event in enumerate(reader):
        builder.add(event)
        if count % _AT_ONCE == _AT_ONCE - 1:
            imported.add(place, builder.rows(), builder.descriptors)
            progress(imported.spans)
    rows = builder.finish()
    if not builder.is_empty:
        imported.add(place, rows, builder.descriptors)
    imported.notes += [f"{path}: {note}" for note in (*reader.notes, *builder.notes())]
    progress(imported.spans)
    return builder.step + (not builder.is_empty)


@contextmanager
def _mapped(path: Path, torn: list[str]) -> Iterator[Buffer]:
    """Give a file's bytes without reading them all; a file of none cannot be mapped."""
    with _unpacked(path, torn) as file:
        if not os.fstat(file.fileno()).st_size:
            yield b""
            return
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data


@contextmanager
def _unpacked(path: Path, torn: list[str]) -> Iterator[BinaryIO]:
    """Open the file, or one for the time being that has what is gzipped in it, or comes through it."""
    with path.open("rb") as file:
        refuse_endless(path, file, _MOST)
        is_packed = file.peek(len(_GZIP))[: len(_GZIP)] == _GZIP
        if not is_packed and file.seekable():
            yield file
            return
        with TemporaryFile() as whole:
            if is_packed:
                torn += [f"{path}: {damage}" for damage in _unpack(path, file, whole)]
            else:
                whole.writelines(at_most(path, _MOST, pieces_of(file)))
            whole.flush()
            yield whole


def _unpack(path: Path, packed: BinaryIO, whole: BinaryIO) -> Iterator[str]:
    """Write what is gzipped in *packed* to *whole*; yield what is missing if it is damaged, as where it was cut.

    Raises:
        TraceFormatError: Nothing can be unpacked, or more than there is room for.
    """
    file = gzip.GzipFile(fileobj=packed)
    try:
        # `read` drops what it has when the damage comes.
        whole.writelines(at_most(path, _MOST, iter(file.read1, b"")))
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        damage, size = f"its gzip is damaged ({error})", whole.tell()
        if not size:
            raise TraceFormatError(f"{path}: {damage}, and none of it can be unpacked") from None
        is_whole = isinstance(error, EOFError) or "Not a gzipped file" in str(error)  # with something else behind it
        doubt = "" if is_whole else ", perhaps not correctly"
        yield f"{damage}; {size:,} bytes could be unpacked{doubt}; anything after them is missing"


def _find(paths: Sequence[Path]) -> list[Path]:
    found: dict[Path, None] = {}
    for path in paths:
        inside = sorted(filter(_is_timeline, path.rglob("*.json*"))) if path.is_dir() else [path]
        if not inside:
            raise TraceFormatError(f"{path} holds no timeline of Horovod")
        # A pipe is no link, though `/dev/stdin` looks like one.
        found.update(dict.fromkeys(one.resolve() if one.is_file() else one.absolute() for one in inside))
    return list(found)


def _is_timeline(path: Path) -> bool:
    """Return whether *path* is one by its name, and begins as a timeline does or holds nothing yet."""
    if not path.name.endswith((".json", ".json.gz")) or not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(_HEAD)
    with suppress(zlib.error):
        head = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head) if head.startswith(_GZIP) else head
    head = head.removeprefix(BOM).strip()
    return not head or head == b"[" or (head.startswith(b"[") and b'"ph"' in head)

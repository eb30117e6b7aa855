"""ByteScheduler's timelines into a run directory, a process for each file."""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from otel_dltrace.export.foreign.foreign_files import read_foreign
from otel_dltrace.export.foreign.imported import Imported, ImportedRun, Place
from otel_dltrace.formats.bytescheduler import read_schedule, rows_of
from otel_dltrace.model.errors import TraceFormatError
from otel_dltrace.model.identity import Bind

_NO_DAY = "times in these files count from the start of its profiler; spans are placed after 1970-01-01 00:00"


def import_bytescheduler(paths: Sequence[Path], run: Path, name: str, progress: Callable[[int], None]) -> Imported:
    """Read the timelines at *paths* into the new run directory *run*; each counts as a rank, for none tells its own.

    Raises:
        TraceFormatError: None holds a bar, or one has no end.
        DltraceError: *run* is there already.
        OSError: A file cannot be read, or the directory not be written.
    """
    texts = [read_foreign(path) for path in paths]
    job = hashlib.sha256(b"".join(hashlib.sha256(text).digest() for text in texts)).hexdigest()
    bind = Bind(f"bytescheduler-{job[:16]}", f"1.{job[16:32]}", name, world_size=len(paths))
    with ImportedRun(run, bind) as imported:
        imported.notes.append(_NO_DAY)
        for rank, (path, text) in enumerate(zip(paths, texts, strict=True)):
            schedule = read_schedule(text)
            imported.notes += [f"{path}: {note}" for note in schedule.notes]
            rows = rows_of(schedule.bars)
            imported.add(Place("worker", rank, f"node-{rank}", node_rank=rank), rows.rows, rows.descriptors)
            progress(imported.spans)
        if not imported.spans:
            raise TraceFormatError("; ".join([*imported.notes[1:], "there is nothing to import"]))
    return Imported(imported.spans, len(paths), tuple(imported.notes))

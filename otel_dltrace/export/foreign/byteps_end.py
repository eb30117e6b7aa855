"""BytePS's files at the end of a job, as those expect them who switch tracing on by BytePS's variables."""

from pathlib import Path

from otel_dltrace.export.foreign.byteps_out import NO_PUSH_PULL, of_completions, write_byteps, write_byteps_server
from otel_dltrace.export.rundir.reader import read_host
from otel_dltrace.formats.comm_spans import BACKEND as BYTEPS
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.plan import parse_completions
from otel_dltrace.model.spans import Process, SpanBatch

BACKEND = "pushpull"
"""Of other push_pulls BytePS itself has written the files."""
_UNASKED = (
    "no server has recorded a push or pull; is there only one worker, which asks servers only with "
    "BYTEPS_FORCE_DISTRIBUTED=1, or no such key?"
)


def write_at_end(folder: Path, wanted: dict[str, str], completions: str) -> list[str]:
    """Write what *wanted* (a path by role) asks for of the processes in a host's *folder*.

    Return what is missing, a sentence each.

    Args:
        folder: The host's.
        wanted: Where to.
        completions: Which of each tensor are in the timelines, as `parse_completions` reads them.

    Raises:
        OSError: A file cannot be written, or is a pipe that nobody reads.
    """
    window = parse_completions(completions)
    parts: dict[Process, list[SpanBatch]] = {}
    is_told_by_byteps = False
    for batch in read_host(folder):
        if batch.process.bind is not None and wanted.get(batch.process.bind.role):
            is_told_by_byteps = is_told_by_byteps or bool(batch.lookup(lambda d: d.backend == BYTEPS, bool).any())
            ours = batch.take(batch.lookup(lambda d: d.backend == BACKEND, bool))
            if len(ours):
                parts.setdefault(batch.process, []).append(of_completions(ours, window))
    roles = {process.bind.role for process in parts if process.bind}
    notes = []
    if wanted.get("server") and "server" not in roles:
        notes.append(f"{wanted['server']} is not written: {_UNASKED}")
    if wanted.get("worker") and "worker" not in roles and not is_told_by_byteps:
        notes.append(f"{wanted['worker']} is not written: {NO_PUSH_PULL}")
    for role, write in (("worker", write_byteps), ("server", write_byteps_server)):
        spans = {process: part for process, part in parts.items() if process.bind and process.bind.role == role}
        try:
            if spans:
                write(spans, Path(wanted[role]), _unseen, waits=False)
        except RunNotFoundError as error:
            asked = f" ({completions} of each tensor are asked for)" if role == "worker" and completions else ""
            notes.append(f"{wanted[role]} is not written: {error}{asked}")
    return notes


def _unseen(_rows: int) -> None:
    """Nobody watches the progress."""

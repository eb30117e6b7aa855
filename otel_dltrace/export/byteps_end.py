"""BytePS's files at the end of a job, as those expect them who switch tracing on by BytePS's variables."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from otel_dltrace.export.byteps_out import write_byteps, write_byteps_server
from otel_dltrace.export.run_reader import read_host
from otel_dltrace.model.plan import Window
from otel_dltrace.model.spans import Column, SpanBatch, concatenate

BACKEND = "pushpull"
"""Of other push_pulls BytePS itself has written the files."""


def write_at_end(folder: Path, wanted: dict[str, str], window: Window) -> None:
    """Write what *wanted* (a path by role) asks for of the processes in a host's *folder*.

    BytePS counts how often each tensor was completed, from 1; the n-th time is held if *window* has n - 1.

    Raises:
        OSError: A file cannot be written.
    """
    parts: dict[int, list[SpanBatch]] = {}
    for batch in read_host(folder):
        if batch.process.bind is not None and wanted.get(batch.process.bind.role):
            parts.setdefault(batch.process.nonce, []).append(batch.take(_is_asked(batch, window)))
    whole = [one for part in parts.values() if (one := concatenate(part)) is not None and len(one)]
    workers, servers = (_of_role(whole, role) for role in ("worker", "server"))
    if workers:
        write_byteps(workers, Path(wanted["worker"]), _unseen)
    for batch in servers:
        write_byteps_server([batch], _profile_path(batch, Path(wanted["server"])), _unseen)


def _is_asked(batch: SpanBatch, window: Window) -> Column:
    times, which = np.unique(batch["seq"], return_inverse=True)
    is_in_window = np.array([nth - 1 in window for nth in times.tolist()], bool)[which]
    return batch.lookup(lambda d: d.backend == BACKEND, bool) & (is_in_window | batch.is_request)


def _of_role(batches: Sequence[SpanBatch], role: str) -> list[SpanBatch]:
    return [batch for batch in batches if batch.process.bind and batch.process.bind.role == role]


def _profile_path(batch: SpanBatch, path: Path) -> Path:
    """Return *path*, of several servers in a folder for each: BytePS lets them overwrite each other."""
    bind = batch.process.bind
    assert bind is not None
    return path if bind.servers < 2 else path.parent / str(bind.rank) / path.name


def _unseen(_rows: int) -> None:
    """Nobody watches the progress."""

"""A run as BytePS's own files: ``<local rank>/comm.json`` of each worker, ``server_profile.json`` of each server."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, count
from pathlib import Path

import numpy as np

from otel_dltrace.export.files import read_object, write_pieces
from otel_dltrace.export.foreign.byteps_ingest import author_of
from otel_dltrace.export.rundir.reader import host_folders
from otel_dltrace.export.rundir.several import begun
from otel_dltrace.formats.comm_json import Comm, joined, write_comm
from otel_dltrace.formats.comm_spans import comm_of, completions_in, unfinished_in
from otel_dltrace.formats.server_profile import BEGIN, Mark, write_profile
from otel_dltrace.formats.server_spans import marks_of
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.plan import FINEST, Window
from otel_dltrace.model.semconv import PHASE
from otel_dltrace.model.spans import Process, SpanBatch

COMM = "comm.json"
NO_PUSH_PULL = "the run has no push_pull, and a comm.json holds nothing else"
Progress = Callable[[int], None]
Spans = Mapping[Process, Iterable[SpanBatch]]
"""Those of each process, in pieces that are gone through more than once."""


def of_completions(batch: SpanBatch, window: Window) -> SpanBatch:
    """Return what of *batch* belongs to those completions of a tensor that *window* has, and what servers answered.

    BytePS counts how often each tensor was completed, from 1.
    """
    if window.everything:
        return batch
    times, which = np.unique(batch["seq"], return_inverse=True)
    is_in_window = np.array([nth in window for nth in times.tolist()], bool)[which]
    return batch.take(is_in_window | batch.is_request)


def completions_of(run: Path) -> str:
    """Return which completions BytePS's variables asked for when *run* was traced, "" for all."""
    asked = (read_object(folder / "drain.json") for folder in host_folders(run))
    return next(filter(None, (str(one.get("comm_steps", "")) for one in asked)), "")


def has_stages(spans: Spans) -> bool:
    """Return whether *spans* hold a stage of a partition."""
    return any(
        batch.lookup(lambda d: d.kind == PHASE and bool(d.queue_type), bool).any()
        for pieces in spans.values()
        for batch in pieces
    )


def _unheard(_: Path) -> None:
    """Nobody asks what was written."""


def write_byteps(
    spans: Spans,
    path: Path,
    progress: Progress,
    window: Window = Window(everything=True),  # noqa: B008  -- frozen
    *,
    wrote: Callable[[Path], None] = _unheard,
    waits: bool = True,
) -> int:
    """Write a ``comm.json`` for each worker below the directory *path*; return the number of events.

    It is ``<local rank>/comm.json``, and ``worker<node>/<local rank>/comm.json`` where the job has several
    machines: BytePS lets them overwrite each other.

    Args:
        spans: What the run holds.
        path: The directory.
        progress: Is told of rows that are done.
        window: Which completions of each tensor are written.
        wrote: Called with each file once it has its name.
        waits: Whether to wait for somebody who reads, where a file is a pipe.

    Raises:
        RunNotFoundError: There is no push_pull, or none of those completions.
    """
    workers = {process: pieces for process, pieces in spans.items() if _role(process) == "worker"}
    held = _whole({process: _comms_of(pieces, window) for process, pieces in workers.items()})
    events = [(process.bind, comm) for process, comm in held.items() if len(comm)]
    if not events:
        raise RunNotFoundError(_nothing_completed(workers))
    folders = _folders([bind for bind, _ in events])
    for (_, comm), folder in zip(events, folders, strict=True):
        target = path / folder / COMM
        write_pieces(target, write_comm(comm), waits=waits)
        wrote(target)
        progress(len(comm))
    return sum(len(comm) for _, comm in events)


def _comms_of(pieces: Iterable[SpanBatch], window: Window) -> list[Comm]:
    unfinished = np.concatenate([np.zeros(0, np.uint64), *map(unfinished_in, pieces)])
    return [comm_of(of_completions(batch, window), unfinished) for batch in pieces]


def _nothing_completed(workers: Spans) -> str:
    """Return why no worker's timeline can be written."""
    known = [completions_in(batch) for pieces in workers.values() for batch in pieces]
    nths = np.concatenate([np.zeros(0, np.uint32), *known])
    if not len(nths):
        return NO_PUSH_PULL
    return (
        f"none of the completions asked for is in this run; its tensors have {nths.min()} to {nths.max()}: "
        "give --completions"
    )


def comms_in(path: Path) -> Iterator[Path]:
    """Yield what `write_byteps` may have written below the directory *path*, by its place."""
    return chain(path.glob(f"[0-9]*/{COMM}"), path.glob(f"worker[0-9]*/[0-9]*/{COMM}"))


def write_byteps_server(spans: Spans, path: Path, progress: Progress, *, waits: bool = True) -> int:
    """Write the ``server_profile.json`` of a server to *path*; return the number of its pushes and pulls.

    Of several servers each has a folder, see `profile_path`; *waits* as in `write_byteps`.

    Raises:
        RunNotFoundError: There is no server, or none served anything.
    """
    written = 0

    def counted(marks: Iterable[Mark]) -> Iterator[Mark]:
        nonlocal written
        for mark in marks:
            written += mark.phase == BEGIN
            yield mark

    for process, pieces in spans.items():
        marks = begun(marks_of(pieces)) if _role(process) == "server" else None
        if marks is not None:
            before = written
            write_pieces(profile_path(process, path), write_profile(counted(marks)), waits=waits)
            progress(written - before)
    if not written:
        raise RunNotFoundError(_nothing_served(spans))
    return written


def _nothing_served(spans: Spans) -> str:
    """Return why no server's profile can be written."""
    none = "the run has no push or pull that a server answered"
    has_servers = any(process.bind and process.bind.servers for process in spans)
    return f"{none}; {FINEST}" if has_servers and not has_stages(spans) else none


def profile_path(process: Process, path: Path) -> Path:
    """Return *path*, of several servers in a folder for each beside it: BytePS lets them overwrite each other."""
    bind = process.bind
    assert bind is not None
    return path if bind.servers < 2 else path.parent / str(bind.rank) / path.name


def profile_paths(spans: Spans, path: Path) -> list[Path]:
    """Return where `write_byteps_server` wrote the profiles of *spans*."""
    servers = [
        process
        for process, pieces in spans.items()
        if _role(process) == "server" and any(batch.is_request.any() for batch in pieces)
    ]
    return sorted({profile_path(process, path) for process in servers})


def _role(process: Process) -> str:
    return process.bind.role if process.bind else "worker"


def _whole(held: dict[Process, list[Comm]]) -> dict[Process, Comm]:
    """Return *held* with what BytePS itself wrote of a process put to what we saw of it."""
    ours = {author_of(process).nonce: process for process in held}
    parts: dict[Process, list[Comm]] = {}
    for process, comms in held.items():
        parts.setdefault(ours.get(process.nonce, process), []).extend(comms)
    return {process: joined(comms) for process, comms in parts.items() if comms}


def _folders(binds: Sequence[Bind | None]) -> list[str]:
    """Return a folder for each process, all different: a forked child has its parent's rank."""
    known = [bind for bind in binds if bind]
    several = len({bind.node_rank for bind in known}) > 1 or any(
        bind.world_size > bind.local_world_size for bind in known
    )
    taken: list[str] = []
    for bind in binds:
        node, local = (bind.node_rank, bind.local_rank) if bind else (0, 0)
        base = f"worker{node}/{local}" if several else str(local)
        taken.append(next(name for name in _names(base) if name not in taken))
    return taken


def _names(base: str) -> Iterator[str]:
    yield base
    for number in count(2):
        yield f"{base}-{number}"

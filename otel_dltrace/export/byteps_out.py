"""A run as BytePS's own files: ``<local rank>/comm.json`` of each worker, ``server_profile.json`` of each server."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from otel_dltrace.export.byteps_ingest import author_of
from otel_dltrace.export.files import open_whole, read_json
from otel_dltrace.export.run_reader import host_folders
from otel_dltrace.formats.comm_json import Comm, joined, write_comm
from otel_dltrace.formats.comm_spans import comm_of
from otel_dltrace.formats.server_profile import write_profile
from otel_dltrace.formats.server_spans import profile_of
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.plan import FINEST, Window
from otel_dltrace.model.semconv import PHASE
from otel_dltrace.model.spans import Process, SpanBatch

COMM = "comm.json"
Progress = Callable[[int], None]


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
    asked = (read_json(folder / "drain.json") or {} for folder in host_folders(run))
    return next(filter(None, (str(one.get("comm_steps", "")) for one in asked)), "")


def has_stages(batch: SpanBatch) -> bool:
    """Return whether *batch* holds a stage of a partition."""
    return bool(batch.lookup(lambda d: d.kind == PHASE and bool(d.queue_type), bool).any())


def write_byteps(
    batches: Iterable[SpanBatch],
    path: Path,
    progress: Progress,
    window: Window = Window(everything=True),  # noqa: B008  -- frozen
) -> int:
    """Write a ``comm.json`` for each worker below the directory *path*; return the number of events.

    It is ``<local rank>/comm.json``, and ``worker<node>/<local rank>/comm.json`` where the job has several
    machines: BytePS lets them overwrite each other.

    Args:
        batches: One per process.
        path: The directory.
        progress: Is told of rows that are done.
        window: Which completions of each tensor are written.

    Raises:
        RunNotFoundError: There is no push_pull.
    """
    workers = (of_completions(batch, window) for batch in batches if _role(batch) == "worker")
    held = _whole({batch.process: comm_of(batch) for batch in workers})
    events = [(process.bind, comm) for process, comm in held.items() if len(comm)]
    if not events:
        raise RunNotFoundError("no push_pull is in there, and a comm.json holds nothing else")
    folders = _folders([bind for bind, _ in events])
    for (_, comm), folder in zip(events, folders, strict=True):
        _write(path / folder / COMM, write_comm(comm))
        progress(len(comm))
    return sum(len(comm) for _, comm in events)


def write_byteps_server(batches: Iterable[SpanBatch], path: Path, progress: Progress) -> int:
    """Write the ``server_profile.json`` of a server to *path*; return the number of its pushes and pulls.

    Of several servers each has a folder, see `profile_path`.

    Raises:
        RunNotFoundError: There is no server, or none served anything.
    """
    held = [(profile_path(batch, path), profile_of(batch)) for batch in batches if _role(batch) == "server"]
    profiles = [(place, profile) for place, profile in held if profile.requests]
    if not profiles:
        raise RunNotFoundError(f"no push or pull that a server answered is in there; {FINEST}")
    for place, profile in profiles:
        _write(place, write_profile(profile))
        progress(len(profile.requests))
    return sum(len(profile.requests) for _, profile in profiles)


def profile_path(batch: SpanBatch, path: Path) -> Path:
    """Return *path*, of several servers in a folder for each beside it: BytePS lets them overwrite each other."""
    bind = batch.process.bind
    assert bind is not None
    return path if bind.servers < 2 else path.parent / str(bind.rank) / path.name


def profile_paths(batches: Iterable[SpanBatch], path: Path) -> list[Path]:
    """Return where `write_byteps_server` wrote the profiles of *batches*."""
    paths = {profile_path(batch, path) for batch in batches if _role(batch) == "server" and batch.is_request.any()}
    return sorted(paths)


def _role(batch: SpanBatch) -> str:
    return batch.process.bind.role if batch.process.bind else "worker"


def _whole(held: dict[Process, Comm]) -> dict[Process, Comm]:
    """Return *held* with what BytePS itself wrote of a process put to what we saw of it."""
    ours = {author_of(process).nonce: process for process in held}
    parts: dict[Process, list[Comm]] = {}
    for process, comm in held.items():
        parts.setdefault(ours.get(process.nonce, process), []).append(comm)
    return {process: joined(comms) for process, comms in parts.items()}


def _folders(binds: Sequence[Bind | None]) -> list[str]:
    """Return a folder for each process, all different: a forked child has its parent's rank."""
    known = [bind for bind in binds if bind]
    several = len({bind.node_rank for bind in known}) > 1 or any(
        bind.world_size > bind.local_world_size for bind in known
    )
    taken: list[str] = []
    for bind in binds:
        local = str(bind.local_rank if bind else 0)
        base = f"worker{bind.node_rank if bind else 0}/{local}" if several else local
        taken.append(next(name for name in _names(base) if name not in taken))
    return taken


def _names(base: str) -> Iterator[str]:
    yield base
    number = 1
    while True:
        number += 1
        yield f"{base}-{number}"


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_whole(path) as out:
        for piece in pieces:
            out.write(piece)

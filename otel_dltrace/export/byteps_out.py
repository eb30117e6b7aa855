"""A run as BytePS's own files: ``<local rank>/comm.json`` of each worker, ``server_profile.json`` of each server."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from otel_dltrace.export.byteps_ingest import author_of
from otel_dltrace.export.files import open_whole
from otel_dltrace.formats.comm_json import Comm, joined, write_comm
from otel_dltrace.formats.comm_spans import comm_of
from otel_dltrace.formats.server_profile import write_profile
from otel_dltrace.formats.server_spans import profile_of
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.spans import Process, SpanBatch

COMM, SERVER = "comm.json", "server_profile.json"
Progress = Callable[[int], None]


def write_byteps(batches: Iterable[SpanBatch], path: Path, progress: Progress) -> int:
    """Write a ``comm.json`` for each worker below the directory *path*; return the number of events.

    It is ``<local rank>/comm.json``, and ``worker<node>/<local rank>/comm.json`` where the job has several
    machines: BytePS lets them overwrite each other.

    Raises:
        RunNotFoundError: There is no push_pull.
    """
    held = _whole({batch.process: comm_of(batch) for batch in batches if _role(batch) == "worker"})
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

    Of several servers each has ``<server>/server_profile.json`` below the directory *path*.

    Raises:
        RunNotFoundError: There is no server, or none served anything.
    """
    held = [profile_of(batch) for batch in batches if _role(batch) == "server"]
    profiles = sorted((profile for profile in held if profile.requests), key=lambda profile: profile.server)
    if not profiles:
        raise RunNotFoundError("no push or pull that a server answered is in there")
    for profile in profiles:
        place = path if len(profiles) == 1 else path / str(profile.server) / SERVER
        _write(place, write_profile(profile))
        progress(len(profile.requests))
    return sum(len(profile.requests) for profile in profiles)


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

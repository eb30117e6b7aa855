"""A run directory made of foreign files: whole or absent, and the same ids for the same files."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from otel_dltrace.export.rundir.host_folder import host_folder_name, remove_tree
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.errors import DltraceError
from otel_dltrace.model.identity import Bind, h64
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import Process, fill_ids
from otel_dltrace.model.time import Anchor

_AT_ONCE = 1 << 17
_MICROSECOND = 1000


class Place(NamedTuple):
    """Whose rows they are. What has one *host* has one clock; *part* tells apart several files of one process."""

    role: str
    rank: int
    host: str
    local_rank: int = 0
    node_rank: int = 0
    part: str = ""


class Imported(NamedTuple):
    """What was written: spans, from how many files, and what is to be known about them, a sentence each."""

    spans: int
    files: int
    notes: tuple[str, ...]


class ImportedRun:
    """Takes rows, process by process, into a new run directory; use it in a ``with``.

    Args:
        path: The run directory, which is not there yet.
        bind: What is true of all processes; job and generation come from the files' content.

    Raises:
        DltraceError: There is something at *path*.
    """

    def __init__(self, path: Path, bind: Bind) -> None:
        if path.exists():
            raise DltraceError(f"{path} already exists; name a new directory, an import never adds to an existing one")
        self.path, self.bind = path, bind
        self.anchor = Anchor(0, 0, _MICROSECOND)  # the files' clocks are read in us
        self.spans = 0
        self.notes: list[str] = []
        self._root = path.with_name(f".{path.name}.{os.getpid()}")
        self._writers: dict[str, RunWriter] = {}
        self._written: dict[str, int] = {}

    def add(self, place: Place, rows: Column, descriptors: Sequence[Descriptor]) -> None:
        """Write the *rows* of one process; their times are Unix ns, their ids are filled in, in place."""
        process = self._process(place)
        fill_ids(rows, descriptors, process)
        writer = self._writer(process)
        for at in range(0, max(len(rows), 1), _AT_ONCE):
            writer.append(process.nonce, rows[at : at + _AT_ONCE], descriptors, [("", "")])
        writer.know(process)
        self.spans += len(rows)
        self._written[place.host] = self._written.get(place.host, 0) + len(rows)

    def _process(self, place: Place) -> Process:
        who = replace(
            self.bind, role=place.role, rank=place.rank, local_rank=place.local_rank, node_rank=place.node_rank
        )
        nonce = h64("import", who.job, place.role, place.rank, place.part)
        boot = f"{h64('boot', who.job, place.host):016x}"
        return Process(nonce, who, place.host, boot, anchor=self.anchor)

    def _writer(self, process: Process) -> RunWriter:
        writer = self._writers.get(process.host)
        if writer is None:
            folder = host_folder_name(process.host, process.boot_id)
            writer = self._writers[process.host] = RunWriter(self._root, folder)
            writer.open()
            writer.name_run(self.bind)
        return writer

    def __enter__(self) -> "ImportedRun":
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the directory its name, or remove what is there of it.

        Raises:
            DltraceError: It cannot be written; it is told by its own name, not by that which it has until it is whole.
        """
        try:
            self._end(is_whole=error is None)
        except OSError as late:
            raise self._told(late) from None
        if isinstance(error, OSError):
            raise self._told(error) from None

    def _told(self, error: OSError) -> Exception:
        is_ours = str(error.filename).startswith(str(self._root))
        return DltraceError(f"{self.path} cannot be written: {error.strerror}") if is_ours else error

    def _end(self, *, is_whole: bool) -> None:
        for host, writer in self._writers.items():
            writer.close_segment()
            writer.write_summary({"spans": self._written.get(host, 0), "notes": self.notes}, ended=True)
            writer.close()
        if not self._root.exists():
            return
        if is_whole:
            self._root.replace(self.path)
        else:
            remove_tree(self._root)

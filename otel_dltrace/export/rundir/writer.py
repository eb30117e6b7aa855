"""The run directory: one host's part of one generation, written so that a kill loses nothing (contract 7)."""

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa

from otel_dltrace.export.files import leave_room, write_json, write_json_again
from otel_dltrace.export.rundir import columns
from otel_dltrace.export.rundir.arrow_files import read_stream
from otel_dltrace.export.rundir.delivered import with_earlier
from otel_dltrace.export.rundir.drain_json import read_drain
from otel_dltrace.export.rundir.host_folder import HostFolder
from otel_dltrace.export.rundir.span_files import NAMES, PARQUETS, SEGMENTS, lasting_files, newest_segment
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import Process

SEGMENT_BYTES = 64 << 20


class RunWriter:
    """Appends spans of this host's processes to the run directory of one generation.

    Args:
        root: The run directory; made at the first write.
        host: This host's folder in it.
        begun: The one of this host in which an earlier drain's work is to go on.

    Attributes:
        removed: How many spans were in the folder when somebody removed it.
        so_far: How many spans are of rings that no figure counts yet.
        span_budget: Spans per trace, by which ranks share a trace; None: not known.
        comm_steps: Which completions of a tensor BytePS's variables ask for, as ``10-20``; "" if for none or all.
    """

    def __init__(self, root: Path, host: str, begun: Path | None = None) -> None:
        self.root = root
        self._place = HostFolder(root / "hosts" / host, begun)
        self._segment: pa.ipc.RecordBatchStreamWriter | None = None
        self._descriptors: pa.ipc.RecordBatchStreamWriter | None = None
        self._sink: pa.NativeFile | None = None
        self._descriptor_file: pa.NativeFile | None = None
        self.number = 0
        self.rows = 0
        self.closed_segments = 0
        self._known: dict[int, int] = {}
        self.processes: dict[int, dict[str, Any]] = {}
        self.summary: dict[str, Any] = {}
        self.comm_steps = ""
        self.span_budget: int | None = None
        self.so_far = 0
        self._inherited: dict[str, Any] | None = None
        self._run: dict[str, Any] = {}
        self._kept = self.removed = 0

    def open(self) -> None:
        """Make the folders, anew if they are gone; take over what an earlier drain of this host left there."""
        if self.is_gone:
            self._leave_folder()
        self._place.take()
        if self._inherited is None:
            self._take_over(read_drain(self.folder))
        # A segment that has the name of one that a Parquet replaces would be taken for that.
        written = (*self.folder.glob(SEGMENTS), *self.folder.glob(PARQUETS))
        self.number = max(self.number, 1 + max(map(newest_segment, written), default=0))
        self._open_descriptors()
        if self._run:
            self._write_run()
            self.write_summary(self.summary)

    def _take_over(self, before: dict[str, Any]) -> None:
        self.processes = {int(p["nonce"], 16): p for p in before.get("processes", [])}
        self._inherited = summary = before.get("summary", {})
        self._kept = summary.get("spans", 0) - summary.get("removed", 0)
        self.comm_steps = str(before.get("comm_steps", ""))
        self.span_budget = before.get("span_budget", self.span_budget)
        self.number = int(before.get("next_segment", 1))

    def _open_descriptors(self) -> None:
        path = self.folder / NAMES
        old = read_stream(path) if path.exists() else None
        # A stream cannot be continued after a torn end: the good part is copied, then the name is taken over.
        partial = path.with_name(f".{path.name}.{os.getpid()}")
        file = pa.OSFile(str(partial), "wb")
        try:
            stream = pa.ipc.new_stream(file, columns.DESCRIPTORS)
            if old is not None:
                stream.write_table(old)
                file.flush()
            partial.replace(path)
        except OSError:
            with suppress(OSError):
                file.close()
            partial.unlink(missing_ok=True)
            raise
        self._descriptor_file, self._descriptors = file, stream
        if old is not None:
            ids = zip(old.column("process").to_pylist(), old.column("id").to_pylist(), strict=True)
            for process, number in ids:
                self._known[process] = max(self._known.get(process, 0), number + 1)

    @property
    def folder(self) -> Path:
        """This host's folder in the run directory."""
        return self._place.path

    @property
    def is_gone(self) -> bool:
        """Whether somebody has removed the folder that was this writer's, or moved it away."""
        return self._place.is_gone

    def _leave_folder(self) -> None:
        """Let go of a folder that is gone, and count what was in it."""
        if self.is_open:
            self._give_up()
        self._place.leave()
        self._kept, self.removed = 0, self.removed + self._kept

    @property
    def is_open(self) -> bool:
        """Whether the folder has been made."""
        return self._descriptors is not None

    def has(self, nonce: int) -> bool:
        """Return whether the folder may hold spans of the process *nonce*: what describes them is written first."""
        return nonce in self._known

    def name_run(self, bind: Bind) -> None:
        """Write ``run.json`` unless another host did."""
        self._run = {
            "schema": columns.SCHEMA_VERSION,
            "job": bind.job,
            "job_name": bind.job_name,
            "generation": bind.generation,
            "world": bind.world,
            "world_size": bind.world_size,
        }
        self._write_run()

    @property
    def job(self) -> str:
        """The job of the run, "" before it is named."""
        return str(self._run.get("job", ""))

    def _write_run(self) -> None:
        path = self.root / "run.json"
        if not path.exists():
            write_json(path, self._run)

    def know(self, process: Process) -> None:
        """Remember who *process* is; written with the next summary."""
        bind = asdict(process.bind) if process.bind else None
        self.processes[process.nonce] = {
            "nonce": f"{process.nonce:016x}",
            "bind": bind,
            "host": process.host,
            "boot_id": process.boot_id,
            "pid": process.pid,
            "anchor": asdict(process.anchor),
            "resource": dict(process.resource),
            "counted": self.has_counted(process.nonce),
        }
        self.write_summary(self.summary)

    def has_counted(self, nonce: int) -> bool:
        """Return whether the figures are also of the ring of the process *nonce*: one may be left by a killed drain."""
        return self.processes.get(nonce, {}).get("counted") is True

    def count(self, nonce: int) -> None:
        """Know that the next summary has the figures of the ring of the process *nonce*."""
        self.processes[nonce]["counted"] = True

    def append(
        self, nonce: int, rows: Column, descriptors: Sequence[Descriptor], errors: Sequence[tuple[str, str]]
    ) -> None:
        """Write *rows* of the process *nonce*, and its new descriptors, through to the file system.

        Raises:
            OSError: There is no room, or the folder cannot be written; nothing of *rows* counts as written.
        """
        if self.is_gone or not self.is_open:
            self.open()
        try:
            self._append(nonce, rows, descriptors, errors)
        except OSError:
            self._give_up()
            raise

    def _append(
        self, nonce: int, rows: Column, descriptors: Sequence[Descriptor], errors: Sequence[tuple[str, str]]
    ) -> None:
        assert self._descriptors is not None
        assert self._descriptor_file is not None
        known = self._known.get(nonce, 0)
        if known < len(descriptors):
            self._descriptors.write_batch(columns.descriptors_to_arrow(descriptors[known:], known, nonce))
            self._descriptor_file.flush()
            self._known[nonce] = len(descriptors)
        if not len(rows):
            return
        if self._segment is None:
            self._open_segment()
        assert self._segment is not None
        assert self._sink is not None
        self._segment.write_batch(columns.to_arrow(rows, errors, nonce))
        self._sink.flush()
        self.rows += len(rows)
        self._kept += len(rows)
        if self._sink.tell() > SEGMENT_BYTES:
            self.close_segment()

    def _open_segment(self) -> None:
        path = self.folder / f"spans-{self.number:05d}.arrows"
        self._sink = pa.OSFile(str(path), "wb")
        self._segment = pa.ipc.new_stream(self._sink, columns.SPANS)

    def close_segment(self) -> None:
        """End the current segment; the next rows start another.

        Its rows are written. Without room its stream's end is missing, which nobody needs.
        """
        if self._segment is not None and self._sink is not None:
            for file in (self._segment, self._sink):
                with suppress(OSError):
                    file.close()
            self._segment = self._sink = None
            self.number += 1
            self.rows = 0
            self.closed_segments += 1

    def _give_up(self) -> None:
        """Close files that may end in half a batch: what comes later would be hidden behind it."""
        for file in (self._segment, self._sink, self._descriptors, self._descriptor_file):
            if file is not None:
                with suppress(OSError):
                    file.close()
        if self._segment is not None:
            self.number += 1
        self._segment = self._sink = self._descriptors = None
        self._known = {}
        self.rows = 0

    def write_summary(self, summary: dict[str, Any], ended: bool = False) -> None:
        """Write ``drain.json``: who wrote here, and what became of their spans. A folder that is gone stays so."""
        self.summary = summary
        if self.is_open and not self.is_gone:
            figures = {**summary, "removed": self.removed} if self.removed else summary
            value = {
                "schema": columns.SCHEMA_VERSION,
                "ended": ended,
                "next_segment": self.number,
                "processes": list(self.processes.values()),
                "summary": with_earlier(self._inherited or {}, figures),
            }
            if ended:
                value["files"] = lasting_files(self.folder)
            if self.so_far:
                value["so_far"] = self.so_far
            if self.span_budget is not None:
                value["span_budget"] = self.span_budget
            if self.comm_steps:
                value["comm_steps"] = self.comm_steps
            write_json_again(self.folder / "drain.json", value)

    def close(self) -> None:
        """Close all files; without room the ends of their streams are missing, which nobody needs."""
        if self.is_open:
            self._give_up()
        if self._inherited is not None and not self.is_gone:
            with suppress(OSError):  # of a file system that is closed by now
                leave_room(self.folder / "drain.json")
        self._place.leave()

"""Write spans as a Chrome trace, which Perfetto and chrome://tracing show: a process per rank, lanes below."""

import gzip
import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import Any

from otel_dltrace.export.chrome_events import flow_lines, lane_metadata, process_metadata, span_chunks
from otel_dltrace.export.chrome_layout import Lanes, lay_out
from otel_dltrace.model.spans import Column, Process, SpanBatch

MARGIN = 86_400_000_000_000
"""The first batch begins a day after the trace's zero: another rank may be earlier, and Perfetto drops what is < 0."""
_COMPRESSION = 4
_SPECIAL_PIDS = 1_000_001
_ROLE_ORDER = {"worker": 0, "server": 1_000_000, "scheduler": 2_000_000}
_UNBOUND_ORDER = 3_000_000


def write_chrome(batches: Iterable[SpanBatch], path: Path, progress: Callable[[int], None] | None = None) -> int:
    """Write *batches* to *path* as Chrome trace JSON, gzipped if it ends in ``.gz``; return the number of events.

    Batches are drawn as they come, each forgotten before the next is asked for; those of one process
    come in the order of their steps. The file appears when it is complete, or not at all.

    Times are us, exact to the ns, after a base that ``otherData.base_unix_ns`` names: Unix time in us
    would leave a double, which is what viewers compute in, only a quarter of a us.

    Args:
        batches: The spans, each batch of one process.
        path: The file; its folder exists.
        progress: Called with the number of rows done since its last call.
    """
    with _whole_file(path) as out:
        trace = _Trace(out)
        for batch in batches:
            trace.add(batch, progress or _ignore)
        trace.close()
    return trace.events


def _ignore(_: int) -> None:
    """Show no progress."""


@contextmanager
def _whole_file(path: Path) -> Iterator[BufferedIOBase]:
    """Open *path* under another name, and give it its own once the block is done; no trace is left of a failure."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with partial.open("wb") as raw:
            if path.suffix == ".gz":
                # Without name and time the same spans give the same file.
                with gzip.GzipFile("", "wb", _COMPRESSION, raw, mtime=0) as packed:
                    yield packed
            else:
                yield raw
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@dataclass
class _Drawn:
    """One process of the trace."""

    pid: int
    name: str = ""
    lanes: Lanes = field(default_factory=Lanes)
    uncertainty: int = 0
    os_pid: int = 0
    spans: int = 0

    def summary(self) -> dict[str, Any]:
        return {
            "pid": self.pid,
            "name": self.name,
            "process.pid": self.os_pid,
            "clock_uncertainty_ns": self.uncertainty,
            "spans": self.spans,
        }


class _Trace:
    """The file being written, and the little that must be remembered of what was drawn."""

    def __init__(self, out: BufferedIOBase) -> None:
        self.out = out
        self.events = 0
        self._base: int | None = None
        self._processes: dict[int, _Drawn] = {}
        self._job: dict[str, Any] = {}
        self._flows: list[Column] = []
        # "ns", since chrome://tracing nests slices to the us under "ms": what is shorter lands in its neighbour.
        self.out.write(b'{"displayTimeUnit":"ns","traceEvents":[')

    def add(self, batch: SpanBatch, progress: Callable[[int], None]) -> None:
        """Write the events of one batch."""
        if not len(batch):
            return
        if self._base is None:
            self._base = int(batch["start"].min()) + batch.wall - MARGIN
        drawn = self._process(batch.process)
        before = drawn.lanes.counts()
        layout = lay_out(batch, drawn.lanes, self._base)
        self._write(list(lane_metadata(drawn.pid, before, drawn.lanes.counts())))
        for chunk in span_chunks(batch, layout, drawn.pid):
            self._write(chunk.lines)
            self._flows.append(chunk.flows)
            drawn.spans += len(chunk.lines)
            progress(len(chunk.lines))

    def close(self) -> None:
        """Write what needs all ranks, and what describes the whole."""
        for lines in flow_lines(self._flows):
            self._write(lines)
        about = {
            "writer": "otel_dltrace",
            **self._job,
            "base_unix_ns": str(self._base or 0),
            "processes": [drawn.summary() for drawn in self._processes.values()],
        }
        self.out.write(b'\n],"otherData":' + json.dumps(about).encode() + b"}\n")

    def _write(self, lines: list[str]) -> None:
        if lines:
            self.out.write(((",\n" if self.events else "\n") + ",\n".join(lines)).encode())
            self.events += len(lines)

    def _process(self, process: Process) -> _Drawn:
        """Return *process* as it is drawn; name it when it is new, and again when its rank became known."""
        drawn = self._processes.get(process.nonce)
        if drawn is None:
            drawn = self._processes[process.nonce] = _Drawn(self._free_pid(process))
        name, label, order = _names(process)
        if name != drawn.name:
            drawn.name, drawn.os_pid = name, process.pid
            self._write(list(process_metadata(drawn.pid, name, label, order)))
        drawn.uncertainty = max(drawn.uncertainty, process.anchor.uncertainty)
        if process.bind is not None and not self._job:
            bind = process.bind
            self._job = {"job": bind.job, "job_name": bind.job_name, "generation": bind.generation}
        return drawn

    def _free_pid(self, process: Process) -> int:
        """Return rank + 1 for a worker, as pid 0 is the kernel's in Perfetto; else a number no rank has."""
        used = {drawn.pid for drawn in self._processes.values()}
        bind = process.bind
        if bind is not None and bind.role == "worker" and bind.rank + 1 not in used:
            return bind.rank + 1
        pid = _SPECIAL_PIDS
        while pid in used:
            pid += 1
        return pid


def _names(process: Process) -> tuple[str, str, int]:
    """Return a process's name, the label beside it, and its place among the others."""
    bind = process.bind
    if bind is None:
        return f"pid {process.pid} ({process.host})", "rank not known", _UNBOUND_ORDER
    who = "rank" if bind.role == "worker" else bind.role
    world = "" if bind.world == "default" else f"{bind.world} "
    order = _ROLE_ORDER.get(bind.role, _UNBOUND_ORDER) + bind.rank
    return f"{world}{who} {bind.rank} ({process.host})", f"generation {bind.generation_number}", order

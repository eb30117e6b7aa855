"""A run read from disk as OTLP sends it: rank steps under their roots, each root once, and every step in full."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from otel_dltrace.export.outgoing.departing import hang_under_roots
from otel_dltrace.export.outgoing.roots import EXTENT, ROOT, root_rows
from otel_dltrace.export.rundir.reader import read_batches
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.identity import NO_STEP, rank_step_id
from otel_dltrace.model.plan import Window
from otel_dltrace.model.semconv import STEP
from otel_dltrace.model.spans import Process, SpanBatch, empty_rows, stack_rows

_SHARD = 0  # a file needs no budget, so a step is one trace
_ROOTS_AT_ONCE = 10_000
_Key = tuple[int, str, str, str]


def as_sent(
    runs: Sequence[Path], steps: Window | None = None, ranks: Collection[int] | None = None
) -> Iterator[SpanBatch]:
    """Yield the spans of *runs*, file by file; what is held meanwhile is one file, and some bytes for each step.

    A root lasts as long as the ranks on the host of rank 0 take together, in the name of rank 0. It
    comes at the end, and only if rank 0 is among *ranks*.

    Args:
        runs: Run directories.
        steps: Only these; None for all.
        ranks: Only these; None for all.

    Raises:
        RunNotFoundError: One is no run directory, or nothing in there is asked for.
    """
    outline = _Outline()
    for batch in _bound_batches(runs):
        outline.add(batch)
    outline.check_ranks(ranks)
    found = False
    for batch in _bound_batches(runs):
        if ranks is None or batch.rank in ranks:
            part = batch if steps is None else batch.in_steps(steps)
            outline.hang(part)
            # Back ends subtract without sign: where an imported file's clock was set back they would see centuries.
            part.rows["end"] = np.maximum(part["start"], part["end"])
            found = found or len(part) > 0
            yield replace(part, above=outline.above.get(_key(part.process), empty_rows()))
    if not found:
        raise RunNotFoundError(f"none of the steps asked for is in this run; {outline.steps_there()}")
    if ranks is None or 0 in ranks:
        for roots in outline.roots():
            yield roots if steps is None else roots.in_steps(steps)


def _bound_batches(runs: Sequence[Path]) -> Iterator[SpanBatch]:
    """Yield what belongs to a job; who is not bound has no trace ids, and nothing of it is ever sent."""
    for run in runs:
        yield from (batch for batch in read_batches(run) if batch.process.bind is not None)


@dataclass
class _Outline:
    """What a first reading tells: when each process was in which step.

    Attributes:
        extents: For each process (see `_key`), the extents of its steps, file by file.
        above: For each process the phases outside any step that began in one file and ended in a later one.
        processes: Who they are.
    """

    extents: dict[_Key, list[Column]] = field(default_factory=dict)
    processes: dict[_Key, Process] = field(default_factory=dict)
    above: dict[_Key, Column] = field(default_factory=dict)
    _ends: dict[_Key, int] = field(default_factory=dict)

    def add(self, batch: SpanBatch) -> None:
        """Take in one file's spans of one process."""
        self._know(batch.process, _extents(batch))
        self._reach_back(batch)

    def _know(self, process: Process, extents: Column) -> None:
        self.processes[_key(process)] = process
        self.extents.setdefault(_key(process), []).append(extents)

    def _reach_back(self, batch: SpanBatch) -> None:
        key = _key(batch.process)
        before, above = self._ends.get(key, 0), self.above.get(key, empty_rows())
        reaches = (batch["step"] == NO_STEP) & (batch["start"] < before) & batch.is_block
        self.above[key] = stack_rows([above, batch.rows.compress(reaches)])
        self._ends[key] = max(before, int(batch["end"].max(initial=0)))

    def check_ranks(self, ranks: Collection[int] | None) -> None:
        """Raise unless every one of *ranks* is there."""
        there = [process.bind.rank for process in self.processes.values() if process.bind is not None]
        if not there:
            raise RunNotFoundError("the run has no span that belongs to a job yet")
        for rank in ranks or ():
            if rank not in there:
                raise RunNotFoundError(f"rank {rank} is not in this run; it has ranks {min(there)} to {max(there)}")

    def steps_there(self) -> str:
        """Return in words which steps there are."""
        steps = np.concatenate([extents["step"] for parts in self.extents.values() for extents in parts])
        return f"it has steps {steps.min()} to {steps.max()}" if len(steps) else "it has no steps"

    def hang(self, batch: SpanBatch) -> None:
        """Put rank steps under their roots, in place; what has no rank step to hang under hangs under nothing."""
        bind = batch.process.bind
        assert bind is not None
        stepless = np.setdiff1d(batch["step"], np.append(self._steps(batch), np.uint32(NO_STEP)))
        gone = np.array([rank_step_id(bind, step) for step in stepless.tolist()], np.uint64)
        batch.rows["parent_id"][np.isin(batch["parent_id"], gone)] = 0
        hang_under_roots(batch, _SHARD)

    def _steps(self, batch: SpanBatch) -> Column:
        """Return the steps of the process, with those that a job which goes on has had since the first reading."""
        there = _extents(batch)
        known = np.concatenate([there[:0], *self.extents.get(_key(batch.process), ())])["step"]
        new = there[~np.isin(there["step"], known)]
        if len(new):
            self._know(batch.process, new)
        steps: Column = np.append(known, new["step"])
        return steps

    def roots(self) -> Iterator[SpanBatch]:
        """Yield the roots of each world that has a worker of rank 0, or but one worker, some at a time."""
        owners = {_world(p): (p, p.bind) for p in self.processes.values() if p.bind and p.owns_roots}
        for world, (owner, bind) in owners.items():
            together = [
                extents
                for key, process in self.processes.items()
                if (_world(process), _host(process), _role(process)) == (world, _host(owner), "worker")
                for extents in self.extents[key]
            ]
            spans = _joined(np.concatenate(together))
            for at in range(0, len(spans), _ROOTS_AT_ONCE):
                yield SpanBatch(root_rows(bind, spans[at : at + _ROOTS_AT_ONCE], _SHARD), ROOT, owner)


def _key(process: Process) -> _Key:
    """Return what names a process: one that begins another generation goes on with its nonce."""
    return process.nonce, *_world(process)


def _world(process: Process) -> tuple[str, str, str]:
    """Return job, generation and world: who has those in common shares steps."""
    bind = process.bind
    assert bind is not None
    return bind.job, bind.generation, bind.world


def _role(process: Process) -> str:
    assert process.bind is not None
    return process.bind.role


def _host(process: Process) -> tuple[str, str]:
    """Return what has one monotonic clock."""
    return process.host, process.boot_id


def _extents(batch: SpanBatch) -> Column:
    rows = batch.rows[batch.is_kind(STEP)]
    extents = np.zeros(len(rows), EXTENT)
    for name in EXTENT.names or ():
        extents[name] = rows[name]
    return extents


def _joined(extents: Column) -> Column:
    """Return one extent for each step, from the first rank's start to the last one's end."""
    extents = extents[np.argsort(extents["step"], kind="stable")]
    steps, first = np.unique(extents["step"], return_index=True)
    out = np.zeros(len(steps), EXTENT)
    if len(steps):
        out["step"] = steps
        out["start"] = np.minimum.reduceat(extents["start"], first)
        out["end"] = np.maximum.reduceat(extents["end"], first)
    return out

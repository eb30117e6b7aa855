"""Read runs file by file, for what is written as it is read: what is held does not grow with a run's length."""

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from pathlib import Path

import numpy as np

from otel_dltrace.export.damage import nothing_in
from otel_dltrace.export.run_reader import read_batches
from otel_dltrace.model import semconv as s
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.spans import Column, SpanBatch, concatenate


def read_outline(run: Path, progress: Callable[[int], None], with_operations: bool = False) -> list[SpanBatch]:
    """Return of each process of *run* its steps, stages and pauses, and what is first and last in each file.

    Args:
        run: The run directory.
        progress: Called with the number of spans that were looked at since its last call.
        with_operations: Return operations, and the waiting for them, too: who waits is not slow.

    Raises:
        RunNotFoundError: It is no run directory, or holds no span.
    """
    parts: dict[int, list[SpanBatch]] = {}
    for batch in read_batches(run):
        parts.setdefault(batch.process.nonce, []).append(batch.take(_of_outline(batch, with_operations)))
        progress(len(batch))
    if not parts:
        raise RunNotFoundError(nothing_in(run))
    whole = [joined for part in parts.values() if (joined := concatenate(part)) is not None]
    return sorted(whole, key=lambda b: (b.process.bind.role if b.process.bind else "", b.rank))


def _of_outline(batch: SpanBatch, with_operations: bool) -> Column:
    names = (s.GC, s.WAIT) if with_operations else (s.GC,)
    finest = s.Level.COLLECTIVE if with_operations else s.Level.STEP
    mask: Column = (batch["level"] <= finest) | batch.lookup(lambda d: d.name in names, bool)
    if len(batch):
        mask[[np.argmin(batch["start"]), np.argmax(batch["end"])]] = True
    return mask


def stream_spans(
    runs: Sequence[Path], steps: Container[int] | None, ranks: Collection[int] | None
) -> Iterator[SpanBatch]:
    """Yield the spans of *runs* that are in *steps* and of *ranks* (None: all), a batch per process and file."""
    for run in runs:
        for batch in read_batches(run):
            if ranks is None or batch.rank in ranks:
                yield batch if steps is None else _in_steps(batch, steps)


def _in_steps(batch: SpanBatch, steps: Container[int]) -> SpanBatch:
    known = np.unique(batch["step"])
    wanted = [step for step in known.tolist() if step != NO_STEP and step in steps]
    return batch.take(np.isin(batch["step"], wanted))

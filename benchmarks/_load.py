"""Hosts of a job, simulated: the requests that their drains would send, step by step, of steps like those of `_ranks`.

Spans are rows made by numpy and encoded as the drain encodes them; no rings, no run directory.
"""

import os
import time
from dataclasses import dataclass, field, replace

import numpy as np

from benchmarks._ranks import BUCKETS, PHASES, SPANS, STAGES
from otel_dltrace.export.otlp.merge import Merger
from otel_dltrace.export.otlp.requests import EncodedRequest, Part, encode_together
from otel_dltrace.export.outgoing.departing import hang_under_roots
from otel_dltrace.export.rundir.traces import trace_id_column
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.attributes import resource_attributes
from otel_dltrace.model.identity import NO_USER_STEP, Bind, root_id, trace_id
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.semconv import Level
from otel_dltrace.model.spans import Process, SpanBatch, empty_rows, fill_ids, stack_rows
from otel_dltrace.model.time import Anchor

STEP_NS = 100_000_000
TABLE = (
    RANK_STEP,
    *(Descriptor(s.STAGE, name) for name in STAGES),
    *(Descriptor(s.COLLECTIVE, "all_reduce", "0", 64, "nccl", f"bucket {k}", dtype="float32") for k in range(BUCKETS)),
    *(Descriptor(s.PHASE, f"phase {k % 12}", tensor=f"layer {k}") for k in range(PHASES)),
    Descriptor(s.STEP, s.TRAIN_STEP),
)


def _template() -> Column:
    """Return the rows of one rank's step: the step, its stages, the buckets' all-reduces, the phases inside them."""
    rows = empty_rows(SPANS)
    rows["descriptor"] = rows["span_no"] = np.arange(SPANS)
    stages, buckets, phases = (slice(1, 6), slice(6, 6 + BUCKETS), slice(6 + BUCKETS, SPANS))
    rows["level"][:6], rows["level"][buckets], rows["level"][phases] = Level.STEP, Level.COLLECTIVE, Level.PHASE
    rows["start"][stages] = np.arange(5) * STEP_NS // 5
    rows["start"][buckets] = STEP_NS // 4 + np.arange(BUCKETS) * STEP_NS // 40
    rows["parent_no"][phases] = 6 + np.arange(PHASES) % BUCKETS
    rows["start"][phases] = rows["start"][rows["parent_no"][phases]] + 1000 * np.arange(PHASES)
    rows["end"] = rows["start"] + STEP_NS // 50
    rows["end"][0] = STEP_NS
    rows["size"], rows["b"] = 1 << 20, -1
    rows["size"][0] = NO_USER_STEP
    return rows


@dataclass
class Host:
    """One host of the job *job*, whose *ranks* send through one drain."""

    job: str
    ranks: range
    world_size: int
    processes: list[Process] = field(default_factory=list)
    merger: Merger = field(default_factory=Merger)

    def __post_init__(self) -> None:
        """Give each rank a process."""
        for rank in self.ranks:
            bind = Bind(self.job, "1.00000000000000aa", "load", rank=rank, world_size=self.world_size)
            nonce = int.from_bytes(os.urandom(8), "big")
            host = f"host-{self.ranks.start // len(self.ranks):02}"
            self.processes.append(Process(nonce, bind, host, f"boot-{host}", rank, Anchor(0, time.time_ns(), 100)))

    def requests(self, step: int) -> tuple[list[EncodedRequest], list[int]]:
        """Return what the host's drain sends of *step*, and the ids of the spans in it."""
        parts, ids = [], []
        for process in self.processes:
            assert process.bind is not None
            batch = SpanBatch(_rows_of(process, step), TABLE, process)
            hang_under_roots(batch, 0)
            ids += batch["span_id"].tolist()
            parts.append(Part(batch, trace_id_column(batch, process.bind), resource_attributes(process)))
        return encode_together(parts, stack_rows(part.batch.rows for part in parts), self.merger), ids


def _rows_of(process: Process, step: int) -> Column:
    assert process.bind is not None
    rows = TEMPLATE.copy()
    rows["step"] = step
    rows["seq"][6 : 6 + BUCKETS] = 1 + step * BUCKETS + np.arange(BUCKETS)
    rows["start"] += step * STEP_NS + process.bind.rank * 1000
    rows["end"] += step * STEP_NS + process.bind.rank * 1000
    fill_ids(rows, TABLE, process)
    if process.bind.rank:
        return rows
    root = rows[:1].copy()
    root["descriptor"], root["span_id"], root["parent_id"] = len(TABLE) - 1, root_id(process.bind, step), 0
    return np.concatenate([root, rows])


TEMPLATE = _template()


def hosts(number: int, ranks_each: int) -> list[Host]:
    """Return *number* hosts of one job."""
    job = os.urandom(8).hex()
    return [Host(job, range(i * ranks_each, (i + 1) * ranks_each), number * ranks_each) for i in range(number)]


def trace_of(host: Host, step: int) -> str:
    """Return the id of *step*'s trace."""
    bind = host.processes[0].bind
    assert bind is not None
    return f"{trace_id(replace(bind, rank=0), step):032x}"

"""Runs written by hand: spans under exact times, and a small simulation of data-parallel training."""

import io
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from otel_dltrace.analysis.compose import RunReport
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.semconv import Flag, Level, Source
from otel_dltrace.model.spans import Process, SpanBatch, empty_rows, fill_ids
from otel_dltrace.model.time import Anchor
from otel_dltrace.report.text import write

MS = 1_000_000
USUAL: Mapping[str, float] = {
    "between steps": 0.0,
    "dataloader_next": 2.0,
    "forward": 4.0,
    "backward": 8.0,
    "optimizer": 1.0,
    "residual": 0.0,
}
TRANSFER = 1.0


class Rank:
    """The spans of one rank; all times are given in ms of its host's monotonic clock."""

    def __init__(self, rank: int = 0, world_size: int = 1, host: str = "node-0", **process: Any) -> None:
        who = {name: process.pop(name) for name in ("role", "world") if name in process}
        bind = Bind("job", "1.00", "demo", rank=rank, world_size=world_size, **who)
        self.process = Process(process.pop("nonce", rank + 1), bind, host, f"boot-{host}", **process)
        self.descriptors: dict[Descriptor, int] = {}
        self.rows: list[dict[str, Any]] = []

    def add(self, descriptor: Descriptor, step: int, start: float, end: float, **fields: Any) -> "Rank":
        """Add one span."""
        number = self.descriptors.setdefault(descriptor, len(self.descriptors))
        times = {"start": round(start * MS), "end": round(end * MS)}
        self.rows.append(
            {"descriptor": number, "step": step, "span_no": len(self.rows) + 1, "level": Level.PHASE, **times, **fields}
        )
        return self

    def step(self, step: int, start: float, end: float, **fields: Any) -> "Rank":
        """Add a step: its ordinal, begin and end."""
        return self.add(RANK_STEP, step, start, end, **{"b": -1, "level": Level.STEP, **fields})

    def stage(
        self, step: int, name: str, start: float, end: float, total: float | None = None, pieces: int = 1, **more: Any
    ) -> "Rank":
        """Add a stage; *total* is the ms of all its *pieces*."""
        size = round((end - start if total is None else total) * MS)
        return self.add(Descriptor(s.STAGE, name), step, start, end, size=size, a=pieces, level=Level.STEP, **more)

    def collective(
        self, step: int, start: float, end: float, seq: int, name: str = "all_reduce", **more: Any
    ) -> "Rank":
        """Add a collective; what is no column describes it."""
        constant = {k: more.pop(k) for k in ("group", "group_size", "backend", "tensor", "dtype") if k in more}
        descriptor = Descriptor(s.COLLECTIVE, name, **{"backend": "gloo", "group": "0", **constant})
        return self.add(descriptor, step, start, end, **{"seq": seq, "b": -1, "size": 1024, **more})

    def wait(self, step: int, start: float, end: float) -> "Rank":
        """Add the time blocked in waiting for a handle."""
        return self.add(Descriptor(s.PHASE, s.WAIT), step, start, end)

    def batch(self) -> SpanBatch:
        """Return what was added."""
        rows = empty_rows(len(self.rows))
        for i, fields in enumerate(self.rows):
            for name, value in fields.items():
                rows[i][name] = value
        fill_ids(rows, list(self.descriptors), self.process)
        return SpanBatch(rows, list(self.descriptors), self.process)


def ddp(
    ranks: int = 2,
    steps: int = 20,
    slow: Mapping[tuple[int, str], float] | None = None,
    buckets: bool = True,
    hosts: Mapping[int, tuple[str, Anchor]] | None = None,
    first: float = 0.0,
    jitter: float = 0.0,
) -> list[SpanBatch]:
    """Return a data-parallel run: backward ends everywhere when the last rank's last bucket is reduced.

    Args:
        ranks: How many.
        steps: How many.
        slow: Extra ms by (rank, stage).
        buckets: Whether the two buckets of backward were recorded, as DDP's free sources tell them.
        hosts: Each rank's host and clocks, if not one.
        first: Extra ms of the first step's forward on every rank.
        jitter: Ms by which forward differs from step to step and rank to rank, without favour.
    """
    out = [_rank_of(rank, ranks, hosts) for rank in range(ranks)]
    now = [1000.0] * ranks
    for step in range(steps):
        took = [
            {name: usual + (slow or {}).get((rank, name), 0.0) for name, usual in USUAL.items()}
            for rank in range(ranks)
        ]
        for rank, mine in enumerate(took):
            mine["forward"] += (first if step == 0 else 0) + jitter * ((step * 7 + rank * 11) % 13) / 13
        begun = [now[rank] + took[rank]["between steps"] for rank in range(ranks)]
        ready = [
            begun[rank] + sum(took[rank][name] for name in ("dataloader_next", "forward", "backward"))
            for rank in range(ranks)
        ]
        reduced = max(ready) + TRANSFER
        for rank in range(ranks):
            now[rank] = _one_step(out[rank], step, begun[rank], took[rank], reduced, buckets)
    return [rank.batch() for rank in out]


def ddp_on_devices(
    ranks: int, slow: Mapping[tuple[int, str], float], timed: bool = False, lag: float = 0.0, gathers: bool = False
) -> list[SpanBatch]:
    """Return a data-parallel run of 20 steps on devices, which come *lag* ms late to what their hosts launch at once.

    Args:
        ranks: How many.
        slow: Extra ms by (rank, stage), of the device.
        timed: Whether the devices' times of the two buckets are known, and not just when hosts launched them.
        lag: How far the devices are behind.
        gathers: Whether the model is sharded, and gathered again in its forward.
    """
    out = [Rank(rank, ranks) for rank in range(ranks)]
    on_device = {"source": Source.DEVICE}
    now = 1000.0
    for one in out:  # DDP tells the others its parameters, before any step
        one.collective(NO_STEP, 900, 900, 0, "broadcast_coalesced", source=Source.HOST_ISSUE, backend="nccl")
    for step in range(20):
        took = [{name: ms + slow.get((rank, name), 0.0) for name, ms in USUAL.items()} for rank in range(ranks)]
        forward = [now + 1 + lag + mine["forward"] for mine in took]
        ready = [begun + mine["backward"] for begun, mine in zip(forward, took, strict=True)]
        reduced = max(ready) + TRANSFER
        for rank, one in enumerate(out):
            one.step(step, now, reduced + 2 - lag, seq=2 * step + 1)
            one.stage(step, "forward", now + 1 + lag, forward[rank], **on_device)
            one.stage(step, "backward", forward[rank], reduced, **on_device)
            one.stage(step, "optimizer", reduced, reduced + took[rank]["optimizer"], **on_device)
            for number, launch, begin in ((0, now + 1.5, forward[rank] + 1), (1, now + 2, ready[rank])):
                source, start, end = (Source.RECORDER, begin, reduced) if timed else (Source.HOST_ISSUE, launch, launch)
                bucket = {"tensor": f"bucket {number}", "flags": Flag.ASYNC, "source": source, "backend": "nccl"}
                one.collective(step, start, end, 2 * step + 1 + number, **bucket)
            if gathers:
                one.collective(step, now + 1, now + 1, step + 1, "all_gather", group="1", source=Source.HOST_ISSUE)
        now = reduced + 2 - lag
    return [rank.batch() for rank in out]


def _rank_of(rank: int, ranks: int, hosts: Mapping[int, tuple[str, Anchor]] | None) -> Rank:
    if hosts is None:
        return Rank(rank, ranks)
    host, anchor = hosts[rank]
    return Rank(rank, ranks, host, anchor=anchor)


def _one_step(rank: Rank, step: int, begun: float, took: Mapping[str, float], reduced: float, buckets: bool) -> float:
    data = begun + took["dataloader_next"]
    forward = data + took["forward"]
    ready = forward + took["backward"]
    optimizer = reduced + took["optimizer"]
    end = optimizer + took["residual"]
    rank.step(step, begun, end, seq=2 * step + 1, a=32)
    rank.stage(step, "dataloader_next", begun, data).stage(step, "forward", data, forward)
    rank.stage(step, "backward", forward, reduced).stage(step, "optimizer", reduced, optimizer)
    if buckets:
        bound = {"source": Source.BOUND, "flags": Flag.ASYNC, "level": Level.COLLECTIVE, "dtype": "float32"}
        half = (forward + ready) / 2
        rank.collective(step, half, reduced, 2 * step + 2, tensor="bucket 0", **bound)
        rank.collective(step, ready, reduced, 2 * step + 3, tensor="bucket 1", **bound)
    return end


def rendered(report: RunReport, width: int = 100) -> str:
    """Return *report* as plain text of at most *width* columns."""
    out = io.StringIO()
    write(report, Console(file=out, width=width, color_system=None, force_terminal=False))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"

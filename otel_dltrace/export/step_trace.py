"""Finds a step of a run on disk, and the trace that it is in wherever it was sent: the id follows from the run."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from otel_dltrace.export.files import read_object
from otel_dltrace.export.rundir.damage import but_for
from otel_dltrace.export.rundir.reader import read_batches, read_summaries
from otel_dltrace.model.errors import DltraceError, RunNotFoundError
from otel_dltrace.model.identity import NO_STEP, rank_step_id, trace_id
from otel_dltrace.model.plan import share_of

MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class StepTrace:
    """A step on one rank: the ids of its trace and of its rank's span, in hexadecimal, and its time, Unix ns."""

    trace_id: str
    span_id: str
    start: int
    end: int


def find_run(name: str, directory: Path) -> Path:
    """Return the run directory called *name*, or the newest one in *directory* of the job of that name or id.

    Raises:
        RunNotFoundError: There is none.
        DltraceError: It cannot be looked for.
    """
    try:
        if (Path(name) / "hosts").is_dir():
            return Path(name)
        runs = sorted(directory.glob("dltrace-*/run.json"), key=lambda path: path.stat().st_mtime)
    except OSError as error:
        raise DltraceError(f"{error.filename or name} cannot be read: {error.strerror or error}") from None
    jobs = [(read_object(path), path.parent) for path in runs]
    found = [run for info, run in jobs if name in (info.get("job_name"), info.get("job"), run.name)]
    if not found:
        there = list(dict.fromkeys(str(info.get("job_name")) for info, _ in reversed(jobs)))[:MOST_NAMES]
        jobs_there = f"it has runs of {', '.join(there)}" if there else "it has no runs"
        raise RunNotFoundError(f"{name} is neither a run directory nor a job with a run in {directory}: {jobs_there}")
    return found[-1]


def find_step(run: Path, step: int, rank: int | None, budget: int) -> StepTrace:
    """Return *step* of *run* on *rank* (the lowest there, if None).

    *budget* is that of spans per trace, unless the run tells its own.

    Raises:
        RunNotFoundError: There is no such run, rank or step.
    """
    budget = next((told["span_budget"] for told in read_summaries(run) if "span_budget" in told), budget)
    found: dict[int, StepTrace] = {}
    steps: set[int] = set()
    ranks: set[int] = set()
    for batch in read_batches(run):
        bind = batch.process.bind
        if bind is None or bind.role != "worker":
            continue
        rows = batch.rows[batch.is_rank_step]
        ranks.add(bind.rank)
        steps.update(np.unique(rows["step"]).tolist())
        for row in rows[rows["step"] == step][:1]:
            shard = share_of(bind.rank, bind.world_size, bind.servers, budget, step).shard
            start, end = int(row["start"]) + batch.wall, int(row["end"]) + batch.wall
            ids = f"{trace_id(bind, step, shard):032x}", f"{rank_step_id(bind, step):016x}"
            found[bind.rank] = StepTrace(*ids, start, end)
    if rank is not None and rank not in ranks:
        raise RunNotFoundError(f"rank {rank} is not in {run}; it has {_range(ranks, 'ranks')}{but_for(run)}")
    chosen = found.get(min(found, default=-1) if rank is None else rank)
    if chosen is None:
        there = _range(steps - {NO_STEP}, "steps")
        raise RunNotFoundError(f"step {step} is not in {run}; it has {there}{but_for(run)}")
    return chosen


def is_sent(run: Path) -> bool:
    """Return whether anything of *run* was taken by a collector."""
    figures = [drain["summary"].get("otlp") for drain in read_summaries(run)]
    return any(isinstance(figure, dict) and figure.get("accepted") for figure in figures)


def _range(numbers: set[int], name: str) -> str:
    return f"{name} {min(numbers)} to {max(numbers)}" if numbers else f"no {name}"

"""What the libraries below an operation do: MPI, Gloo, NCCL, the copies around them, waiting (timelines, 5.8)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.shares import unions
from otel_dltrace.analysis.spread import Spread, spread
from otel_dltrace.model.spans import Column

_LIBRARIES = {"MPI": "MPI", "NCCL": "NCCL", "GLOO": "Gloo", "CCL": "oneCCL", "MLSL": "MLSL", "DDL": "DDL"}
_OTHERS = {"INIT_NCCL": "NCCL", "QUEUE": "waiting", "SCHEDULE": "waiting"}
_BY_BEGIN = {"WAIT_": "waiting", "MEMCPY_": "copies", "INIT_FUSION": "copies", "ALLOCATE_": "copies", "COPY_": "copies"}
OTHER = "other"


@dataclass(frozen=True, slots=True)
class Activity:
    """An activity, or all of one *library*, ns: *time* of its bars, *covered* by any of them, summed over the ranks."""

    name: str
    time: Spread
    covered: int
    library: str = ""


def library_of(activity: str) -> str:
    """Return what does *activity*, a name of Horovod's timeline: ``MPI``, ``NCCL``, ``Gloo``, ``copies``, ..."""
    first = activity.partition("_")[0]
    begins = (what for begin, what in _BY_BEGIN.items() if activity.startswith(begin))
    return _OTHERS.get(activity) or _LIBRARIES.get(first) or next(begins, OTHER)


def activities(names: Sequence[str], libraries: Sequence[str], rows: Column) -> tuple[Activity, ...]:
    """Return one for each of *names*, with its library, of *rows* (fields name, rank, start, end); the longest first."""
    distinct = {name: i for i, name in enumerate(dict.fromkeys(zip(names, libraries, strict=True)))}
    place = np.array([distinct[pair] for pair in zip(names, libraries, strict=True)], np.int64)
    found = _grouped(place[rows["name"]] if len(rows) else rows["name"], rows, len(distinct))
    out = [Activity(name, time, covered, library) for (name, library), (time, covered) in zip(distinct, found, strict=True) if time.count]
    return tuple(sorted(out, key=lambda one: (-one.covered, one.name)))


def by_library(libraries: Sequence[str], rows: Column) -> tuple[Activity, ...]:
    """Return one for each library of *rows*, of which each name has the one in *libraries*; the longest first."""
    return tuple(Activity(one.name, one.time, one.covered) for one in activities(libraries, libraries, rows))


def _grouped(group: Column, rows: Column, groups: int) -> list[tuple[Spread, int]]:
    """Return the times of the bars of each group, and how long any of them was there on each rank, summed."""
    ranks, rank = np.unique(rows["rank"], return_inverse=True)
    each = max(len(ranks), 1)
    covered = unions(group * each + rank.reshape(-1), rows["start"], rows["end"], groups * each).reshape(groups, each)
    length = rows["end"] - rows["start"]
    return [(spread(length[group == i]), int(covered[i].sum())) for i in range(groups)]

"""What the libraries below an operation do: MPI, Gloo, NCCL, the copies around them, waiting (timelines, 5.8)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.analysis.negotiation.shares import covered
from otel_dltrace.analysis.spread import Spread, spread
from otel_dltrace.model.arrays import Column

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
    """Return one for each of *names*, with its library, by the descriptors of *rows*; what took longest first."""
    distinct = {pair: i for i, pair in enumerate(dict.fromkeys(zip(names, libraries, strict=True)))}
    place = np.array([distinct[pair] for pair in zip(names, libraries, strict=True)], np.int64)
    group = place[rows["descriptor"]]
    out = []
    for (name, library), i in distinct.items():
        bars = rows[group == i]
        if len(bars):
            out.append(Activity(name, spread(bars["end"] - bars["start"]), covered(bars), library))
    return tuple(sorted(out, key=lambda one: (-one.covered, one.name)))

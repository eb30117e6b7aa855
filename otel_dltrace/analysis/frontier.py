"""Which stage holds all ranks up: F_s = max_r sum_{k<=s} d_{r,k}, exposed_s = F_s - F_{s-1}.

(Spec: analyses J, StageFrontier.) The leader of a stage is the rank of the maximum. The exposed
times sum to the slowest rank's step exactly, and no two clocks are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from otel_dltrace.model.spans import Column


@dataclass(frozen=True, slots=True)
class FrontierStage:
    """One stage: *exposed* ns per step in the mean, and who led most often, in *led* of the steps."""

    name: str
    exposed: int
    leader: int
    led: int


def frontier(names: Sequence[str], ranks: Sequence[int], durations: Column) -> tuple[FrontierStage, ...]:
    """Return the frontier of *durations*, (ranks, steps, stages) in ns."""
    if not durations.shape[0] or not durations.shape[1]:
        return ()
    sums = np.cumsum(durations, axis=2)
    front = sums.max(axis=0)
    exposed = np.diff(front, axis=1, prepend=0).mean(axis=0)
    leaders = sums.argmax(axis=0)
    out = []
    for i, name in enumerate(names):
        times = np.bincount(leaders[:, i], minlength=len(ranks))
        out.append(FrontierStage(name, round(float(exposed[i])), ranks[int(times.argmax())], int(times.max())))
    return tuple(out)

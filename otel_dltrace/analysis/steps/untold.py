"""In which stages a rank may have waited for others without a word, and what would have told it."""

import re

import numpy as np

from otel_dltrace.analysis.intervals import merged
from otel_dltrace.analysis.steps.blocked import is_issued
from otel_dltrace.analysis.steps.table import StepTable
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.buckets import is_hooked

SHARE_OF_STEPS = 0.5
_WAITED_IN = frozenset((s.BACKWARD, s.OPTIMIZER))
"""DDP waits for the others inside backward, Horovod and push_pull inside the optimizer's step."""
_IN_FORWARD = re.compile("_?(all_?gather|reduce_?scatter|all_?to_?all|broadcast_coalesced)", re.IGNORECASE)
"""What models communicate in their forward: sharded ones, experts, and DDP its buffers."""


def untold(t: StepTable, steps: Column) -> frozenset[str]:
    """Return the stages in which the rank may have waited in *steps*, and for how long nobody recorded.

    So it is in any stage with a device's own times that communicates aside: one stream waits for another in silence.
    """
    if _goes_aside(t, steps):
        return _WAITED_IN | {s.FORWARD}
    return frozenset() if _share_that_tells(t, steps) > SHARE_OF_STEPS else _WAITED_IN


def lacking(t: StepTable, steps: Column) -> str:
    """Return what would have told the waits that are `untold` in *steps*, with the setting that records it, if any."""
    if _goes_aside(t, steps):
        return "the waits between its streams"
    if (t.batch.is_bucket & is_issued(t)).any():
        return "its device's times of the buckets (TORCH_NCCL_ENABLE_TIMING=1)"
    if not tells_waits(t):
        return "its waits (OTEL_DLTRACE_LEVEL=phase)"
    if t.batch.is_kind(s.COLLECTIVE, s.P2P).any():
        return "its operations in more of the steps"
    return "its operations (OTEL_DLTRACE_LEVEL=collective)"


def steps_with_operations(t: StepTable) -> Column:
    """Return a mask of the steps in which operations were seen, with waits: else nobody knows where a rank waits."""
    batch, issued = t.batch, is_issued(t)
    seen: Column = np.isin(t.steps, batch["step"][batch.is_kind(s.COLLECTIVE, s.P2P) & ~issued])
    seen &= ~np.isin(t.steps, batch["step"][issued & batch.is_bucket])
    return seen if tells_waits(t) else np.zeros_like(seen)


def tells_waits(t: StepTable) -> bool:
    """Return whether it is known for how long the rank was blocked.

    It is not by buckets that are all on a device of which no times are known.
    """
    buckets = t.batch.is_bucket
    return not (buckets.any() and is_issued(t)[buckets].all()) and not lacks_waits(t)


def lacks_waits(t: StepTable) -> bool:
    """Return whether the rank had handles, and nobody recorded for how long it waited for them.

    So it is at level `collective`; of Horovod also where its own timeline alone tells of phases.
    """
    has_handle = t.batch.is_kind(s.COLLECTIVE, s.P2P) & (t.batch["flags"] & s.Flag.ASYNC != 0)
    has_handle &= ~t.batch.is_bucket & ~is_issued(t) & ~_of_hooks(t)
    of_horovod = has_handle & t.batch.lookup(lambda d: d.backend == h.BACKEND, bool)
    tells = t.batch.is_wait if of_horovod.any() else t.batch["level"] >= s.Level.PHASE
    return bool(has_handle.any() and not tells.any())


def _of_hooks(t: StepTable) -> Column:
    """Return a mask of what begins while buckets of communication hooks are under way: DDP waits for that itself."""
    reduced = t.batch.lookup(is_hooked, bool)
    at: Column = t.batch["start"]
    begin, end = merged(t.batch["start"][reduced], t.batch["end"][reduced])
    if not len(begin):
        return reduced
    last = np.searchsorted(begin, at, "right") - 1
    inside: Column = (last >= 0) & (at <= end[last])
    return inside


def _share_that_tells(t: StepTable, steps: Column) -> float:
    """Return the share of *steps* between the first and the last with operations.

    One without any between them waits for nobody, as where weights are averaged every few steps; before and after
    them operations are not recorded, or no longer kept.
    """
    seen = np.flatnonzero(steps_with_operations(t)[t.rows_of(steps)])
    return float(np.ptp(seen) + 1) / len(steps) if len(seen) else 0.0


def _goes_aside(t: StepTable, steps: Column) -> bool:
    """Return whether the model communicates on its device while it computes in most *steps*, as a sharded one does.

    One operation between two steps is none of a model's; nor is what DDP tells the ranks before the first.
    """
    if not t.device.any():
        return False
    by_host = np.isin(t.batch["source"], (s.Source.HOST_DONE, s.Source.BOUND))
    aside = t.batch.lookup(lambda d: _IN_FORWARD.match(d.name) is not None, bool) & ~by_host
    return float(np.isin(steps, t.batch["step"][aside]).mean()) > SHARE_OF_STEPS if len(steps) else False

"""What each step of a rank took, stage by stage: the tier that is on whether or not the window is open.

One observation for each stage of a step, and some for the step itself; those of a second's steps come together.
"""

from typing import NamedTuple

import numpy as np

from otel_dltrace.export.metrics.exposed import Exposed
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.metric_batch import Point
from otel_dltrace.model.metrics import attributes_text
from otel_dltrace.model.spans import Column, Descriptors, distinct

_SECOND = 1e9
_NEVER = np.iinfo(np.int64).max


class Observed(NamedTuple):
    """Observations of one series of a histogram: *values* in the metric's unit, shape (n,)."""

    metric: str
    values: Column
    attributes: str
    rank: int


class StepSummary:
    """Turns the finished steps of one rank into observations and points.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._exposed = Exposed()
        self._samples = self._batches = 0
        self._last_end = 0
        self._texts = {"": ""}

    def add(self, rows: Column, descriptors: Descriptors) -> tuple[list[Observed], list[Point]]:
        """Return what the steps that end in *rows* took, and what has been done; a step comes with its stages."""
        is_closed = (rows["flags"] & np.uint16(s.Flag.TRUNCATED) == 0) & (rows["step"] != NO_STEP)
        steps = rows.compress(descriptors.is_kind(rows, s.STEP) & is_closed)
        steps = steps.take(np.argsort(steps["start"], kind="stable"))
        exposed = self._exposed.add(rows, descriptors, steps)
        if not len(steps):
            return [], []
        observed = self._stages(steps, rows.compress(descriptors.is_kind(rows, s.STAGE)), descriptors)
        if exposed:
            observed.append(self._observed(m.DL_STEP_GRAD_SYNC_EXPOSED, np.array([*exposed.values()])))
        return observed, self._throughput(steps)

    def _stages(self, steps: Column, stages: Column, descriptors: Descriptors) -> list[Observed]:
        """Return the steps' lengths, their stages', and what these leave of them."""
        length = steps["end"] - steps["start"]
        out = [self._observed(m.DL_STEP_DURATION, length)]
        numbers, place = distinct(np.concatenate([steps["step"], stages["step"]]))
        of_step, of_stage = place[: len(steps)], place[len(steps) :]
        begin = np.full(len(numbers), _NEVER)
        begin[of_step] = steps["start"]
        here = begin[of_stage] != _NEVER
        stages, of_stage = stages.compress(here), of_stage[here]
        total = stages["size"].astype(np.int64)
        covered = np.zeros(len(numbers), np.int64)
        # An evaluation before it is in no step's time.
        np.add.at(covered, of_stage, np.where(stages["end"] > begin[of_stage], total, 0))
        kinds, which = distinct(descriptors.numbers(stages))
        for i, number in enumerate(kinds.tolist()):
            out.append(self._observed(m.DL_STEP_STAGE_DURATION, total[which == i], descriptors[number].name))
        rest = np.maximum(length - covered[of_step], 0)
        return [*out, self._observed(m.DL_STEP_STAGE_DURATION, rest, m.RESIDUAL)]

    def _observed(self, metric: str, ns: Column, stage: str = "") -> Observed:
        text = self._texts.get(stage)
        if text is None:
            text = self._texts[stage] = attributes_text({s.DL_PHASE: stage})
        return Observed(metric, ns / _SECOND, text, self._rank)

    def _throughput(self, steps: Column) -> list[Point]:
        """Return what has been done so far, and how much of it a second since the last call."""
        begin, self._last_end = self._last_end or int(steps["start"][0]), int(steps["end"].max())
        batches, samples = len(steps), int(np.maximum(steps["a"], 0).sum())
        self._batches, self._samples = self._batches + batches, self._samples + samples
        seconds = (self._last_end - begin) / _SECOND
        points = [Point(m.DL_TRAIN_BATCHES, self._batches, rank=self._rank)]
        if self._samples:
            points.append(Point(m.DL_TRAIN_SAMPLES, self._samples, rank=self._rank))
        if seconds > 0:
            points.append(Point(m.DL_THROUGHPUT_BATCHES, batches / seconds, rank=self._rank))
        if seconds > 0 and (steps["a"] > 0).all():
            points.append(Point(m.DL_THROUGHPUT_SAMPLES, samples / seconds, rank=self._rank))
        return points

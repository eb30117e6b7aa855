"""What each step of a rank took, stage by stage: the tier that is on whether or not the window is open.

One observation for each stage of a step, and some for the step itself; those of all steps that are read at a time come
together.
"""

from typing import NamedTuple

import numpy as np

from otel_dltrace.export.metrics.exposed import Exposed
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column, distinct
from otel_dltrace.model.descriptors import Descriptors
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.metric_batch import Point
from otel_dltrace.model.metrics import attributes_text

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
        """Return what the steps that end in *rows* took, and what has been done.

        A step comes with its stages. Those of a step that never begins, the evaluation after the last one and what
        follows it, come at the end, and count too; those of a step that was cut off do not.
        """
        begun = rows.compress(descriptors.is_kind(rows, s.STEP) & (rows["step"] != NO_STEP))
        steps = begun.compress(begun["flags"] & np.uint16(s.Flag.TRUNCATED) == 0)
        steps = steps.take(np.argsort(steps["start"], kind="stable"))
        exposed = self._waited(self._exposed.add(rows, descriptors, steps))
        stages = rows.compress(descriptors.is_kind(rows, s.STAGE))
        stages = stages.compress(np.isin(stages["step"], steps["step"]) | ~np.isin(stages["step"], begun["step"]))
        observed = self._stages(stages, descriptors)
        if not len(steps):
            return observed, []
        fetched = stages.compress(descriptors.fetches[descriptors.numbers(stages)])
        return [*observed, *self._steps(steps, stages), *exposed], self._throughput(steps, fetched)

    def end(self) -> list[Observed]:
        """Return what is known of the last step only once no more comes."""
        return self._waited(self._exposed.end())

    def _waited(self, exposed: dict[int, int]) -> list[Observed]:
        return [self._observed(m.DL_STEP_GRAD_SYNC_EXPOSED, np.array([*exposed.values()]))] if exposed else []

    def _steps(self, steps: Column, stages: Column) -> list[Observed]:
        """Return the *steps*' lengths, and what *stages* leave of them."""
        length = steps["end"] - steps["start"]
        numbers, place = distinct(np.concatenate([steps["step"], stages["step"]]))
        of_step, of_stage = place[: len(steps)], place[len(steps) :]
        begin = np.full(len(numbers), _NEVER)
        begin[of_step] = steps["start"]
        covered = np.zeros(len(numbers), np.int64)
        # An evaluation before it is in no step's time.
        np.add.at(covered, of_stage, np.where(stages["end"] > begin[of_stage], stages["size"].astype(np.int64), 0))
        rest = np.maximum(length - covered[of_step], 0)
        return [
            self._observed(m.DL_STEP_DURATION, length),
            self._observed(m.DL_STEP_STAGE_DURATION, rest, m.RESIDUAL),
        ]

    def _stages(self, stages: Column, descriptors: Descriptors) -> list[Observed]:
        """Return how long each kind of *stages* took."""
        kinds, which = distinct(descriptors.numbers(stages))
        total = stages["size"].astype(np.int64)
        return [
            self._observed(m.DL_STEP_STAGE_DURATION, total[which == i], descriptors[number].name)
            for i, number in enumerate(kinds.tolist())
        ]

    def _observed(self, metric: str, ns: Column, stage: str = "") -> Observed:
        text = self._texts.get(stage)
        if text is None:
            text = self._texts[stage] = attributes_text({s.DL_PHASE: stage})
        return Observed(metric, ns / _SECOND, text, self._rank)

    def _throughput(self, steps: Column, fetched: Column) -> list[Point]:
        """Return what has been done so far, and how much of it a second since the last call.

        Of several batches that a step *fetched* each counts; one that saw none fetched had one.
        """
        begin, self._last_end = self._last_end or int(steps["start"][0]), int(steps["end"].max())
        of_steps = fetched.compress(np.isin(fetched["step"], steps["step"]))
        batches = int(of_steps["a"].sum()) + int((~np.isin(steps["step"], of_steps["step"])).sum())
        samples = int(np.maximum(steps["a"], 0).sum())
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

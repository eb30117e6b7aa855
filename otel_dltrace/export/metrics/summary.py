"""What each step of a rank took, stage by stage: the tier that is on whether or not the window is open.

One observation for each stage of a step, and some for the step itself.
"""

import numpy as np

from otel_dltrace.export.metrics.exposed import Exposed
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.metric_batch import Point
from otel_dltrace.model.metrics import attributes_text
from otel_dltrace.model.spans import Column, Descriptors

_SECOND = 1e9


class StepSummary:
    """Turns the finished steps of one rank into points.

    Args:
        rank: The rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._exposed = Exposed()
        self._samples = self._batches = 0
        self._last_end = 0
        self._texts = {m.RESIDUAL: _phase(m.RESIDUAL)}

    def add(self, rows: Column, descriptors: Descriptors) -> list[Point]:
        """Return the points of the steps that end in *rows*; a step comes together with its stages."""
        is_closed = (rows["flags"] & np.uint16(s.Flag.TRUNCATED) == 0) & (rows["step"] != NO_STEP)
        steps = rows.compress(descriptors.is_kind(rows, s.STEP) & is_closed)
        steps = steps.take(np.argsort(steps["start"], kind="stable"))
        exposed = self._exposed.add(rows, descriptors, steps)
        if not len(steps):
            return []
        points = self._stages(steps, rows.compress(descriptors.is_kind(rows, s.STAGE)), descriptors)
        points += [Point(m.DL_STEP_GRAD_SYNC_EXPOSED, ns / _SECOND, rank=self._rank) for ns in exposed.values()]
        return points + self._throughput(steps)

    def _stages(self, steps: Column, stages: Column, descriptors: Descriptors) -> list[Point]:
        """Return each step's length, its stages', and what these leave of it."""
        begins = dict(zip(steps["step"].tolist(), steps["start"].tolist(), strict=True))
        lengths = dict(zip(steps["step"].tolist(), (steps["end"] - steps["start"]).tolist(), strict=True))
        points = [Point(m.DL_STEP_DURATION, length / _SECOND, rank=self._rank) for length in lengths.values()]
        columns = (stages[name].tolist() for name in ("step", "descriptor", "end", "size"))
        for step, number, end, total in zip(*columns, strict=True):
            if step not in begins:
                continue
            if end > begins[step]:  # an evaluation before it is in no step's time
                lengths[step] -= total
            text = self._text(descriptors[number].name)
            points.append(Point(m.DL_STEP_STAGE_DURATION, total / _SECOND, text, self._rank))
        rest, text = lengths.values(), self._texts[m.RESIDUAL]
        return points + [Point(m.DL_STEP_STAGE_DURATION, max(0, ns) / _SECOND, text, self._rank) for ns in rest]

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

    def _text(self, stage: str) -> str:
        text = self._texts.get(stage)
        if text is None:
            text = self._texts[stage] = _phase(stage)
        return text


def _phase(stage: str) -> str:
    return attributes_text({s.DL_PHASE: stage})

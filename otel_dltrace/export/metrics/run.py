"""The metrics of one run on this host: into its folder, and to OpenTelemetry where the environment says so."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING

from otel_dltrace.export.metrics.segments import MetricSegments
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.export.metrics.summary import Observed, StepSummary
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.attributes import resource_attributes
from otel_dltrace.model.descriptors import Descriptors
from otel_dltrace.model.identity import NO_STEP, h64
from otel_dltrace.model.metric_batch import NO_STEP as NONE
from otel_dltrace.model.metric_batch import Point, batch_of
from otel_dltrace.model.metrics import attributes_of, attributes_text
from otel_dltrace.model.plan import Window
from otel_dltrace.model.resource import instance_id
from otel_dltrace.model.spans import Process
from otel_dltrace.record.guard import say, text_of, tried

if TYPE_CHECKING:
    from otel_dltrace.export.metrics.pipeline import Pipeline

_OF_A_RANK = (s.DL_RANK, s.DL_LOCAL_RANK, s.DL_ROLE, s.PROCESS_PID)
_MOST_AHEAD = 1000
_MOST_WAITING = 100_000
"""Points that wait while the SDK is being loaded."""
_MONOTONIC_MAX = 1 << 63
Row = tuple[int, int, Point]
"""Time, step, point."""


class RankMetrics:
    """What one rank's rows and records say of metrics; made for each process that is bound to the run.

    Args:
        run: Where its points go.
        process: Who it is.
    """

    def __init__(self, run: "RunMetrics", process: Process) -> None:
        assert process.bind is not None
        self.run, self.bind = run, process.bind
        self.step, self.step_s = -1, 0.0
        self._summary = StepSummary(self.bind.rank) if run.goes_out and self.bind.role == "worker" else None

    def take(self, rows: Column, descriptors: Descriptors) -> None:
        """Take finished *rows* in."""
        steps = rows.compress(descriptors.is_kind(rows, s.STEP) & (rows["step"] != NO_STEP))
        if len(steps):
            self.step = int(steps["step"].max())
            self.step_s = float((steps["end"] - steps["start"]).mean()) / 1e9
        if self._summary is not None and self.run.goes_out:
            self.run.sum_up(*self._summary.add(rows, descriptors))

    def end(self) -> None:
        """Tell what waited for more rows: none come."""
        if self._summary is not None:
            self.run.sum_up(self._summary.end(), [])

    def take_records(self, records: Column, descriptors: Descriptors) -> None:
        """Take COUNTER *records* in; one of a metric that this version does not know is left out."""
        rows: list[Row] = []
        columns = (records[name].tolist() for name in ("start", "step", "descriptor", "size"))
        for time, step, number, value in zip(*columns, strict=True):
            known = descriptors[number] if number < len(descriptors) else None
            if known is None or known.kind != s.METRIC or known.name not in m.METRICS or time >= _MONOTONIC_MAX:
                continue
            scaled = value * m.RECORD_UNITS.get(m.METRICS[known.name].unit, 1.0)
            rows.append((time, NONE if step == NO_STEP else step, self._point(known.name, scaled, known.activity)))
        self.run.write(rows)

    def _point(self, metric: str, value: float, attributes: str) -> Point:
        if self.bind.role != "worker":
            attributes = attributes_text({**attributes_of(attributes), s.DL_ROLE: self.bind.role})
        return Point(metric, value, attributes, self.bind.rank)

    def is_near(self, window: Window, soon_s: float) -> bool:
        """Return whether the rank is in a step of *window*, or will be *soon_s* after the last one that is known."""
        ahead = min(_MOST_AHEAD, math.ceil(soon_s / self.step_s) if self.step_s else 0)
        return self.bind.role == "worker" and any(
            step in window for step in range(self.step + 1, self.step + 2 + ahead)
        )


class RunMetrics:
    """Where the points of one run go.

    Args:
        folder: The host's folder in the run directory.
        process: One of the run's.
        settings: Where metrics go over OpenTelemetry; None for nowhere.
        quota: How many bytes they may fill in the folder.

    Attributes:
        goes_out: Whether its points go to OpenTelemetry: not, if the SDK cannot be loaded.
        ended: When the last of its processes was gone, in monotonic ns; 0 before.
    """

    def __init__(self, folder: Path, process: Process, settings: MetricSettings | None, quota: int) -> None:
        self.ended = 0
        self._segments = MetricSegments(folder, quota)
        self._pipeline: Pipeline | None = None
        self._waiting: deque[Point] = deque(maxlen=_MOST_WAITING)
        self._uncounted: deque[Observed] = deque(maxlen=_MOST_WAITING)
        self._loader: Thread | None = None
        self.goes_out = settings is not None
        if settings is not None:
            args = (settings, _resource(process, folder.name))
            self._loader = Thread(target=self._load, args=args, name="otel_dltrace metrics", daemon=True)
            self._loader.start()

    def _load(self, settings: MetricSettings, resource: Mapping[str, str | int]) -> None:
        """Load the SDK, which may take a second, in which rings want to be read."""
        made = tried(_pipeline, settings, resource)
        if isinstance(made, Exception):
            self.goes_out = False
            say(f"no metrics are sent, since the SDK cannot be loaded ({type(made).__name__}: {text_of(made)})")
        else:
            self._pipeline = made

    @property
    def is_loaded(self) -> bool:
        """Whether the SDK is there, or not wanted."""
        return self._loader is None or not self._loader.is_alive()

    def write(self, rows: Sequence[Row]) -> None:
        """Write *rows* to the run directory and show them to OpenTelemetry."""
        if not rows:
            return
        self.observe([point for _, _, point in rows])
        try:
            self._segments.append(batch_of(rows))
        except OSError as error:
            say(f"metrics cannot be written ({error}); they are left out", "metrics file")

    def observe(self, points: Iterable[Point]) -> None:
        """Show *points* to OpenTelemetry."""
        if not self.goes_out:
            self._waiting.clear()
            self._uncounted.clear()
            return
        self._waiting.extend(points)
        if self._pipeline is not None:
            waiting = [*self._waiting]
            self._waiting.clear()
            self._pipeline.observe(waiting)

    def sum_up(self, observed: list[Observed], points: list[Point]) -> None:
        """Show a summary of steps to OpenTelemetry."""
        self._uncounted.extend(observed)
        if self._pipeline is not None:
            while self._uncounted:
                self._pipeline.count(self._uncounted.popleft())
        self.observe(points)

    def finish(self, until: float) -> None:
        """Close the files and begin the last export; the SDK may be loading *until* then (monotonic seconds)."""
        self._segments.close()
        if self._loader is not None:
            self._loader.join(max(until - monotonic(), 0.0))
        self.sum_up([], [])
        if self._pipeline is not None:
            self._pipeline.finish()

    def wait(self, until: float) -> bool:
        """Return whether the last export has ended by *until* (monotonic seconds)."""
        return self.is_loaded and (self._pipeline is None or self._pipeline.wait(until - monotonic()))

    @property
    def failed(self) -> bool:
        """Whether the last export got nowhere."""
        return self._pipeline is not None and self._pipeline.failed


def _pipeline(settings: MetricSettings, resource: Mapping[str, str | int]) -> "Pipeline":
    from otel_dltrace.export.metrics.pipeline import Pipeline

    return Pipeline(settings, resource)


def _resource(process: Process, host: str) -> dict[str, str | int]:
    """Return the resource of the run on a host: that of *process*'s spans without what is the process's alone.

    *host* is its folder's name: pods of one machine share its boot id, and two drains of one host even its name.
    """
    out = {k: v for k, v in resource_attributes(process).items() if k not in _OF_A_RANK}
    bind = process.bind
    assert bind is not None
    out[s.SERVICE_INSTANCE_ID] = instance_id(h64("metrics", bind.job, bind.generation, host))
    return out

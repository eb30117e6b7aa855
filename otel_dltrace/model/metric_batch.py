"""MetricBatch: the column layout in which metrics go from the drain to files, reports and counter tracks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from otel_dltrace.model.arrays import Column
from otel_dltrace.model.metrics import NOTHING, attributes_of

HOST = -1
"""In place of a rank: the value is the host's."""
NO_STEP = -1
"""In place of a step: the value belongs to none."""


class Point(NamedTuple):
    """One value, as a source gives it; the meaning of *value* is the metric's (`Metric.instrument`)."""

    metric: str
    value: float
    attributes: str = ""
    rank: int = HOST


@dataclass(frozen=True)
class MetricBatch:
    """Values of metrics on one host: equal-length columns, shape (n,), and the two tables they speak of.

    Attributes:
        time: CLOCK_MONOTONIC of the host in ns, like that of its spans; int64.
        metric: Index into *metrics*; int32.
        rank: The rank of the process, `HOST` for values of the host; int32.
        step: The step in which its process recorded the value, `NO_STEP` for what the drain sampled; int64.
        attribute: Index into *attributes*; int32.
        value: In the metric's unit; float64.
        metrics: Names of metrics.
        attributes: Canonical JSON objects (`metrics.attributes_text`), "" for none.
        host: The host's name.
        boot_id: The host's boot: times are comparable within one.
        wall: What to add to a time to get Unix ns.
    """

    time: Column
    metric: Column
    rank: Column
    step: Column
    attribute: Column
    value: Column
    metrics: tuple[str, ...]
    attributes: tuple[str, ...]
    host: str = "localhost"
    boot_id: str = ""
    wall: int = 0

    def __len__(self) -> int:
        """Return the number of values."""
        return len(self.time)

    def take(self, which: Any) -> "MetricBatch":
        """Return the values that *which* (a mask, a slice or indices) selects."""
        columns = {name: getattr(self, name)[which] for name in _COLUMNS}
        return replace(self, **columns)

    def of(self, metric: str, where: Mapping[str, str | int] = NOTHING) -> "MetricBatch":
        """Return the values of *metric* that have the attributes *where*, among others."""
        fits = np.array([_says(text, where) for text in self.attributes], bool)
        is_metric = np.array([name == metric for name in self.metrics], bool)
        if not (is_metric.any() and fits.any()):
            return self.take(np.zeros(0, np.intp))
        return self.take(is_metric[self.metric] & fits[self.attribute])

    def series(self) -> Iterable[tuple[str, int, str, "MetricBatch"]]:
        """Yield metric, rank and attributes of each series, and its values in order of time."""
        if not len(self):
            return
        keys = np.stack([self.metric.astype(np.int64), self.rank.astype(np.int64), self.attribute.astype(np.int64)])
        order = np.lexsort((self.time, keys[2], keys[1], keys[0]))
        keys = keys[:, order]
        begins = np.flatnonzero(np.append(True, (keys[:, 1:] != keys[:, :-1]).any(axis=0)))
        for begin, end in zip(begins, [*begins[1:], len(self)], strict=True):
            metric, rank, attribute = (int(key[begin]) for key in keys)
            yield self.metrics[metric], rank, self.attributes[attribute], self.take(order[begin:end])


_COLUMNS = ("time", "metric", "rank", "step", "attribute", "value")
_TYPES = {"time": np.int64, "metric": np.int32, "rank": np.int32, "step": np.int64, "attribute": np.int32}


def batch_of(
    rows: Sequence[tuple[int, int, Point]], host: str = "localhost", boot_id: str = "", wall: int = 0
) -> MetricBatch:
    """Return *rows*, each (time, step, point), as a batch."""
    metrics = tuple(dict.fromkeys(point.metric for _, _, point in rows))
    attributes = tuple(dict.fromkeys(point.attributes for _, _, point in rows))
    metric_at = {name: i for i, name in enumerate(metrics)}
    attribute_at = {text: i for i, text in enumerate(attributes)}
    columns: dict[str, Any] = {
        "time": [time for time, _, _ in rows],
        "metric": [metric_at[point.metric] for _, _, point in rows],
        "rank": [point.rank for _, _, point in rows],
        "step": [step for _, step, _ in rows],
        "attribute": [attribute_at[point.attributes] for _, _, point in rows],
        "value": [point.value for _, _, point in rows],
    }
    arrays = {name: np.array(values, _TYPES.get(name, np.float64)) for name, values in columns.items()}
    return MetricBatch(**arrays, metrics=metrics, attributes=attributes, host=host, boot_id=boot_id, wall=wall)


def _says(text: str, wanted: Mapping[str, str | int]) -> bool:
    said = attributes_of(text)
    return all(said.get(name) == value for name, value in wanted.items())

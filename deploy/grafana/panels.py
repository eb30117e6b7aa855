"""What a dashboard is made of: panels that ask something, and the PromQL that several of them ask with."""

from collections.abc import Mapping
from dataclasses import dataclass

LINES, STACK, ROWS, BUCKETS, TRACES = "lines", "stack", "rows", "buckets", "traces"


@dataclass(frozen=True)
class Panel:
    """What is asked, and how the answer is shown.

    Attributes:
        title: A few words.
        text: What one sees there, and how to read it.
        queries: The query for each legend: PromQL, and for `TRACES` TraceQL.
        unit: Grafana's name of the unit.
        show: `LINES`; `STACK` of them; `ROWS`: a heat map with a row for each series; `BUCKETS`: one of a
            histogram; `TRACES`: a table.
    """

    title: str
    text: str
    queries: Mapping[str, str]
    unit: str = "s"
    show: str = LINES


@dataclass(frozen=True)
class Dashboard:
    """Rows of panels.

    Attributes:
        name: Its file, and the end of its URL.
        title: For people.
        variables: What can be chosen: for each name the query for its values.
        rows: The panels under each title.
    """

    name: str
    title: str
    variables: Mapping[str, str]
    rows: Mapping[str, tuple[Panel, ...]]


# What the gateway's collector shows to Prometheus: its span_metrics, and the metrics of model/metrics.py.
SPANS = "traces_span_metrics_duration_seconds"
CALLS = "traces_span_metrics_calls_total"
JOBS = {"job": "label_values(dl_step_duration_seconds_count, service_name)"}
OF_JOB = 'service_name=~"$job"'
# Ranks of several jobs have the same numbers.
RANKS, RANK = "service_name, dl_rank", "{{service_name}} rank {{dl_rank}}"


def rate(metric: str, where: str, by: str) -> str:
    """Return how fast a counter grows, a second."""
    return f"sum by ({by}) (rate({metric}{{{where}}}[$__rate_interval]))"


def mean(histogram: str, where: str, by: str) -> str:
    """Return the mean of what a histogram has seen."""
    return f"{rate(histogram + '_sum', where, by)} / {rate(histogram + '_count', where, by)}"


def quantile(q: float, histogram: str, where: str, by: str = "") -> str:
    """Return a quantile of what a histogram has seen."""
    return f"histogram_quantile({q}, {rate(histogram + '_bucket', where, 'le' + (', ' + by if by else ''))})"

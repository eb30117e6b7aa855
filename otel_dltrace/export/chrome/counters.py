"""Metrics as counter tracks of a Chrome trace: below the lanes of the rank whose process it is, or of its host."""

from collections.abc import Iterator

import numpy as np

from otel_dltrace.export.chrome.events import CHUNK, Chunk
from otel_dltrace.export.chrome.flows import FLOW_DTYPE
from otel_dltrace.export.chrome.marks import microseconds, quote
from otel_dltrace.export.chrome.text import Piece, digits, join, literal, zero_padded
from otel_dltrace.model import metrics as m
from otel_dltrace.model.metric_batch import MetricBatch
from otel_dltrace.model.spans import Column
from otel_dltrace.model.usage import SHOWN, Quantity, Usage, usages

# Whole numbers, in units in which these say enough.
_UNITS = {
    "1": ("%", 100.0),
    "By": ("bytes", 1.0),
    "By/s": ("bytes/s", 1.0),
    "/s": ("per s", 1.0),
    "{cpu}": ("% of one CPU", 100.0),
    "{thread}": ("", 1.0),
    "W": ("mW", 1000.0),
    "Cel": ("°C", 1.0),
}


def tracks(batch: MetricBatch) -> Iterator[tuple[Usage, str, Column, Column]]:
    """Yield of each track of a host whose metric it is, its name, and its times (monotonic ns) and values (int64).

    A rate, or a share of a time, is drawn from the begin of that time; a level when it was seen.
    """
    for quantity in SHOWN:
        is_level = m.METRICS[quantity.metric].instrument == m.UPDOWNCOUNTER
        unit, scale = _UNITS[quantity.unit]
        for usage in usages(batch, quantity):
            values = np.rint(usage.value * scale).astype(np.int64)
            # Since when the first sample of a share holds is not known.
            drawn = slice(None) if is_level else usage.end > usage.begin
            times = usage.end if is_level else usage.begin
            yield usage, _name(quantity, usage, unit), times[drawn], values[drawn]


def _name(quantity: Quantity, usage: Usage, unit: str) -> str:
    return " ".join(filter(None, (usage.of, quantity.name, unit and f"({unit})")))


def track_chunks(name: str, ns: Column, values: Column, pid: int) -> Iterator[Chunk]:
    """Yield the events of a track; *ns* is after the trace's base, and what is before that is left out."""
    head = f',\n{{"ph":"C","tid":0,"pid":{pid},"name":{quote(name)},"cat":"metric","ts":'.encode()
    drawn = ns >= 0
    ns, values = ns[drawn], values[drawn]
    for first in range(0, len(ns), CHUNK):
        whole, part = microseconds(ns[first : first + CHUNK])
        pieces: list[Piece] = [
            (literal(head), None),
            (digits(whole), None),
            (literal(b"."), None),
            (zero_padded(part, 4), None),
            (literal(b',"args":{"value":'), None),
            (digits(values[first : first + CHUNK]), None),
            (literal(b"}}"), None),
        ]
        yield Chunk(join(len(whole), pieces), len(whole), np.zeros(0, FLOW_DTYPE))

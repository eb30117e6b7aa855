"""Metrics as counter tracks of a Chrome trace: below the lanes of the rank whose process it is, or of its host."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from otel_dltrace.export.chrome.events import CHUNK, Chunk
from otel_dltrace.export.chrome.marks import HOST_ORDER, microseconds, process_metadata, quote
from otel_dltrace.export.chrome.text import Piece, digits, join, literal, zero_padded
from otel_dltrace.model import metrics as m
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.metric_batch import MetricBatch
from otel_dltrace.model.usage import SHOWN, usages

# Whole numbers, in units in which these say enough; viewers show the unit after the name, or as that of a series.
_UNITS = {
    "1": ("%", 100.0),
    "By": ("bytes", 1.0),
    "By/s": ("bytes/s", 1.0),
    "/s": ("per s", 1.0),
    "{cpu}": ("% of one CPU", 100.0),
    "{thread}": ("count", 1.0),
    "W": ("mW", 1000.0),
    "Cel": ("°C", 1.0),
}


@dataclass(frozen=True)
class Track:
    """A counter: times in ns of the host's monotonic clock, values int64; *rank* is that of a worker, else `HOST`."""

    rank: int
    name: str
    unit: str
    times: Column
    values: Column


def tracks(batch: MetricBatch) -> Iterator[Track]:
    """Yield the tracks of a host.

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
            yield Track(usage.rank, f"{usage.of} {quantity.name}".strip(), unit, times[drawn], values[drawn])


class HostTracks:
    """The tracks of one host, and the process (*pid*, 0 while it needs none) that stands for it."""

    def __init__(self, batch: MetricBatch) -> None:
        self.batch = batch
        self.tracks = list(tracks(batch))
        self.pid = 0
        self._times = np.sort(np.concatenate([np.zeros(0, np.int64), *(track.times for track in self.tracks)]))

    def samples(self, between: tuple[int, int], shift: int) -> int:
        """Return how many samples are *between* these once *shift* was added to their times."""
        first, last = np.searchsorted(self._times, np.array(between) - shift).tolist()
        return int(last - first)

    def metadata(self) -> Iterator[str]:
        """Yield the lines that name the process."""
        return process_metadata(self.pid, f"host {self.batch.host}", "metrics", HOST_ORDER)


def track_chunks(track: Track, shift: int, pid: int, between: tuple[int, int]) -> Iterator[Chunk]:
    """Yield the events of a track, *shift* added to its times, that are *between* these, the second not included."""
    head = f',\n{{"ph":"C","tid":0,"pid":{pid},"name":{quote(track.name)},"cat":"metric","ts":'.encode()
    args = f',"args":{{{quote(track.unit)}:'.encode()
    ns = track.times + np.int64(shift)
    shown = (ns >= between[0]) & (ns < between[1])
    ns, values = ns[shown], track.values[shown]
    for first in range(0, len(ns), CHUNK):
        whole, part = microseconds(ns[first : first + CHUNK])
        pieces: list[Piece] = [
            (literal(head), None),
            (digits(whole), None),
            (literal(b"."), None),
            (zero_padded(part, 4), None),
            (literal(args), None),
            (digits(values[first : first + CHUNK]), None),
            (literal(b"}}"), None),
        ]
        yield Chunk(join(len(whole), pieces), len(whole))

"""ByteScheduler's timeline: by tensor, how long each operation was queued and communicated; an array on one line.

Times are us since its profiler began, which no event tells; a comma stands behind the last event, or no end at all.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from otel_dltrace.formats.comm_spans import Rows
from otel_dltrace.formats.json_events import read_events, whole_us
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import empty_rows
from otel_dltrace.model.text import clean

_BACKEND = "bytescheduler"
_US = 1000
_LATEST = 9_000_000_000_000_000


class Bar(NamedTuple):
    """One activity of a tensor, such as ``PUSHQUEUE`` or ``PULLCOMMUNICATION``; us since the profiler began."""

    tensor: str
    activity: str
    start: int
    end: int


class Schedule(NamedTuple):
    """The bars in the order in which they begin in the file, and what is missing, a sentence each."""

    bars: list[Bar]
    notes: tuple[str, ...] = ()


def read_schedule(data: bytes) -> Schedule:
    """Return the bars of a timeline of ByteScheduler. Never raises."""
    found = read_events(data.decode("utf-8-sig", "replace"))
    bars, strange, lone = _paired(found.events)
    notes = list(found.notes)
    if strange:
        notes.append(f"events left out because they are not ByteScheduler's: {strange:,}")
    if lone:
        notes.append(f"begins and ends left out because the other is missing: {lone:,}")
    return Schedule(bars, tuple(notes))


def _paired(events: Iterable[Any]) -> tuple[list[Bar], int, int]:
    """Return the bars, how many events are none of ByteScheduler, and how many begins and ends stand alone."""
    names: dict[int, str] = {}
    open_bars: dict[tuple[int, str], deque[int]] = {}
    bars: list[Bar | None] = []
    begun: list[tuple[int, int]] = []
    strange = lone = 0
    for event in events:
        try:
            phase, pid, name = event["ph"], int(event["pid"]), str(event["name"])
            if phase == "M":
                names.setdefault(pid, str(event["args"].get("name", "")))
                continue
            at, key = whole_us(event["ts"], _LATEST), (pid, name)
            waiting = open_bars.setdefault(key, deque())
            if phase == "B":
                waiting.append(len(bars))
                bars.append(None)
                begun.append((pid, at))
            elif phase == "E" and waiting:
                number = waiting.popleft()
                bars[number] = Bar(str(pid), name, begun[number][1], at)
            elif phase == "E":
                lone += 1
            else:
                strange += 1
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
            strange += 1
    lone += sum(bar is None for bar in bars)
    whole = [bar._replace(tensor=clean(names.get(int(bar.tensor), bar.tensor))) for bar in bars if bar is not None]
    return whole, strange, lone


def rows_of(bars: Sequence[Bar]) -> Rows:
    """Return *bars* as rows in their order, outside any step; times are ns since the profiler began."""
    known: dict[Descriptor, int] = {}
    rows = empty_rows(len(bars))
    rows["span_no"] = np.arange(1, len(rows) + 1)
    rows["step"], rows["level"], rows["b"] = NO_STEP, s.Level.PHASE, -1
    if bars:
        rows["descriptor"] = [known.setdefault(_descriptor(bar), len(known)) for bar in bars]
        rows["start"] = np.array([bar.start for bar in bars], np.int64) * _US
        rows["end"] = np.array([bar.end for bar in bars], np.int64) * _US
    return Rows(rows, list(known))


def _descriptor(bar: Bar) -> Descriptor:
    return Descriptor(s.PHASE, bar.activity, backend=_BACKEND, tensor=bar.tensor, activity=bar.activity)

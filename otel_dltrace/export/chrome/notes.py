"""What was found out about a run, drawn beside its spans: a lane of remarks for each rank."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from otel_dltrace.export.chrome.layout import colour
from otel_dltrace.export.chrome.marks import lane_metadata, microseconds
from otel_dltrace.model.attributes import Value

NOTES = "slow stages"
_FIRST_TID, _PLACE = 1 << 23, 4_000_000
_SLICE = '{"ph":"X","tid":%d,"pid":%d,"ts":%d.%04d,"dur":%d.%04d,"name":%s,"cat":"note","cname":"bad","args":%s}'

_FRAME_BYTES = len(_SLICE) + 40


@dataclass(frozen=True, slots=True)
class Note:
    """A remark on what the process with *nonce* did from *start* to *end* (monotonic ns)."""

    nonce: int
    start: int
    end: int
    name: str
    args: Mapping[str, Value] = field(default_factory=dict)


def bytes_of(note: Note) -> int:
    """Return how long the text of *note*'s event is, about."""
    return _FRAME_BYTES + len(json.dumps(note.name)) + len(json.dumps(dict(note.args)))


def note_lines(notes: Sequence[Note], shift: int, pid: int) -> Iterator[str]:
    """Yield the events of one process's *notes*, on lanes of their own; *shift* is added to their times."""
    ordered = sorted(notes, key=lambda note: (note.start, note.end))
    start = np.array([note.start + shift for note in ordered], np.int64)
    end = np.array([note.end + shift for note in ordered], np.int64)
    taken: list[int] = []
    lanes = np.broadcast_to(colour(start, end, taken), len(ordered)).tolist()
    for lane in range(len(taken)):
        yield from lane_metadata(pid, _FIRST_TID + lane, NOTES + (f" {lane + 1}" if lane else ""), _PLACE + lane)
    columns = (*microseconds(start), *microseconds(end - start))
    stamps = zip(*(column.tolist() for column in columns), strict=True)
    for note, lane, stamp in zip(ordered, lanes, stamps, strict=True):
        yield _SLICE % (_FIRST_TID + lane, pid, *stamp, json.dumps(note.name), json.dumps(dict(note.args)))

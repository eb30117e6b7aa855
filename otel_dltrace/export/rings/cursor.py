"""How far a ring has been read, beside the ring: a drain that is killed is followed by one that goes on there."""

import json
import struct
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import NamedTuple

import numpy as np

from otel_dltrace.export.files import write_whole
from otel_dltrace.export.rings.reader import TAKEN
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.spans import SPAN_DTYPE, empty_rows
from otel_dltrace.record.ring_file import LEVELS, read_whole

DOUBT_S = 60.0
"""How long after a drain took over, a span that it reads may be one that its predecessor wrote."""
_HEAD = struct.Struct("<8sIII")
"""Magic, and the lengths in bytes of what follows: plain values as JSON, `taken`, `unfinished`."""
_MAGIC = b"DLTCURS2"
_WITHIN_RUN = 2
"""How far below its run directory a host's folder is."""


class Place(NamedTuple):
    """What of a process's spans in one host's folder is safe.

    Attributes:
        segment: The segment that was open; it held `rows` rows of all processes.
        rows: See `segment`.
        written: How many spans of the process are in the folder.
        undelivered: The first step whose spans were not all acknowledged or spilled.
        loose: Whether spans outside any step were not.
        truncated: How many of those in the folder were cut off.
    """

    segment: int = -1
    rows: int = 0
    written: int = 0
    undelivered: int = 0
    loose: bool = True
    truncated: int = 0

    def behind(self, earlier: "Place | None") -> "Place":
        """Return this place as that of both, where the process was of the run before as well."""
        if earlier is None:
            return self
        undelivered, loose = min(earlier.undelivered, self.undelivered), earlier.loose or self.loose
        written, truncated = earlier.written + self.written, earlier.truncated + self.truncated
        return self._replace(undelivered=undelivered, loose=loose, written=written, truncated=truncated)


@dataclass
class Cursor:
    """The state of one ring's reading that is safe: what it covers is in the run directory.

    Attributes:
        taken: Slots read, per chunk: an array of `TAKEN`.
        unfinished: Open spans and stages that were held.
        places: By the host's folder that the spans went to: one for each run that the process has been of.
        lapped: How many records of each level (1..4) were overwritten before they were read.
    """

    taken: Column | None = None
    unfinished: Column = field(default_factory=empty_rows)
    places: dict[str, Place] = field(default_factory=dict)
    lapped: list[int] = field(default_factory=lambda: [0] * (LEVELS + 1))

    def write(self, path: Path) -> None:
        """Write the cursor, whole or not at all."""
        plain = json.dumps({name: getattr(self, name) for name in _PLAIN}).encode()
        taken = b"" if self.taken is None else self.taken.tobytes()
        unfinished = self.unfinished.tobytes()
        head = _HEAD.pack(_MAGIC, len(plain), len(taken), len(unfinished))
        write_whole(path, b"".join([head, plain, taken, unfinished]))

    @classmethod
    def read(cls, path: Path) -> "Cursor":
        """Return the cursor in *path*; a fresh one where it is absent or damaged."""
        try:
            data = read_whole(path)
            magic, *lengths = _HEAD.unpack_from(data)
            plain_ends, taken_ends, ends = np.cumsum([_HEAD.size, *lengths])[1:].tolist()
            if magic != _MAGIC or ends != len(data):
                return cls()
            taken = np.frombuffer(data[plain_ends:taken_ends], TAKEN).copy()
            unfinished = np.frombuffer(data[taken_ends:], SPAN_DTYPE).copy()
            plain = json.loads(data[_HEAD.size : plain_ends])
            places = {folder: Place(*place) for folder, place in plain.pop("places").items()}
            if any(len(Path(folder).parents) < _WITHIN_RUN for folder in places):
                return cls()
            return cls(taken, unfinished, places, **plain)
        except (OSError, AttributeError, LookupError, TypeError, ValueError, struct.error):
            return cls()


_PLAIN = [f.name for f in fields(Cursor) if f.name not in ("taken", "unfinished")]

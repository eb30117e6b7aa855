"""How far a ring has been read, beside the ring: a drain that is killed is followed by one that goes on there."""

import json
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from otel_dltrace.export.files import read_json, write_whole
from otel_dltrace.model.spans import SPAN_DTYPE, Column, empty_rows
from otel_dltrace.record.ring import Taken


@dataclass
class Cursor:
    """The state of one ring's reading that is safe: what it covers is in the run directory.

    Attributes:
        taken: Slots read, per chunk.
        unfinished: Open spans and stages that were held.
        folder: The host's folder that the spans went to, "" before any did.
        segment: The segment that was open; it held `rows` rows of all processes.
        rows: See `segment`.
        undelivered: The first step whose spans were not all acknowledged or spilled.
        loose: Whether spans outside any step were not.
        written: How many spans of the process are in `folder`.
    """

    taken: dict[int, Taken] = field(default_factory=dict)
    unfinished: Column = field(default_factory=empty_rows)
    folder: str = ""
    segment: int = 0
    rows: int = 0
    undelivered: int = 0
    loose: bool = True
    written: int = 0

    def write(self, path: Path) -> None:
        """Write the cursor, whole or not at all."""
        plain: dict[str, Any] = {k: v for k, v in _fields(self).items() if k not in ("taken", "unfinished")}
        plain["taken"] = [[index, t.lease, t.slots, t.levels] for index, t in self.taken.items()]
        plain["unfinished"] = b64encode(self.unfinished.tobytes()).decode()
        write_whole(path, json.dumps(plain, separators=(",", ":")).encode())

    @classmethod
    def read(cls, path: Path) -> "Cursor":
        """Return the cursor in *path*; a fresh one where it is absent or damaged."""
        plain = read_json(path)
        if not isinstance(plain, dict):
            return cls()
        try:
            plain["taken"] = {index: Taken(lease, slots, levels) for index, lease, slots, levels in plain["taken"]}
            plain["unfinished"] = np.frombuffer(b64decode(plain["unfinished"]), SPAN_DTYPE).copy()
            return cls(**plain)
        except (KeyError, TypeError, ValueError):
            return cls()


def _fields(cursor: Cursor) -> dict[str, Any]:
    # dataclasses.asdict would copy a thousand chunks' states first.
    return {name: getattr(cursor, name) for name in Cursor.__dataclass_fields__}

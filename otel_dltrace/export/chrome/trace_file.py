"""One file of a trace that is drawn from batches: whole or absent, and complete by itself."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from otel_dltrace.export.chrome.events import Chunk
from otel_dltrace.export.chrome.flows import Flows
from otel_dltrace.export.files import open_whole

_ARROW_BYTES = 160
"""The text of one end of an arrow, at most; arrows are written last, so room is kept for them."""


class TraceFile:
    """The file, and the little that must be remembered of what was drawn in it.

    Attributes:
        path: Its name once it is whole.
        events: How many were written.
        spans: The slices and moments of each process (pid) that spans are drawn as.
        named: The lanes (of a process: lane 0) that have their names.
        first: Where the first slice begins, in ns after the trace's zero; None without one.
        last: Where the last ends.
    """

    def __init__(self, path: Path, files: ExitStack) -> None:
        self.path = path
        self.events = 0
        self.spans: Counter[int] = Counter()
        self.named: set[tuple[int, int]] = set()
        self.first: int | None = None
        self.last = 0
        self._size = self._ends = 0
        self._closing = ExitStack()
        files.push(self._closing)
        self._out = self._closing.enter_context(open_whole(path))
        self._flows = Flows(self._closing)
        # "ns", since chrome://tracing nests slices to the us under "ms": what is shorter lands in its neighbour.
        self._out.write(b'{"displayTimeUnit":"ns","traceEvents":[')

    @property
    def size(self) -> int:
        """Bytes of JSON that it will have, before gzip, as far as is known."""
        return self._size + (self._ends * _ARROW_BYTES if len(self.spans) > 1 else 0)

    def write(self, chunk: Chunk) -> None:
        """Write the events of *chunk*."""
        self.write_text(chunk.text, chunk.events)
        self._flows.add(chunk.flows)
        self._ends += len(chunk.flows)

    def write_spans(self, chunk: Chunk, pid: int) -> None:
        """Write the spans of *chunk*, which are of the process *pid*."""
        self.write(chunk)
        self.spans[pid] += chunk.events
        self.first = chunk.first if self.first is None else min(self.first, chunk.first)
        self.last = max(self.last, chunk.last)

    def write_lines(self, lines: Iterable[str]) -> None:
        """Write *lines*, an event each."""
        for line in lines:
            self.write_text(b",\n" + line.encode(), 1)

    def write_text(self, text: bytes, events: int) -> None:
        """Write *text*, events that begin with a comma each; the first of all has none."""
        text = text if self.events else text[1:]
        self._out.write(text)
        self.events += events
        self._size += len(text)

    def close(self, about: Mapping[str, Any]) -> None:
        """Write the arrows and what describes the whole; the file gets its name."""
        for text, events in self._flows.lines():
            self.write_text(text, events)
        self._out.write(b'\n],"otherData":' + json.dumps(about).encode() + b"}\n")
        self._closing.close()

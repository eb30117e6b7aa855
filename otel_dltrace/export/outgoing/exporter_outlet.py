"""Any OpenTelemetry SpanExporter as a way out of the drain, in a thread of its own.

The SDK's BatchSpanProcessor counts neither what it drops nor what an exporter refuses, its shutdown
takes as long as the exporter likes, and who hands it spans pays for making them. Here rows are handed
over as they are, and become spans in the exporter's thread.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_dltrace.export.outgoing.departing import Departing, Tag, parts_of, tags_of
from otel_dltrace.export.outgoing.gate import Outgoing
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.record.guard import guarded, say, text_of, tried

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

MOST_WAITING = 1 << 16
"""Spans that may wait for an exporter; what comes while there are more is dropped."""
AT_ONCE = 512
"""Spans in one call of `export`, as many as the SDK gives."""
SLOW, LATE, REFUSED = "was too slow", "had not taken them when the drain ended", "returned FAILURE"


class _Work(NamedTuple):
    """What one call of `send` brought."""

    batch: SpanBatch
    outgoing: Sequence[Outgoing]
    spans: int
    tags: frozenset[Tag]


class ExporterOutlet:
    """Gives spans to one exporter; where that raises, blocks or is slow, nobody else waits and the loss is counted.

    Args:
        name: What ``OTEL_TRACES_EXPORTER`` calls it.
        make: Returns the exporter. It is called in the thread, once there are spans: imports, and
            what a constructor does, may take long and fail as well.
        most_waiting: Spans that may wait.
    """

    def __init__(self, name: str, make: "Callable[[], SpanExporter]", most_waiting: int = MOST_WAITING) -> None:
        self.name = name
        self._make, self._most_waiting = make, most_waiting
        # Guards all that follows; it is never held while the exporter's own code runs.
        self._changed = Condition()
        self._queue: deque[_Work] = deque()
        self._unsettled: Counter[Tag] = Counter()
        self._waiting = self._accepted = 0
        self._dropped: Counter[str] = Counter()
        self._trouble = ""
        self._finishing = self._stopped = False
        self._thread: Thread | None = None

    def send(self, batch: SpanBatch, outgoing: Sequence[Outgoing]) -> None:
        """Queue *outgoing*, rows of *batch*'s process; never blocks."""
        parts = [out for out in outgoing if len(out.rows)]
        if not parts:
            return
        work = _Work(batch, parts, sum(len(out.rows) for out in parts), tags_of(batch, parts))
        with self._changed:
            if self._waiting >= self._most_waiting:
                self._dropped[SLOW] += work.spans
                return
            self._queue.append(work)
            self._waiting += work.spans
            self._unsettled.update(work.tags)
            self._changed.notify()
            if self._thread is None:
                self._thread = Thread(target=guarded(self._run), name=f"otel_dltrace {self.name}", daemon=True)
                self._thread.start()

    def unsettled(self) -> set[Tag]:
        """Return the tags of what the exporter has not been given yet."""
        with self._changed:
            return set(self._unsettled)

    def figures(self) -> dict[str, Any]:
        """Return what became of the spans so far."""
        with self._changed:
            counts = {"accepted": self._accepted, "waiting": self._waiting, "dropped": dict(self._dropped)}
            return {**counts, "trouble": self._trouble}

    def finish(self) -> None:
        """Have the exporter shut down as soon as nothing waits for it."""
        with self._changed:
            self._finishing = True
            self._changed.notify()

    def close(self, timeout: float) -> None:
        """Give the exporter *timeout* seconds for what waits, and drop the rest."""
        self.finish()
        if self._thread is not None:
            self._thread.join(timeout)
        with self._changed:
            self._stopped = True
            self._dropped += Counter({LATE: self._waiting})
            self._waiting = 0
            self._queue.clear()
            self._unsettled.clear()

    @property
    def is_stuck(self) -> bool:
        """Whether the exporter keeps its thread from ending."""
        return self._thread is not None and self._thread.is_alive()

    # -- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        _suppress_instrumentation()
        exporter = tried(self._make)
        while (work := self._next()) is not None:
            for part in parts_of(work.batch, work.outgoing):
                for at in range(0, len(part.batch), AT_ONCE):
                    which = slice(at, at + AT_ONCE)
                    self._settle(len(part.batch.rows[which]), self._give(exporter, part, which))
            self._forget(work.tags)
        if not isinstance(exporter, Exception):
            tried(exporter.shutdown)

    def _next(self) -> _Work | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._finishing)
            return self._queue.popleft() if self._queue else None

    def _give(self, exporter: "SpanExporter | Exception", part: Departing, which: slice) -> str:
        """Return why *exporter* does not have some spans of *part* now, "" if it has."""
        if self._stopped:
            return LATE
        outcome = exporter if isinstance(exporter, Exception) else tried(_export, exporter, part, which)
        if isinstance(outcome, Exception):
            kind = type(outcome).__name__
            self._trouble = f"{kind}: {text_of(outcome)}"
            say(f"the exporter {self.name} raised {self._trouble}; its spans are dropped", f"{self.name} {kind}")
            return f"raised {kind}"
        return "" if outcome else REFUSED

    def _settle(self, spans: int, why_not: str) -> None:
        with self._changed:
            if self._stopped:
                return  # they count as dropped already
            self._waiting -= spans
            if why_not:
                self._dropped[why_not] += spans
            else:
                self._accepted += spans

    def _forget(self, tags: frozenset[Tag]) -> None:
        with self._changed:
            self._unsettled -= Counter(tags)


def _suppress_instrumentation() -> None:
    """Keep what exporters do in this thread (HTTP requests) from being traced, as the SDK does around each export."""
    from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, set_value

    attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))


def _export(exporter: "SpanExporter", part: Departing, which: slice) -> bool:
    """Return whether *exporter* took the rows *which* of *part*."""
    from opentelemetry.sdk.trace.export import SpanExportResult

    from otel_dltrace.export.sdk import readable_spans

    left_out = None if part.left_out is None else part.left_out[which]
    spans = readable_spans(part.batch.take(which), part.trace_ids[which], left_out)
    return exporter.export(spans) is not SpanExportResult.FAILURE

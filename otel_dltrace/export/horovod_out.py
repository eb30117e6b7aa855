"""A run as Horovod's timeline: what Horovod told of its operations, in its own words."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from otel_dltrace.export.files import begun, write_pieces
from otel_dltrace.formats.horovod_json import Event, write_events
from otel_dltrace.formats.horovod_spans import events_of
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.spans import Process, SpanBatch


def write_horovod(spans: Mapping[Process, Iterable[SpanBatch]], path: Path, progress: Callable[[int], None]) -> int:
    """Write the timeline of *spans* to *path*; return the number of its events.

    Of several processes that have one, each has ``<n>.json`` below the directory *path*.

    Args:
        spans: Those of each process, in pieces that are gone through twice.
        path: The file.
        progress: Is told of events that are done.

    Raises:
        RunNotFoundError: Horovod told nothing there.
    """
    timelines = [events for pieces in spans.values() if (events := begun(events_of(pieces))) is not None]
    if not timelines:
        raise RunNotFoundError("no activity of Horovod is in there, and its timeline holds nothing else")
    written = 0

    def counted(events: Iterable[Event]) -> Iterator[Event]:
        nonlocal written
        for event in events:
            written += 1
            yield event

    for number, events in enumerate(timelines):
        before = written
        write_pieces(path if len(timelines) == 1 else path / f"{number}.json", write_events(counted(events)))
        progress(written - before)
    return written

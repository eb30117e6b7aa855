"""A run as Horovod's timeline: what Horovod told of its operations, in its own words."""

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

from otel_dltrace.export.files import open_whole
from otel_dltrace.formats.horovod_json import Event, write_events
from otel_dltrace.formats.horovod_spans import events_of
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.spans import SpanBatch


def write_horovod(batches: Iterable[SpanBatch], path: Path, progress: Callable[[int], None]) -> int:
    """Write the timeline of *batches* to *path*; return the number of its events.

    Of several processes that have one, each has ``<n>.json`` below the directory *path*.

    Raises:
        RunNotFoundError: Horovod told nothing there.
    """
    timelines = []
    for batch in batches:
        events = events_of(batch)
        first = next(events, None)
        if first is not None:
            timelines.append(chain([first], events))
    if not timelines:
        raise RunNotFoundError("no activity of Horovod is in there, and its timeline holds nothing else")
    written = 0
    for number, events_of_one in enumerate(timelines):
        place = path if len(timelines) == 1 else path / f"{number}.json"
        counted = _Counted(events_of_one)
        place.parent.mkdir(parents=True, exist_ok=True)
        with open_whole(place) as out:
            for piece in write_events(counted):
                out.write(piece)
        progress(counted.count)
        written += counted.count
    return written


class _Counted:
    """Passes events on, and counts them."""

    def __init__(self, events: Iterable[Event]) -> None:
        self.events, self.count = events, 0

    def __iter__(self) -> Iterator[Event]:
        for event in self.events:
            self.count += 1
            yield event

"""A run as Horovod's timelines: what Horovod told of its operations, in its own words."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path

from otel_dltrace.export.rundir.several import check_place, write_each
from otel_dltrace.formats.horovod_events import count_timelines, timelines_of
from otel_dltrace.formats.horovod_writer import write_events
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.spans import Process, SpanBatch


def write_horovod(
    spans: Mapping[Process, Iterable[SpanBatch]],
    path: Path,
    progress: Callable[[int], None],
    wrote: Callable[[Path], None],
) -> int:
    """Write the timeline of *spans* to *path*; return the number of its events.

    Where there are several (of several processes, or of one that began several), each has ``<n>.json`` below the
    directory *path*: from 0, those of one process in the order of their times.

    Args:
        spans: Those of each process, in pieces that are gone through three times.
        path: The file.
        progress: Is told of events that are done.
        wrote: Called with each file once it has its name.

    Raises:
        RunNotFoundError: Horovod told nothing there.
        ConfigError: There are several timelines, and *path* is a file.
    """
    count = sum(map(count_timelines, spans.values()))
    if not count:
        raise RunNotFoundError("the run has no activity of Horovod, and its timeline holds nothing else")
    check_place(path, count, "timeline")
    timelines = enumerate(chain.from_iterable(map(timelines_of, spans.values())))
    files = ((path if count == 1 else path / f"{number}.json", events) for number, events in timelines)
    return write_each(files, write_events, progress, wrote)


def timelines_in(path: Path) -> Iterator[Path]:
    """Yield what `write_horovod` may have written in the directory *path*, if it is one."""
    return (file for file in path.glob("*.json") if file.stem.isdecimal())

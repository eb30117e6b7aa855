"""A run as ps-lite's van profiles: what each node received."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from otel_dltrace.export.rundir.several import begun, check_place, write_each
from otel_dltrace.formats.van_profile import van_lines
from otel_dltrace.formats.van_spans import messages_of
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.spans import Process, SpanBatch

_NAME = "pslite_van_profile"


def write_van_profiles(
    spans: Mapping[Process, Iterable[SpanBatch]],
    path: Path,
    progress: Callable[[int], None],
    wrote: Callable[[Path], None],
) -> int:
    """Write the van profile in *spans* to *path*; return the number of its messages.

    Of several nodes each has ``<role>-<rank>/pslite_van_profile`` below the directory *path*.

    Args:
        spans: Those of each process, in pieces.
        path: The file.
        progress: Is told of messages that are done.
        wrote: Called with each file once it has its name.

    Raises:
        RunNotFoundError: No message of a van is there.
        ConfigError: There are several nodes, and *path* is a file.
    """
    nodes = [(process, found) for process, pieces in spans.items() if (found := begun(messages_of(pieces)))]
    if not nodes:
        raise RunNotFoundError("the run has no message of ps-lite's van, and its profile holds nothing else")
    check_place(path, len(nodes), "profile")
    files = ((path if len(nodes) == 1 else path / _node(process) / _NAME, messages) for process, messages in nodes)
    return write_each(files, van_lines, progress, wrote)


def vans_in(path: Path) -> Iterator[Path]:
    """Yield what `write_van_profiles` may have written below the directory *path*."""
    return path.glob(f"*-[0-9]*/{_NAME}")


def _node(process: Process) -> str:
    return f"{process.bind.role}-{process.bind.rank}" if process.bind else "node"

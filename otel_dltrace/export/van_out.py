"""A run as ps-lite's van profiles: what each node received."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from otel_dltrace.export.files import begun, write_pieces
from otel_dltrace.formats.van_profile import van_lines
from otel_dltrace.formats.van_spans import messages_of
from otel_dltrace.model.errors import ConfigError, RunNotFoundError
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
        raise RunNotFoundError("no message of ps-lite's van is in there, and its profile holds nothing else")
    if len(nodes) > 1 and path.exists() and not path.is_dir():
        raise ConfigError(f"{path} takes one profile, and there are {len(nodes)}; give -o a new name, of a directory")
    written = 0

    def counted(lines: Iterable[bytes]) -> Iterator[bytes]:
        nonlocal written
        for line in lines:
            written += 1
            yield line

    for process, messages in nodes:
        before, target = written, path if len(nodes) == 1 else path / _node(process) / _NAME
        write_pieces(target, counted(van_lines(messages)))
        wrote(target)
        progress(written - before)
    return written


def vans_in(path: Path) -> Iterator[Path]:
    """Yield what `write_van_profiles` may have written below the directory *path*."""
    return path.glob(f"*-[0-9]*/{_NAME}")


def _node(process: Process) -> str:
    return f"{process.bind.role}-{process.bind.rank}" if process.bind else "node"

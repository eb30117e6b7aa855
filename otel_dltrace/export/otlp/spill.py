"""Requests that wait on disk for a collector that is away: one file each, bounded, oldest first."""

import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_NAME = re.compile(r"(\d{8,})-(\d{4,})\.otlp")
_UNFINISHED = ".otlp.partial"


@dataclass(frozen=True, slots=True)
class Spilled:
    """One request on disk: ``NNNNNNNN-SSSS.otlp``, its number and how many spans it holds."""

    path: Path
    number: int
    spans: int
    size: int


class Spill:
    """Folders of waiting requests, of at most *limit* bytes together: one for each run.

    It has one owner at a time, but is not guarded against threads. A request that was taken stays
    on disk until it is removed, so that nothing is lost when the sending process dies.

    Attributes:
        dropped: How many spans found no room, or made it for others, oldest requests first.
        lost: How many spans were in files that are gone.
    """

    def __init__(self, folder: Path, limit: int = 256 << 20) -> None:
        self.folder = folder
        self._limit = limit
        self._known: set[Path] = set()
        self._waiting: deque[Spilled] = deque()
        self._bytes = self._next = 0
        self.dropped = self.lost = 0
        self.move_to(folder)

    def move_to(self, folder: Path) -> None:
        """Put what comes from now on into *folder*; what an earlier process left there waits as well.

        Raises:
            OSError: The folder cannot be read.
        """
        if folder not in self._known:
            found = _scan(folder)
            self._waiting.extend(found)
            self._bytes += sum(entry.size for entry in found)
            self._next = max([self._next, *(entry.number + 1 for entry in found)])
            self._known.add(folder)
        self.folder = folder

    def __len__(self) -> int:
        """Return how many requests wait, those taken not counted."""
        return len(self._waiting)

    def spans(self, run: Path | None = None) -> int:
        """Return how many spans wait, those taken not counted: all, or those in a folder of *run*."""
        return sum(entry.spans for entry in self._waiting if is_in(run, entry.path))

    def put(self, body: bytes, spans: int) -> None:
        """Write one request; what it finds no room beside is `dropped`.

        Raises:
            OSError: The folder cannot be written.
        """
        if len(body) > self._limit:
            self.dropped += spans
            return
        while self._waiting and self._bytes + len(body) > self._limit:
            oldest = self._waiting.popleft()
            self.dropped += oldest.spans
            self.remove(oldest)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self._next:08d}-{spans:04d}.otlp"
        partial = path.with_suffix(_UNFINISHED)
        try:
            partial.write_bytes(body)
            partial.replace(path)  # a file of the right name is whole, whenever we are killed
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._waiting.append(Spilled(path, self._next, spans, len(body)))
        self._bytes += len(body)
        self._next += 1

    def take(self) -> tuple[Spilled, bytes] | None:
        """Return the oldest request, no longer counted as waiting; None where there is none, or none can be read."""
        while self._waiting:
            entry = self._waiting.popleft()
            try:
                return entry, entry.path.read_bytes()
            except FileNotFoundError:  # somebody tidied up
                self._bytes -= entry.size
                self.lost += entry.spans
            except OSError:  # too many open files, or the disk is bad: the others come before it is tried again
                self._waiting.append(entry)
                return None
        return None

    def give_back(self, entry: Spilled) -> None:
        """Let a request that was taken wait again, as the oldest."""
        self._waiting.appendleft(entry)

    def remove(self, entry: Spilled) -> None:
        """Delete a request that was taken: it has arrived, or never will."""
        self._bytes -= entry.size
        with suppress(OSError):  # a file that stays is sent twice by the next owner: better than never
            entry.path.unlink(missing_ok=True)


def is_in(run: Path | None, path: Path | None) -> bool:
    """Return whether *path* is below the run directory *run*; any is, where that is None."""
    # As text, which a path keeps: its parents are made anew each time, and thousands wait.
    return run is None or (path is not None and str(path).startswith(f"{run}/"))


def _scan(folder: Path) -> list[Spilled]:
    """Return the requests that an earlier process left, oldest first; what it left half written is deleted.

    A link is none: it may lead to what nobody means to send.
    """
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        name = _NAME.fullmatch(path.name)
        if name and path.is_file() and not path.is_symlink():
            found.append(Spilled(path, int(name[1]), int(name[2]), path.stat().st_size))
        elif path.name.endswith(_UNFINISHED):
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda entry: entry.number)

"""Where requests wait for the collector: in memory up to a limit, else on disk; and what is lost on the way."""

from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path

from otel_dltrace.export.otlp.spill import Spill, Spilled, is_in
from otel_dltrace.record.guard import say

SPILL_FULL = "spill folder full"
NO_ROOM = "memory full and no spill folder that can be written"
GONE = "spill file gone"
TOO_LARGE = "request above 64 MiB"
_LARGEST = 64 << 20
"""OTLP 1.11: a client must not send more in one request, before compression."""


@dataclass(frozen=True, slots=True)
class Request:
    """One encoded request: *tag* is what its spans are known by while it is in memory, *file* what it was read from."""

    body: bytes
    spans: int
    tag: Hashable = None
    file: Spilled | None = None
    folder: Path | None = None

    @property
    def place(self) -> Path | None:
        """Where it waits, or would: the folder of its run's is above."""
        return self.file.path if self.file is not None else self.folder


class Waiting:
    """The requests that are not settled, one of which may be under way; its owner guards it against threads."""

    def __init__(self, folder: Callable[[], Path | None], memory_limit: int, spill_limit: int) -> None:
        self.under_way: Request | None = None
        self._folder = folder
        self._memory_limit, self._spill_limit = memory_limit, spill_limit
        self._queue: deque[Request] = deque()
        self._bytes = 0
        self._unsettled: Counter[Hashable] = Counter()
        self._spill: Spill | None = None
        self._dropped: Counter[str] = Counter()
        self.open_spill()

    def __len__(self) -> int:
        """Return how many requests wait, the one under way not counted."""
        return len(self._queue) + (0 if self._spill is None else len(self._spill))

    def tags(self) -> frozenset[Hashable]:
        """Return the tags of the requests that are in memory."""
        return frozenset(self._unsettled)

    def spans(self, run: Path | None) -> tuple[int, int]:
        """Return how many spans there are in memory and on disk: those of *run*, a run directory, if one is named."""
        held = [r for r in [*self._queue, *filter(None, [self.under_way])] if is_in(run, r.place)]
        spilled = 0 if self._spill is None else self._spill.spans(run)
        in_memory = sum(request.spans for request in held if request.file is None)
        return in_memory, spilled + sum(request.spans for request in held if request.file)

    def dropped(self) -> dict[str, int]:
        """Return how many spans were lost, by reason."""
        of_spill = {} if self._spill is None else {SPILL_FULL: self._spill.dropped, GONE: self._spill.lost}
        return {why: spans for why, spans in {**self._dropped, **of_spill}.items() if spans}

    def add(self, request: Request, in_memory: bool) -> bool:
        """Take over *request*; return whether it waits in memory, as it does if it may be *in_memory* and has room."""
        self.open_spill(request.folder)
        self._unsettled[request.tag] += 1
        self._bytes += len(request.body)
        if len(request.body) > _LARGEST:
            self.drop(request, TOO_LARGE)
        elif in_memory and self._bytes <= self._memory_limit:
            self._queue.append(request)
            return True
        elif not self._to_disk(request):
            self.drop(request, NO_ROOM)
        return False

    def take(self) -> Request | None:
        """Return the next request, now under way: as a rule those on disk are older than those in memory."""
        if self._spill is not None and (taken := self._spill.take()):
            entry, body = taken
            self.under_way = Request(body, entry.spans, file=entry)
        else:
            self.under_way = self._queue.popleft() if self._queue else None
        return self.under_way

    def recall(self) -> None:
        """Put the request that was under way back where it came from."""
        request, self.under_way = self.under_way, None
        if request is None:
            return
        if request.file is not None and self._spill is not None:
            self._spill.give_back(request.file)
        else:
            self._queue.appendleft(request)

    def park(self) -> None:
        """Move what is in memory to disk, as far as there is one."""
        while self._queue and self._to_disk(self._queue[0]):
            self._queue.popleft()

    def leave(self) -> None:
        """Move all to disk for the next owner, and give up what finds no room there."""
        self.recall()
        self.park()
        while self._queue:
            self.drop(self._queue.popleft(), NO_ROOM)

    def drop(self, request: Request, why: str) -> None:
        """Give *request* up."""
        self._dropped[why] += request.spans
        self.settle(request)

    def settle(self, request: Request) -> None:
        """Forget *request*: there is nothing more to do for it in memory."""
        if request is self.under_way:
            self.under_way = None
        if request.file is not None and self._spill is not None:
            self._spill.remove(request.file)
            return
        self._bytes -= len(request.body)
        self._unsettled[request.tag] -= 1
        if not self._unsettled[request.tag]:
            del self._unsettled[request.tag]

    def open_spill(self, folder: Path | None = None) -> None:
        """Have what is put on disk from now on go to *folder*, and send what an earlier process left there."""
        folder = folder or self._folder()
        if folder is not None:
            try:
                if self._spill is None:
                    self._spill = Spill(folder, self._spill_limit)
                else:
                    self._spill.move_to(folder)
            except OSError as error:
                say(f"the spill folder {folder} cannot be read ({error}): spans wait in memory")

    def _to_disk(self, request: Request) -> bool:
        self.open_spill(request.folder)
        if self._spill is None:
            return False
        try:
            self._spill.put(request.body, request.spans)
        except OSError as error:  # without the name of the file, which is another each time
            say(f"the spill folder {self._spill.folder} cannot be written ({error.strerror}): spans wait in memory")
            return False
        self.settle(request)
        return True

"""The thread that delivers requests: memory first, disk while the collector is away, figures at the end."""

import random
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from threading import Condition, Thread
from time import monotonic, sleep

from otel_dltrace.export.otlp.spill import Spill, Spilled, is_in
from otel_dltrace.export.otlp.transport import Outcome, Transport, Verdict
from otel_dltrace.model.summary import REFUSED
from otel_dltrace.record.guard import guarded, say

SPILL_FULL = "spill folder full"
NO_ROOM = "memory full and no spill folder that can be written"
UNREADABLE = "spill file gone or unreadable"
TOO_LARGE = "request above 64 MiB"
_LARGEST = 64 << 20
"""OTLP 1.11: a client must not send more in one request, before compression."""
_NEVER = float("inf")
_LONG_S = 3600.0


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of the spans that were submitted, or found in the spill folder, counted in spans.

    Attributes:
        rejected: Left out by the collector from requests that it accepted.
        rejection: What the collector last said about those.
        waiting: Still in memory.
        spilled: Waiting in the spill folder.
        dropped: Lost, by reason.
        trouble: What the collector or the network last said when a request did not get through.
    """

    accepted: int = 0
    rejected: int = 0
    rejection: str = ""
    waiting: int = 0
    spilled: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class _Request:
    body: bytes
    spans: int
    tag: Hashable = None
    file: Spilled | None = None
    folder: Path | None = None

    @property
    def place(self) -> Path | None:
        """Where it waits, or would: the folder of its run's is above."""
        return self.file.path if self.file is not None else self.folder


class Sender:
    """Delivers requests in a thread of its own; whoever submits one never waits for the network.

    While the collector is away, requests move to the spill folder, and come back from there oldest
    first; what an earlier process left in the folder is sent as well. Delivery is at least once.

    Args:
        transport: The way to the collector.
        folder: Returns the spill folder, or None while it is not known.
        memory_limit: Bytes held in memory; what is above goes to the spill folder at once.
        spill_limit: Bytes held on disk; above it the oldest are dropped.
    """

    def __init__(
        self,
        transport: Transport,
        folder: Callable[[], Path | None],
        *,
        memory_limit: int = 64 << 20,
        spill_limit: int = 256 << 20,
    ) -> None:
        self._transport = transport
        self._folder = folder
        self._memory_limit, self._spill_limit = memory_limit, spill_limit
        # Guards all that follows. It is held while a file is written, never while the network is used.
        self._changed = Condition()
        self._queue: deque[_Request] = deque()
        self._current: _Request | None = None
        self._bytes = 0
        self._unsettled: Counter[Hashable] = Counter()
        self._spill: Spill | None = None
        self._accepted = self._rejected = 0
        self._rejection = self._trouble = ""
        self._dropped: Counter[str] = Counter()
        self._failures = 0
        self._retry_at = self._wish_ends = 0.0
        self._deadline = _NEVER
        self._stopped = False
        self._random = random.Random()  # the global one is the training program's  # noqa: S311
        self._open_spill()
        self._thread = Thread(target=guarded(self._run), name="otel_dltrace-otlp", daemon=True)
        self._thread.start()

    def submit(self, body: bytes, spans: int, tag: Hashable, folder: Path | None = None) -> None:
        """Take over *body*, an encoded request of *spans* spans; *tag* is what `pending` knows it by.

        *folder* is its spill folder, if not that of all.
        """
        request = _Request(body, spans, tag, folder=folder)
        with self._changed:
            self._open_spill(folder)
            self._unsettled[tag] += 1
            self._bytes += len(body)
            if len(body) > _LARGEST:
                self._drop(request, TOO_LARGE)
            elif self._bytes <= self._memory_limit and not self._stopped:
                self._queue.append(request)
                self._changed.notify()
            elif not self._to_disk(request):
                self._drop(request, NO_ROOM)

    def pending(self) -> frozenset[Hashable]:
        """Return the tags of which a request is still in memory: neither delivered, nor on disk, nor given up."""
        with self._changed:
            return frozenset(self._unsettled)

    def delivery(self, run: Path | None = None) -> Delivery:
        """Return the figures as they are now; what waits is that of *run*, a run directory, if one is named."""
        with self._changed:
            held = [r for r in [*self._queue, *filter(None, [self._current])] if is_in(run, r.place)]
            spilled, lost = (0, 0) if self._spill is None else (self._spill.spans(run), self._spill.lost)
            return Delivery(
                accepted=self._accepted,
                rejected=self._rejected,
                rejection=self._rejection,
                waiting=sum(request.spans for request in held if request.file is None),
                spilled=spilled + sum(request.spans for request in held if request.file),
                dropped={**self._dropped, UNREADABLE: lost} if lost else dict(self._dropped),
                trouble=self._trouble,
            )

    def close(self, timeout_s: float) -> Delivery:
        """Deliver what *timeout_s* seconds allow, spill the rest, and return the figures."""
        with self._changed:
            self._deadline = min(self._deadline, monotonic() + timeout_s)
            self._failures, self._retry_at = min(self._failures, 1), self._wish_ends
            self._changed.notify()
        self._thread.join(timeout_s / 2)
        with self._changed:
            self._park()  # half of the time was for hope; the disk needs some of the rest
        self._thread.join(max(self._deadline - monotonic(), 0.0))
        with self._changed:
            self._stopped = True
            if self._current is not None:
                self._trouble = self._trouble or "no answer before the time was up"
            self._recall()
            self._park()
            while self._queue:
                self._drop(self._queue.popleft(), NO_ROOM)
        self._transport.close()
        return self.delivery()

    def _run(self) -> None:
        send = guarded(self._transport.send)
        while (request := self._next()) is not None:
            outcome = send(request.body, max(self._deadline - monotonic(), 0.01))
            with self._changed:
                if self._stopped:
                    return
                self._settle(request, outcome or Outcome(Verdict.RETRY, message="an error of our own"))

    def _next(self) -> _Request | None:
        """Wait for a request whose time has come; None ends the thread."""
        with self._changed:
            while not self._stopped:
                self._open_spill()
                if self._failures:
                    self._park()
                now = monotonic()
                has_work = bool(self._queue or self._spill)
                closing = self._deadline < _NEVER
                if closing and (not has_work or max(now, self._retry_at) >= self._deadline):
                    return None
                if now >= self._retry_at and has_work:
                    self._current = self._take()
                    if self._current is not None:
                        return self._current
                    continue
                self._changed.wait(min(self._retry_at - now if has_work else _LONG_S, self._deadline - now, _LONG_S))
            return None

    def _take(self) -> _Request | None:
        """Return the next request: as a rule those on disk are older than those in memory."""
        if self._spill is not None and (taken := self._spill.take()):
            entry, body = taken
            return _Request(body, entry.spans, file=entry)
        return self._queue.popleft() if self._queue else None

    def _settle(self, request: _Request, outcome: Outcome) -> None:
        if outcome.verdict is Verdict.RETRY:
            self._away(outcome)
            self._recall()
            return
        self._current = None
        self._failures, self._retry_at, self._wish_ends = 0, 0.0, 0.0
        if outcome.verdict is Verdict.REFUSED:
            self._trouble = outcome.message
            say(f"the collector refuses spans ({outcome.message})")
            self._drop(request, REFUSED)
            return
        rejected = min(max(outcome.rejected, 0), request.spans)
        self._accepted += request.spans - rejected
        self._rejected += rejected
        self._rejection = outcome.message or self._rejection
        self._forget(request)

    def _away(self, outcome: Outcome) -> None:
        if not self._failures:
            say(f"the collector takes no spans for now ({outcome.message}); they wait and are sent when it does")
        self._trouble = outcome.message
        self._failures += 1
        now = monotonic()
        self._wish_ends = now + (outcome.retry_after_s or 0.0)
        self._retry_at = now + pause_s(self._failures, outcome.retry_after_s, self._random)

    def _recall(self) -> None:
        """Put the request that was under way back where it came from."""
        request, self._current = self._current, None
        if request is None:
            return
        if request.file is not None and self._spill is not None:
            self._spill.give_back(request.file)
        else:
            self._queue.appendleft(request)

    def _park(self) -> None:
        """Move what is in memory to disk, as far as there is one."""
        while self._queue and self._to_disk(self._queue[0]):
            self._queue.popleft()

    def _to_disk(self, request: _Request) -> bool:
        self._open_spill(request.folder)
        if self._spill is None:
            return False
        try:
            dropped = self._spill.put(request.body, request.spans)
        except OSError as error:
            say(f"the spill folder {self._spill.folder} cannot be written ({error}): spans wait in memory")
            return False
        if dropped:
            self._dropped[SPILL_FULL] += dropped
        self._forget(request)
        return True

    def _drop(self, request: _Request, why: str) -> None:
        self._dropped[why] += request.spans
        self._forget(request)

    def _forget(self, request: _Request) -> None:
        """Settle *request*: there is nothing more to do for it in memory."""
        if request.file is not None and self._spill is not None:
            self._spill.remove(request.file)
            return
        self._bytes -= len(request.body)
        self._unsettled[request.tag] -= 1
        if not self._unsettled[request.tag]:
            del self._unsettled[request.tag]

    def _open_spill(self, folder: Path | None = None) -> None:
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


def pause_s(failures: int, wish_s: float | None, rng: random.Random) -> float:
    """Return how long to leave the collector alone after that many failures in a row.

    The jitter is wide, since after an outage every host of a job comes back at once.
    """
    if wish_s:
        return wish_s * rng.uniform(1.0, 1.1)
    return rng.uniform(0.5, min(30.0, 2.0 ** min(failures - 1, 5)))


def resend(
    transport: Transport, folder: Path, patience_s: float = 10.0, progress: Callable[[Delivery], None] | None = None
) -> Delivery:
    """Send the requests that wait in *folder*, oldest first, until none is left.

    Args:
        transport: The way to the collector; it is closed at the end.
        folder: A spill folder that no living drain owns.
        patience_s: Give up when for so long nothing got through.
        progress: Called ten times a second with the figures so far.
    """
    sender = Sender(transport, lambda: folder)
    figures, since = sender.delivery(), monotonic()
    while figures.spilled and monotonic() - since < patience_s:
        sleep(0.1)
        before, figures = figures, sender.delivery()
        if figures.spilled != before.spilled:
            since = monotonic()
        if progress is not None:
            progress(figures)
    return sender.close(0.0)

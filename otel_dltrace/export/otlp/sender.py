"""The thread that delivers requests: memory first, disk while the collector is away, figures at the end."""

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from threading import Condition, Thread
from time import monotonic

from otel_dltrace.export.otlp.delivery import Delivery
from otel_dltrace.export.otlp.outcome import Outcome, Verdict
from otel_dltrace.export.otlp.pause import Pause
from otel_dltrace.export.otlp.transport import Transport
from otel_dltrace.export.otlp.waiting import Request, Waiting
from otel_dltrace.model.summary import REFUSED
from otel_dltrace.record.guard import guarded, say

_NEVER = float("inf")
_LONG_S = 3600.0


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
        # Guards all that follows. It is held while a file is written, never while the network is used.
        self._changed = Condition()
        self._waiting = Waiting(folder, memory_limit, spill_limit)
        self._answered = Delivery()
        self._pause = Pause()
        self._deadline = _NEVER
        self._stopped = False
        self._thread = Thread(target=guarded(self._run), name="otel_dltrace-otlp", daemon=True)
        self._thread.start()

    def submit(self, body: bytes, spans: int, tag: Hashable, folder: Path | None = None) -> None:
        """Take over *body*, an encoded request of *spans* spans; *tag* is what `pending` knows it by.

        *folder* is its spill folder, if not that of all.
        """
        with self._changed:
            if self._waiting.add(Request(body, spans, tag, folder=folder), in_memory=not self._stopped):
                self._changed.notify()

    def pending(self) -> frozenset[Hashable]:
        """Return the tags of which a request is still in memory: neither delivered, nor on disk, nor given up."""
        with self._changed:
            return self._waiting.tags()

    def delivery(self, run: Path | None = None) -> Delivery:
        """Return the figures as they are now; what waits is that of *run*, a run directory, if one is named."""
        with self._changed:
            waiting, spilled = self._waiting.spans(run)
            return replace(self._answered, waiting=waiting, spilled=spilled, dropped=self._waiting.dropped())

    def waits_until(self) -> float:
        """Return until when (s, monotonic) the collector wants no request; no end is known while one is under way."""
        with self._changed:
            return _NEVER if self._waiting.under_way is not None else self._pause.wish_ends

    def close(self, timeout_s: float) -> Delivery:
        """Deliver what *timeout_s* seconds allow, spill the rest, and return the figures."""
        with self._changed:
            self._deadline = min(self._deadline, monotonic() + timeout_s)
            self._pause.shorten()
            self._changed.notify()
        self._thread.join(timeout_s / 2)
        with self._changed:
            self._waiting.park()  # half of the time was for hope; the disk needs some of the rest
        self._thread.join(max(self._deadline - monotonic(), 0.0))
        with self._changed:
            self._stopped = True
            if self._waiting.under_way is not None and not self._answered.trouble:
                self._answered = replace(self._answered, trouble="no answer before the time was up")
            self._waiting.leave()
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

    def _next(self) -> Request | None:
        """Wait for a request whose time has come; None ends the thread."""
        with self._changed:
            while not self._stopped:
                self._waiting.open_spill()
                if self._pause.failures:
                    self._waiting.park()
                now = monotonic()
                due = self._due()
                if self._deadline < _NEVER and max(now, due) >= self._deadline:
                    return None
                if now < due:
                    self._changed.wait(min(due - now, self._deadline - now, _LONG_S))
                elif (request := self._waiting.take()) is not None:
                    return request
                else:  # none of those on disk can be read for now
                    self._pause.lengthen(None)
            return None

    def _due(self) -> float:
        """Return when the next request may be sent; never, where none waits."""
        return self._pause.until if len(self._waiting) else _NEVER

    def _settle(self, request: Request, outcome: Outcome) -> None:
        self._answered = self._answered.after(outcome, request.spans)
        if outcome.verdict is Verdict.RETRY:
            self._away(outcome)
            return
        self._pause.end()
        if outcome.verdict is Verdict.REFUSED:
            say(f"the collector refuses spans ({outcome.message})", f"refused {outcome.status}")
            self._waiting.drop(request, REFUSED)
            return
        self._waiting.settle(request)

    def _away(self, outcome: Outcome) -> None:
        if not self._pause.failures:
            what = f"the collector takes no spans for now ({outcome.message}); they wait and are sent when it does"
            say(what, f"away {outcome.status}")
        self._pause.lengthen(outcome.retry_after_s)
        self._waiting.recall()

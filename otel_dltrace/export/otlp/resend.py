"""Requests that an earlier process left on disk, sent while somebody waits for it."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

from otel_dltrace.export.otlp.delivery import Delivery
from otel_dltrace.export.otlp.sender import Sender
from otel_dltrace.export.otlp.transport import Transport

LONGEST_WISH_S = 60.0
"""A collector that asks to be left alone for longer, all in all, is not waited for."""
_TAKEN_UP_S = 1.0
"""What a busy machine may need to make the next attempt once its time has come."""


def resend(
    transport: Transport, folder: Path, patience_s: float = 10.0, progress: Callable[[Delivery], None] | None = None
) -> Delivery:
    """Send the requests that wait in *folder*, oldest first, until none is left.

    Args:
        transport: The way to the collector; it is closed at the end.
        folder: A spill folder that no living drain owns.
        patience_s: Give up when for so long nothing got through; not while an answer is awaited, since what was given
            up then would be sent twice, nor before the collector wants to be asked again.
        progress: Called ten times a second with the figures so far.
    """
    sender = Sender(transport, lambda: folder)
    figures, since = sender.delivery(), monotonic()
    while figures.spilled and monotonic() < _gives_up(since, patience_s, sender.waits_until()):
        sleep(0.1)
        before, figures = figures, sender.delivery()
        if figures.spilled != before.spilled:
            since = monotonic()
        if progress is not None:
            progress(figures)
    return sender.close(0.0)


def _gives_up(since: float, patience_s: float, waits_until: float) -> float:
    """Return when to give up, *since* which nothing got through."""
    is_long = since + LONGEST_WISH_S < waits_until < float("inf")
    return since + patience_s if is_long else max(since + patience_s, waits_until + _TAKEN_UP_S)

"""Requests that an earlier process left on disk, sent while somebody waits for it."""

from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

from otel_dltrace.export.otlp.delivery import Delivery
from otel_dltrace.export.otlp.sender import Sender
from otel_dltrace.export.otlp.transport import Transport


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

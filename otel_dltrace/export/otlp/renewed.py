"""A way to a collector that outlives its certificates: files that cannot be used now may be renewed in a moment."""

from collections.abc import Callable
from contextlib import suppress

from otel_dltrace.export.otlp.outcome import Outcome, Verdict, brief
from otel_dltrace.export.otlp.transport import Transport
from otel_dltrace.model.errors import ConfigError


class Renewed:
    """Connects again where that was impossible, or where an attempt failed with certificates that may be old by now.

    Args:
        connect: Returns the way to the collector, or raises `ConfigError`.
        has_files: Whether certificates are read from files; gRPC reads them once for a channel.
    """

    def __init__(self, connect: Callable[[], Transport], has_files: bool) -> None:
        self._connect, self._has_files = connect, has_files
        self._way: Transport | None = None
        with suppress(ConfigError):  # the first attempt to send says it
            self._way = connect()

    def send(self, body: bytes, deadline_s: float) -> Outcome:
        """Make one attempt to send *body*; one without a certificate that can be used is to be made again."""
        try:
            way = self._way = self._way or self._connect()
        except ConfigError as error:
            return Outcome(Verdict.RETRY, message=brief(error))
        outcome = way.send(body, deadline_s)
        if self._has_files and outcome.verdict is Verdict.RETRY and outcome.retry_after_s is None:
            self.close()
        return outcome

    def close(self) -> None:
        """Give the connection back."""
        way, self._way = self._way, None
        if way is not None:
            way.close()

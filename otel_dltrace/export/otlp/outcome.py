"""What came of one attempt to send a request, as a value."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from otel_dltrace._version import __version__

USER_AGENT = f"otel-dltrace/{__version__}"
LONGEST_MESSAGE = 300
_STATUS = re.compile(r"(HTTP \d{3}|[A-Z_]+)(?=: )")
_LONGEST_WISH_S = 3600.0
"""A server's clock or configuration may be wrong, and must not silence a run for good."""


class Verdict(Enum):
    """What a collector made of a request."""

    ACCEPTED = "accepted"
    RETRY = "retry"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one attempt.

    Attributes:
        rejected: Spans of an accepted request that the collector left out; they are not to be sent again.
        message: What the collector, or the network, said.
        retry_after_s: How long the collector wants to be left alone; None where it did not say.
        answered_in: The content type of an answer over HTTP that is none of OTLP: any web server may say yes to all.
    """

    verdict: Verdict
    rejected: int = 0
    message: str = ""
    retry_after_s: float | None = None
    answered_in: str = ""

    @property
    def status(self) -> str:
        """The status that *message* begins with, "" where none came: what follows may be another text each time."""
        found = _STATUS.match(self.message)
        return found[0] if found else ""


def accepted(response: ExportTraceServiceResponse, secrets: Iterable[str]) -> Outcome:
    """Return what a *response* means that says yes; *secrets* as `brief`."""
    partial = response.partial_success
    return Outcome(Verdict.ACCEPTED, partial.rejected_spans, brief(partial.error_message, secrets))


def without(text: str, secrets: Iterable[str]) -> str:
    """Return *text* with three dots in the place of each of *secrets*, longer ones first."""
    for secret in secrets:
        text = text.replace(secret, "...")
    return text


def bounded(seconds: float) -> float:
    """Return for how many *seconds* to leave a server alone that wishes for so many."""
    return min(max(seconds, 0.0), _LONGEST_WISH_S)


def brief(text: object, secrets: Iterable[str] = ()) -> str:
    """Return one line of printable text, short enough for a summary: gRPC says last what is the matter.

    What a terminal would obey is a question mark. Of *secrets*, which a server may repeat, there is nothing in it.
    """
    line, half = " ".join(without(str(text), secrets).split()), (LONGEST_MESSAGE - 3) // 2
    line = "".join(c if c.isprintable() else "?" for c in line)
    return line if len(line) <= LONGEST_MESSAGE else f"{line[:half]}...{line[-half:]}"

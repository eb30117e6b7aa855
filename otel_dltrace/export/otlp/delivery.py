"""What became of spans on their way to the collector, in figures."""

from dataclasses import dataclass, field, replace

from otel_dltrace.export.otlp.outcome import Outcome, Verdict


@dataclass(frozen=True, slots=True)
class Delivery:
    """What became of the spans that were submitted, or found in the spill folder, counted in spans.

    Attributes:
        rejected: Left out by the collector from requests that it accepted.
        rejection: What the collector last said about those.
        remark: What it last said of a request that it accepted whole.
        answered_in: The content type in which it last said yes, where that was no answer of OTLP.
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
    remark: str = ""
    answered_in: str = ""

    def after(self, outcome: Outcome, spans: int) -> "Delivery":
        """Return the figures after *outcome* of a request of *spans* spans; where they wait is not looked at."""
        if outcome.verdict is not Verdict.ACCEPTED:
            return replace(self, trouble=outcome.message)
        rejected = min(max(outcome.rejected, 0), spans)
        now = replace(
            self,
            accepted=self.accepted + spans - rejected,
            rejected=self.rejected + rejected,
            answered_in=outcome.answered_in,
        )
        if not outcome.message:
            return now
        return replace(now, rejection=outcome.message) if rejected else replace(now, remark=outcome.message)

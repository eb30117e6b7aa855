"""A finding: one thing that was looked at, how it is, and what to do about it."""

from collections.abc import Iterable
from dataclasses import dataclass

FINE, NOTE, PROBLEM = "fine", "note", "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found in *area*; the *cure* is there where there is something to do.

    Attributes:
        verdict: ``fine``, ``note`` (works, and is worth knowing) or ``problem`` (does not work as asked).
    """

    area: str
    verdict: str
    what: str
    cure: str = ""


def worst(findings: Iterable[Finding]) -> str:
    """Return the worst verdict of *findings*, fine where there is none."""
    order = (FINE, NOTE, PROBLEM)
    return max((finding.verdict for finding in findings), key=order.index, default=FINE)

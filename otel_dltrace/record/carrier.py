"""W3C trace context as text: what comes from another process, and what goes to one (contract 3)."""

import re
from dataclasses import dataclass
from urllib.parse import quote

TRACESTATE_KEY = "dltrace"
# Versions above 00 may say more after the flags; ff is none.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


@dataclass(frozen=True, slots=True)
class Remote:
    """A span of another process: its trace's id and its own, in hexadecimal."""

    trace_id: str
    span_id: str


def read_traceparent(text: str) -> Remote | None:
    """Return the span that a ``traceparent`` names, None where it names none."""
    match = _TRACEPARENT.fullmatch(text.strip().lower())
    if match is None or (match[1] == "00" and match[4]):
        return None
    trace_id, span_id = match[2], match[3]
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    return Remote(trace_id, span_id)


def tracestate_value(step: int, world: str, rank: int) -> str:
    """Return what ``tracestate`` says under our key: which step, of which world and rank."""
    return f"{step}.{quote(world, safe='')}.{rank}"

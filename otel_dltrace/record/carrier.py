"""W3C trace context as text: what comes from another process, and what goes to one (contract 3)."""

import re
from binascii import unhexlify
from dataclasses import dataclass
from urllib.parse import quote, unquote

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
TRACESTATE_KEY = "dltrace"
# Versions above 00 may say more after the flags; ff is none.
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_ENTRY = re.compile(rf"(?:^|,)\s*{TRACESTATE_KEY}=([0-9]{{1,10}})\.([^,]*)\.([0-9]{{1,10}})\s*(?:,|$)")
_MOST = (1 << 32) - 1
_HEAD, _LENGTH, _NO_SPAN = 36, 55, bytes(8)


@dataclass(frozen=True, slots=True)
class Remote:
    """A span of another process: its trace's id and its own, in hexadecimal."""

    trace_id: str
    span_id: str


@dataclass(frozen=True, slots=True)
class Sender:
    """Who of ours has sent a request: in which step, of which world and rank."""

    step: int
    world: str
    rank: int


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


def tracestate_entry(step: int, world: str, rank: int) -> str:
    """Return a ``tracestate`` of our own entry alone."""
    return f"{TRACESTATE_KEY}={tracestate_value(step, world, rank)}"


def read_tracestate(text: str) -> Sender | None:
    """Return what our entry in a ``tracestate`` says, None where there is none."""
    entry = _ENTRY.search(text)
    if entry is None:
        return None
    step, rank = int(entry[1]), int(entry[3])
    return Sender(step, unquote(entry[2]), rank) if max(step, rank) <= _MOST else None


def traceparent_head(trace_id: int) -> str:
    """Return what each ``traceparent`` of a trace begins with: all but the span's id and the flags."""
    return f"00-{trace_id:032x}-"


def traceparent(head: str, span_id: int) -> str:
    """Return the ``traceparent`` of a span of ours in the trace of *head*; all of them are sampled."""
    return f"{head}{span_id:016x}-01"


def span_below(head: str, text: str) -> bytes | None:
    """Return the id of the span that a ``traceparent`` names, if it is one in the trace of *head*."""
    if len(text) != _LENGTH or not text.startswith(head):
        return None
    try:
        span_id = unhexlify(text[_HEAD : _HEAD + 16])
    except ValueError:
        return None
    return span_id if span_id != _NO_SPAN else None

"""Trace events from JSON that its writer did not finish: whatever can be read, and what is missing in words."""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from otel_dltrace.model.text import clean

Event = dict[str, Any]
RawEvent = Callable[[str], tuple[Event, int] | None]
"""Reads the event that a text begins with, which is no JSON: its writer escaped nothing. Returns it and its end."""

_BETWEEN = re.compile(r"[\s,]*")
_FIRST = re.compile(r'\{\s*"')
_NEXT = re.compile(r'[\[,}]\s*(?=\{\s*")')
_HEADER = re.compile(r'\s*\{\s*"traceEvents"\s*:\s*\[')
_ARRAY = re.compile(r"\s*\[")
_DECODER = json.JSONDecoder(strict=False)  # names may hold raw control characters
_WINDOWS = (1 << 10, 1 << 16)
"""Characters that an event is looked for in first: an error of the decoder counts all lines before it, so in the whole
file each one took as long as the file is."""

EMPTY = "the file is empty; its writer ended before it wrote an event"


class Events(NamedTuple):
    """What was read: the events in the file's order, what is missing, whether any was no JSON."""

    events: list[Any]
    notes: tuple[str, ...] = ()
    is_raw: bool = False


def read_events(text: str, raw_event: RawEvent | None = None) -> Events:
    """Return the trace events of *text*: an object with ``traceEvents``, an array, or what is left of one."""
    try:
        document = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return _salvage(text, raw_event)
    found = document.get("traceEvents") if isinstance(document, dict) else document
    if isinstance(found, list):
        return Events(found)
    if isinstance(document, dict) and "ph" in document:
        return Events([document], (_fragment(1),))
    return Events([], ("the file is JSON, but holds no trace events",))


def _salvage(text: str, raw_event: RawEvent | None) -> Events:
    """Return what can be read of a text that is no JSON."""
    if not text.strip():
        return Events([], (EMPTY,))
    wrapped, array = _HEADER.match(text), _ARRAY.match(text)
    opening = wrapped or array
    begin = opening.end() if opening else _first(text)
    scan = _Scan(text, raw_event)
    closed = scan.run(begin)
    if scan.is_raw and "\\" in text:
        # Where one name was not escaped none was: what looks like an escape in another is none.
        scan = _Scan(text, raw_event, raw_first=True)
        closed = scan.run(begin)
    notes = [_damage(scan)] if scan.damaged else []
    if opening is None:
        notes.append(_fragment(len(scan.events)) if scan.events else _nothing(text))
    elif closed is None:
        notes.append(_cut(scan))
    elif '"ph"' in text[closed:]:
        notes.append(f"the file goes on after its end at character {closed:,}; only what comes before that was read")
    elif wrapped and not text[closed:].rstrip().endswith("}"):
        notes.append("the end of the file is missing, but no event is")
    return Events(scan.events, tuple(notes), scan.is_raw)


def _first(text: str) -> int:
    """Return where a fragment's first event begins, behind what is no part of one."""
    found = _FIRST.search(text)
    return found.start() if found and '"' not in text[: found.start()] else 0


class _Scan:
    """Reads event after event; where one cannot be read it goes on with the next."""

    def __init__(self, text: str, raw_event: RawEvent | None, raw_first: bool = False) -> None:
        self.text, self.raw_event, self.raw_first = text, raw_event, raw_first
        self.events: list[Any] = []
        self.is_raw = False
        self.damaged: list[int] = []
        self.inside = False

    def run(self, at: int) -> int | None:
        """Read from *at*; return where the array was closed, None if it was not."""
        while True:
            between = _BETWEEN.match(self.text, at)
            assert between is not None
            at = between.end()
            if at == len(self.text):
                return None
            if self.text[at] == "]":
                return at + 1
            read = self._event(at)
            if read is not None:
                self.events.append(read[0])
                at = read[1]
                continue
            following = _NEXT.search(self.text, at)
            if following is None:
                self.inside = True
                return None
            self.damaged.append(at)
            at = following.end()

    def _event(self, at: int) -> tuple[Any, int] | None:
        for ends in self._ends(at):
            read = self._read(self.text[at:ends])
            if read is not None:
                return read[0], at + read[1]
        return None

    def _ends(self, at: int) -> Iterator[int]:
        """Yield how far to look for the event at *at*; of one that is large, as far as to what looks like the next."""
        yield from (at + window for window in _WINDOWS)
        looked_at = at + _WINDOWS[-1]
        if looked_at < len(self.text) and not _NEXT.search(self.text, at, looked_at):
            following = _NEXT.search(self.text, looked_at)
            yield following.start() + 1 if following else len(self.text)

    def _read(self, text: str) -> tuple[Any, int] | None:
        raw = self._raw(text) if self.raw_first else None
        if raw is None and text.startswith("{"):
            try:
                return _DECODER.raw_decode(text)
            except (ValueError, RecursionError):
                raw = self._raw(text)
        return raw

    def _raw(self, text: str) -> tuple[Event, int] | None:
        raw = self.raw_event(text) if self.raw_event else None
        self.is_raw = self.is_raw or raw is not None
        return raw


def _cut(scan: _Scan) -> str:
    count = len(scan.events)
    if scan.inside:
        return f"the file ends in the middle of event {count + 1:,}; it is missing, and anything after it"
    if not count:
        return "the file ends before its first event; all of its events are missing"
    return f"the file is not closed after event {count:,}; anything after it is missing"


def _fragment(count: int) -> str:
    return f"the file is a fragment: its events ({count:,}), without what surrounds them; anything after is missing"


def _nothing(text: str) -> str:
    begin = text.strip()[:20]
    if '{"traceEvents":['.startswith("".join(begin.split())):
        return "the file ends in its header; all of its events are missing"
    return f"the file holds no complete trace event; it begins with {begin!r}"


def _damage(scan: _Scan) -> str:
    count, first = len(scan.damaged), scan.damaged[0]
    return f"events that could not be read and are missing: {count:,}, the first at character {first:,}"


def whole_us(value: Any, latest: int) -> int:
    """Return a time of an event, in us, as a whole number.

    Raises:
        TypeError: It is no number.
        ValueError: It is none of any size (NaN), or beyond *latest*, whichever its sign.
        OverflowError: It is infinite.
    """
    us = round(value)
    if abs(us) > latest:
        raise ValueError(value)
    return int(us)


def quote(text: str) -> str:
    """Return *text* as a string of JSON."""
    return json.dumps(clean(text), ensure_ascii=False)

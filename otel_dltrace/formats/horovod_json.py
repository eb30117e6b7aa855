"""Horovod's timeline as JSON: read whatever state it is in, event by event.

Only rank 0 writes one. Every era of it is an array: a record for hvd.init's time (since 0.20.1), a pid with a name for
each tensor, begins and ends (B, E), a tick for each rank that is ready (X), marks (i). Horovod escapes no name.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from otel_dltrace.formats.json_events import EMPTY, whole_us
from otel_dltrace.model.text import clean

Buffer: TypeAlias = Any
"""``bytes``, or a file mapped into memory: it is read once, front to back, so memory does not grow with it."""

START, BEGIN, OVER, TICK, MARK = "M", "B", "E", "X", "i"
_LATEST = 4_000_000_000_000_000
_MOST_NAME = 1 << 12
_WINDOWS = (1 << 9, 1 << 16)

BOM = b"\xef\xbb\xbf"
"""What some editors put in front of a text in UTF-8; it is no part of it."""
BETWEEN = re.compile(rb"[\s,\[\]]*")
_ARRAY = re.compile(rb"\s*\[")
_WRAPPER = re.compile(rb'\s*\{\s*"traceEvents"\s*:\s*(?=\[)')
RECORD = re.compile(
    rb'\{"ph": "([BEX])"(?:, "name": "([^"\\\x00-\x1f]*)")?, "ts": (\d{1,15}), "pid": (\d{1,18})(?:, "dur": 0)?'
    rb'(?:, "args": \{"dtype": "([^"\\\x00-\x1f]*)", "shape": "([^"\\\x00-\x1f]*)"\})?\}[\s,]*'
)
_NAME = re.compile(
    rb'\{"name": "process_name", "ph": "M", "pid": (\d{1,18}), "args": \{"name": "(.{0,%d}?)"\}\},?'
    rb'(?=\s*\{"(?:name|ph)": "|\s*\]?\s*\Z)' % _MOST_NAME,
    re.DOTALL,
)
_SORT = re.compile(rb'\{"name": "process_sort_index", "ph": "M", "pid": \d{1,18}, "args": \{"sort_index": \d{1,18}\}\}')
NEXT = re.compile(rb'\{\s*"(?:ph|name)"')
_RANK = re.compile(rb'"name": ?"(\d{1,6})"')
_DECODER = json.JSONDecoder(strict=False)


class Event(NamedTuple):
    """One event, and in `START` when hvd.init was (Unix us).

    *args* is what an operation's end says of its result: data type and shape, ``float32[64, 3]``.
    """

    phase: str
    ts: int
    tensor: str = ""
    name: str = ""
    args: str = ""


def count_ranks(data: Buffer) -> int:
    """Return how many ranks the ready ticks of a timeline name, at least 1."""
    # A tensor's name comes first in its "args"; that of a tick does not.
    ranks = (int(match[1]) for match in _RANK.finditer(data) if data[match.start() - 1 : match.start()] != b"{")
    return 1 + max(ranks, default=0)


class Reader:
    """Iterates over the events of a timeline; *notes* then says what is missing, a sentence each; it never raises."""

    def __init__(self, data: Buffer) -> None:
        self.data = data
        self.notes: list[str] = []
        self._is_raw = any(_unquoted(match[2]) is None for match in _NAME.finditer(data))
        self._names: dict[Any, str] = {}
        self._texts: dict[bytes, str] = {}
        self._nameless: set[Any] = set()
        self._count = self._strange = 0
        self._damaged: list[int] = []
        self._has_origin = False
        self._named_at = -1

    def __iter__(self) -> Iterator[Event]:
        """Yield the events in the file's order."""
        at = len(BOM) if self.data[: len(BOM)] == BOM else 0
        opening = _WRAPPER.match(self.data, at)
        at = opening.end() if opening else at
        is_array, is_inside, is_closed = _ARRAY.match(self.data, at) is not None, False, _is_closed(self.data)
        while True:
            between = BETWEEN.match(self.data, at)
            assert between is not None
            at = between.end()
            while (match := RECORD.match(self.data, at)) is not None:
                yield self._record(match)
                at = match.end()
            here = self.data[at : at + 1]
            if here in (b"[", b"]"):
                continue
            if not here or (opening and here != b"{" and self.data[between.start() : at].rstrip(b", \n")[-1:] == b"]"):
                is_closed = is_closed or bool(here)
                break
            read = self._other(at)
            if read is None:
                following = NEXT.search(self.data, at + 1)
                if following is None:
                    is_inside = True
                    break
                self._damaged.append(at)
                at = following.start()
                continue
            event, at = read
            if event is not None:
                yield event
        self._tell(is_array, is_inside, is_closed)

    def _record(self, match: "re.Match[bytes]") -> Event:
        phase, name, ts, pid, dtype, shape = match.groups()
        self._count += 1
        args = "" if dtype is None else self._text(dtype + shape)
        return Event(self._text(phase), int(ts), self._tensor(int(pid)), self._text(name or b""), args)

    def _text(self, data: bytes) -> str:
        text = self._texts.get(data)
        if text is None:
            text = self._texts[data] = data.decode("utf-8", "replace")
        return text

    def _tensor(self, pid: Any) -> str:
        name = self._names.get(pid)
        if name is None:
            self._nameless.add(pid)
            name = self._names[pid] = clean(str(pid))
        return name

    def _other(self, at: int) -> tuple[Event | None, int] | None:
        """Read what is no plain event at *at*: a tensor's name, a mark, or JSON that is laid out otherwise."""
        match = _SORT.match(self.data, at)
        if match is not None:
            return None, match.end()
        match = _NAME.match(self.data, at)
        if match is not None:
            name = None if self._is_raw else _unquoted(match[2])
            self._name(int(match[1]), match[2].decode("utf-8", "replace") if name is None else name)
            return None, match.end()
        for window in _WINDOWS:
            # Of Latin-1 each byte is a character, so the end in characters is the end in bytes.
            text = bytes(self.data[at : at + window]).decode("latin-1")
            try:
                end = _DECODER.raw_decode(text)[1]
                value = json.loads(text[:end].encode("latin-1").decode("utf-8", "replace"), strict=False)
            except (ValueError, RecursionError):
                continue
            return self._event(value), at + end
        return None

    def _event(self, value: Any) -> Event | None:
        try:
            return self._known(value)
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
            self._strange += 1
            return None

    def _known(self, value: Any) -> Event | None:
        phase = value["ph"]
        if phase == "M":
            return self._metadata(value)
        ts = whole_us(value["ts"], _LATEST)
        if phase == MARK:
            event = Event(MARK, ts, name=clean(str(value["name"])))
        elif phase in (BEGIN, OVER, TICK) and not value.get("dur"):
            args = value.get("args") or {}
            told = f"{args['dtype']}{args['shape']}" if "dtype" in args else ""
            name = str(value["name"]) if phase != OVER else ""
            event = Event(phase, ts, self._tensor(value["pid"]), clean(name), clean(told))
        else:
            raise ValueError(phase)
        self._count += 1
        return event

    def _metadata(self, value: Any) -> Event | None:
        args = value["args"]
        if "start_time_since_epoch_in_micros" in args:
            self._has_origin = True
            return Event(START, whole_us(args["start_time_since_epoch_in_micros"], _LATEST))
        if "name" in args:
            self._name(value["pid"], clean(str(args["name"])))
        return None

    def _name(self, pid: Any, name: str) -> None:
        self._names[pid] = name
        if pid not in self._nameless:
            self._named_at = self._count

    def _tell(self, is_array: bool, is_inside: bool, is_closed: bool) -> None:
        """Say what is missing."""
        self.notes += self.damage()
        if self._nameless:
            self.notes.append(f"tensors that the file does not name, shown by their number: {len(self._nameless):,}")
        if self._is_raw:
            self.notes.append("names in it are not escaped, so it is not valid JSON; they were read as they are")
        end = self._ending(is_array, is_inside, is_closed)
        if end:
            self.notes.append(end)
        if self._count and not self._has_origin:
            self.notes.append(_NO_ORIGIN)

    def damage(self) -> list[str]:
        """Return what of that which was read so far could not be taken in, a sentence each."""
        told = []
        if self._damaged:
            count, first = len(self._damaged), self._damaged[0]
            told.append(f"events that could not be read and are missing: {count:,}, the first at byte {first:,}")
        if self._strange:
            told.append(f"records left out because they are not Horovod's: {self._strange:,}")
        return told

    def _ending(self, is_array: bool, is_inside: bool, is_closed: bool) -> str:
        place = f"after event {self._count:,}"
        after = "anything after it is missing"
        endings = {
            EMPTY: not bytes(self.data[:64]).removeprefix(BOM).strip(),
            f"the file ends in the middle of a record, {place}; {after}": is_inside,
            f"the file ends before the first event of its last tensor, {place}; {after}": self._named_at == self._count,
            "the file ends before its first event; all of its events are missing": not self._count,
            f"the file is a fragment: its events ({self._count:,}), without what surrounds them": not is_array,
            f"the file is not closed {place}, as before Horovod 0.20.1 or after a kill; {after}": not is_closed,
        }
        return next((sentence for sentence, is_so in endings.items() if is_so), "")


_NO_ORIGIN = (
    "no record says what its times count from (before Horovod 0.20.1: the machine's boot, or hvd.init); "
    "spans are placed after 1970-01-01 00:00"
)


def _is_closed(data: Buffer) -> bool:
    return bytes(data[-64:]).rstrip().endswith((b"]", b"]}"))


def _unquoted(text: bytes) -> str | None:
    """Return the text between quotes; None if it is no JSON, for then none of the file's was escaped."""
    try:
        return clean(str(json.loads(b'"' + text + b'"', strict=False)))
    except ValueError:
        return None

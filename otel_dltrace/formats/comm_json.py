"""BytePS's worker timeline, ``comm.json``: read whatever state it is in, written byte for byte as BytePS writes it.

What an event says is who (a tensor, a partition's key, a stage) and when; there is no step, rank or size in it.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from otel_dltrace.formats import comm_layout
from otel_dltrace.formats.json_events import Event, quote, read_events
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.text import clean

TOTAL = "total"
NO_KEY = -1
_PREFIX = "Comm."
_CATEGORY = "Comm"
_CONTROL = re.compile(r"[\x00-\x1f]")
_KEY = re.compile(r"-?[0-9]{1,14}")
_BEYOND = 1 << 32  # what 32 bits hold
_AT_ONCE = 1 << 14
_NO_CHUNK = r"(?:(?!\n {8}\}).){0,4096}?"
_RAW = re.compile(
    r'\{\n {12}"ph": "X",\n {12}"args": \{\n {16}"name": "(?P<pid>' + _NO_CHUNK + r')"\n {12}\},\n'
    r' {12}"pid": "(?P=pid)",\n {12}"name": "(?P<name>' + _NO_CHUNK + r')",\n'
    r' {12}"ts": (?P<ts>-?\d{1,18}),\n {12}"dur": (?P<dur>-?\d{1,18}),\n'
    r' {12}"tid": "(?P<tid>[^"]*)",\n {12}"cat": "Comm"\n {8}\}',
    re.DOTALL,
)


class Series(NamedTuple):
    """What events have in common: a tensor's totals (key -1, no stage), or one stage of one of its partitions."""

    tensor: str
    key: int = NO_KEY
    stage: str = ""


@dataclass(frozen=True, eq=False)
class Comm:
    """The n events of a file in its order, as columns of shape (n,).

    Attributes:
        series: Whose events there are.
        which: Each event's index into *series*.
        ts: Start, Unix us.
        dur: us; negative where the wall clock was set back meanwhile.
        notes: What is missing or was mended, a sentence each.
    """

    series: Sequence[Series]
    which: Column
    ts: Column
    dur: Column
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.which)

    def events(self) -> list[tuple[Series, int, int]]:
        """Return each event as a value: series, start, duration."""
        columns = (self.which.tolist(), self.ts.tolist(), self.dur.tolist())
        return [(self.series[number], ts, dur) for number, ts, dur in zip(*columns, strict=True)]


def joined(parts: Sequence[Comm]) -> Comm:
    """Return *parts* as one: their events one after the other."""
    numbers: dict[Series, int] = {}
    of_parts = [np.array([numbers.setdefault(one, len(numbers)) for one in part.series], np.int32) for part in parts]
    return Comm(
        list(numbers),
        np.concatenate([of_part[part.which] for of_part, part in zip(of_parts, parts, strict=True)]),
        np.concatenate([part.ts for part in parts]),
        np.concatenate([part.dur for part in parts]),
        tuple(note for part in parts for note in part.notes),
    )


# -- reading ------------------------------------------------------------------------------------


def read_comm(data: bytes) -> Comm:
    """Return the events of a ``comm.json``; *notes* says what of it is missing. Never raises."""
    laid_out = comm_layout.read(data)
    comm = _from_layout(laid_out) if laid_out is not None else None
    if comm is None:
        found = read_events(data.decode("utf-8-sig", "replace"), _raw_event)
        comm = _from_events(found.events, (*found.notes, *([_UNESCAPED] if found.is_raw else [])))
    cut = (_LAST_BYTE,) if data.endswith(comm_layout.TAIL[:-1]) and data.startswith(comm_layout.HEAD) else ()
    return replace(comm, notes=(*comm.notes, *cut, *_doubts(comm, data)))


_UNESCAPED = "names in it are not escaped, so it is not valid JSON; they were read as they are"
_LAST_BYTE = "only the newline at the end of the file is missing"
_NO_UTF8 = (
    "names in it are not UTF-8: what cannot be read is shown as \ufffd; names that differ only there count as one"
)
_ESCAPED = "names in it have control characters as JSON escapes; BytePS escapes nothing: were these backslashes?"
_BARE = "names in it lack BytePS's prefix Comm.; an export adds it"


def _doubts(comm: Comm, data: bytes) -> Iterator[str]:
    """Yield in which way names may not be what they were."""
    names = "".join(series.tensor + series.stage for series in comm.series)
    if "\ufffd" in names and not _is_utf8(data):
        yield _NO_UTF8
    if b"\\" in data and _UNESCAPED not in comm.notes and _CONTROL.search(names):
        yield _ESCAPED


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _from_layout(laid_out: comm_layout.Layout) -> Comm | None:
    """Return the events of a file that is laid out as BytePS does; None if one of them is no event of BytePS."""
    quoted = [text for who in laid_out.whose for text in who]
    texts = _unquoted(quoted)
    notes: tuple[str, ...] = () if texts is not None else (_UNESCAPED,)
    texts = [text[1:-1] for text in quoted] if texts is None else texts
    if not all(map(_has_prefix, texts[::3])):
        notes = (*notes, _BARE)
    try:
        series = [_series(*texts[i : i + 3]) for i in range(0, len(texts), 3)]
    except (ValueError, TypeError, AttributeError):
        return None
    distinct = list(dict.fromkeys(series))
    number = {one: i for i, one in enumerate(distinct)}
    places = np.array([number[one] for one in series], np.int32)
    return Comm(distinct, places[laid_out.which], laid_out.ts, laid_out.dur, notes)


def _unquoted(quoted: list[str]) -> list[str] | None:
    """Return the texts between the quotes; None if one is no JSON, for then none of the file's was escaped."""
    try:
        texts: list[str] = json.loads(f"[{','.join(quoted)}]", strict=False)
    except ValueError:
        return None
    return texts if len(texts) == len(quoted) and all(isinstance(text, str) for text in texts) else None


def _from_events(events: Sequence[Any], notes: tuple[str, ...]) -> Comm:
    known: dict[Series, int] = {}
    rows: list[tuple[int, int, int]] = []
    strange, is_bare = 0, False
    for event in events:
        try:
            series, ts, dur = _event(event)
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
            strange += 1
            continue
        is_bare = is_bare or not _has_prefix(event["pid"])
        rows.append((known.setdefault(series, len(known)), ts, dur))
    if strange:
        notes = (*notes, f"events left out because they are not BytePS's: {strange:,}")
    if is_bare:
        notes = (*notes, _BARE)
    which, ts, dur = np.array(rows, np.int64).reshape(-1, 3).T
    return Comm(list(known), which.astype(np.int32), ts.copy(), dur.copy(), notes)


def _event(event: Any) -> tuple[Series, int, int]:
    if event["ph"] != "X" or event.get("cat", _CATEGORY) != _CATEGORY:
        raise ValueError(event)
    return _series(str(event["pid"]), event["name"], str(event["tid"])), _us(event["ts"]), _us(event["dur"])


def _has_prefix(pid: Any) -> bool:
    return str(pid).startswith(_PREFIX)


def _raw_event(text: str) -> tuple[Event, int] | None:
    """Read an event whose names BytePS did not escape."""
    match = _RAW.match(text)
    return ({"ph": "X", **match.groupdict()}, match.end()) if match else None


def _us(value: Any) -> int:
    us = round(float(value)) if isinstance(value, float) else int(value)
    if abs(us) > comm_layout.LATEST:
        raise ValueError(value)
    return us


def _series(pid: str, name: str, tid: str) -> Series:
    tensor = clean(pid.removeprefix(_PREFIX))
    if tid == TOTAL:
        return Series(tensor)
    key = _key(tid)
    stage = name[len(pid) + 1 :] if name.startswith(f"{pid}.") else name.rpartition(".")[2]
    if not stage:
        raise ValueError(name)
    return Series(tensor, key, clean(stage))


def _key(tid: str) -> int:
    """Return the key in *tid*; BytePS keeps it in 32 bits, so from declared key 32768 on it is written below 0."""
    key = int(tid) if _KEY.fullmatch(tid) else -_BEYOND - 1
    key += _BEYOND if key < 0 else 0
    if key < 0:
        raise ValueError(tid)
    return key


# -- writing ------------------------------------------------------------------------------------


def write_comm(comm: Comm) -> Iterator[bytes]:
    """Yield the text of a ``comm.json``, in pieces, in BytePS's order: by tensor, its totals first, then by partition.

    Names are escaped, which BytePS does not do: the file is always JSON.
    """
    rank = _order(comm)
    order = np.argsort(rank[comm.which], kind="stable")
    texts = [_around(series) for series in comm.series]
    yield comm_layout.HEAD
    for at in range(0, len(order), _AT_ONCE):
        some = order[at : at + _AT_ONCE]
        columns = (comm.which[some].tolist(), comm.ts[some].tolist(), comm.dur[some].tolist())
        lines = [
            f'{texts[which][0]}{ts},\n            "dur": {dur}{texts[which][1]}'
            for which, ts, dur in zip(*columns, strict=True)
        ]
        yield (",\n" if at else "").encode() + ",\n".join(lines).encode()
    yield comm_layout.TAIL


def _order(comm: Comm) -> Column:
    """Return the place of each series in the file: in the order in which tensors, keys and stages first come."""
    first = np.full(len(comm.series), len(comm), np.int64)
    np.minimum.at(first, comm.which, np.arange(len(comm)))
    tensors: dict[str, int] = {}
    keys: dict[tuple[str, int], int] = {}
    for number in np.argsort(first, kind="stable").tolist():
        series = comm.series[number]
        tensors.setdefault(series.tensor, len(tensors))
        keys.setdefault(series[:2], len(keys))
    places = [(tensors[s.tensor], s.stage != "", keys[s[:2]], first[i]) for i, s in enumerate(comm.series)]
    rank = np.empty(len(places), np.int64)
    rank[sorted(range(len(places)), key=places.__getitem__)] = np.arange(len(places))
    return rank


def _around(series: Series) -> tuple[str, str]:
    """Return what stands before and behind an event's times."""
    name = f"{_PREFIX}{series.tensor}"
    pid, own = quote(name), quote(f"{name}.{series.stage}" if series.stage else name)
    key = series.key - _BEYOND if _BEYOND // 2 <= series.key < _BEYOND else series.key
    tid = key if series.stage else TOTAL
    before = (
        f'        {{\n            "ph": "X",\n            "args": {{\n                "name": {pid}\n'
        f'            }},\n            "pid": {pid},\n            "name": {own},\n            "ts": '
    )
    return before, f',\n            "tid": "{tid}",\n            "cat": "Comm"\n        }}'

"""The quick way into a ``comm.json`` that is laid out as BytePS writes it: twelve lines an event, read by columns."""

import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from otel_dltrace.model.arrays import Column

HEAD = b'{\n    "traceEvents": [\n'
TAIL = b'\n\n    ],\n    "displayTimeUnit": "ms"\n}\n'
_LAST = b"\n        }"
_BETWEEN = b"\n        },\n"
_PIECE = 1 << 20
_LINES = 12
_CONSTANT = {
    0: b"        {",
    1: b'            "ph": "X",',
    2: b'            "args": {',
    4: b"            },",
    10: b'            "cat": "Comm"',
    11: b"        },",
}
_ARGS, _PID, _NAME, _TS, _DUR, _TID = 3, 5, 6, 7, 8, 9
_PREFIXES = {_TS: b'            "ts": ', _DUR: b'            "dur": '}
_WHOSE = re.compile(
    r'^ {16}"name": (".*")\n {12}"pid": (".*"),\n {12}"name": (".*"),\n {12}"tid": (".*"),\n', re.MULTILINE
)
_SIGNED = re.compile(rb"(?:-?\d+,)*")
LATEST = 4_000_000_000_000_000
"""us; a start and a duration together fit into 64 bits of ns."""
Lines = tuple[bytes, ...]


class Layout(NamedTuple):
    """Events as columns of shape (n,); *which* counts in *whose*: pid, name and tid, as they are quoted in the file."""

    whose: list[tuple[str, str, str]]
    which: Column
    ts: Column
    dur: Column


def read(data: bytes) -> Layout | None:
    """Return the events of *data*; None unless every line is where BytePS puts it."""
    if not (data.startswith(HEAD) and data.endswith(TAIL)):
        return None
    at, stop = len(HEAD), len(data) - len(TAIL)
    known: dict[Lines, int] = {}
    pieces = [(np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))]
    while at < stop:
        end = data.find(_BETWEEN, at + _PIECE, stop)
        end = end if end >= 0 else stop - len(_LAST)
        piece = _piece((data[at:end] + _BETWEEN[:-1]).split(b"\n"), known)
        if piece is None or not data.startswith(_LAST, end):
            return None
        pieces.append(piece)
        at = end + len(_BETWEEN)
    whose = _whose(known)
    if whose is None:
        return None
    which, ts, dur = (np.concatenate(columns) for columns in zip(*pieces, strict=True))
    return Layout(whose, which, ts, dur)


def _piece(lines: list[bytes], known: dict[Lines, int]) -> tuple[Column, Column, Column] | None:
    count, over = divmod(len(lines), _LINES)
    if over or any(lines[i::_LINES].count(line) != count for i, line in _CONSTANT.items()):
        return None
    ts, dur = _numbers(lines, _TS), _numbers(lines, _DUR)
    if ts is None or dur is None:
        return None
    who = zip(lines[_ARGS::_LINES], lines[_PID::_LINES], lines[_NAME::_LINES], lines[_TID::_LINES], strict=True)
    which = np.array([known.setdefault(four, len(known)) for four in who], np.int32)
    return which, ts, dur


def _numbers(lines: list[bytes], place: int) -> Column | None:
    """Return the numbers in the lines at *place* of each event; None if one is none."""
    lines = lines[place::_LINES]
    prefix = _PREFIXES[place]
    joined = b"".join(lines)
    bare = joined.replace(prefix, b"")
    if len(joined) - len(bare) != len(prefix) * len(lines) or not _are_numbers(bare):
        return None
    numbers = np.fromstring(bare, np.int64, sep=",")
    is_whole = len(numbers) == len(lines) and bool(np.all((numbers >= -LATEST) & (numbers <= LATEST)))
    return numbers if is_whole else None


def _are_numbers(text: bytes) -> bool:
    """Return whether *text* is numbers with a comma behind each."""
    if b"-" in text:  # rare, and then the digits alone do not say it
        return _SIGNED.fullmatch(text) is not None
    return not text.translate(None, b"0123456789,") and b",," not in text and not text.startswith(b",")


def _whose(known: Iterable[Lines]) -> list[tuple[str, str, str]] | None:
    """Return pid, name and tid as they are quoted, of all lines that are *known*; None if any is another line."""
    lines = [line for four in known for line in four]
    found = _WHOSE.findall(b"\n".join([*lines, b""]).decode("utf-8", "replace"))
    if len(found) * 4 != len(lines) or any(args != pid for args, pid, _, _ in found):
        return None
    return [(pid, name, tid) for _, pid, name, tid in found]

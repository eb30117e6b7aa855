"""ps-lite's van profile: a line for each message that a node received, with the low 16 bits of its key."""

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from otel_dltrace.formats.json_events import EMPTY

_LINE = re.compile(r"([0-9]{1,5})\t(worker|server)_van_recv_(push|pull)\t([0-9]{1,16})")
_LATEST = 9_000_000_000_000_000
"""Later times are none: in ns they do not fit into 64 bits."""


class Message(NamedTuple):
    """One received message; for BytePS *partition*, the low bits of the key, is the partition alone. Unix us."""

    partition: int
    role: str
    operation: str
    at: int


class VanProfile(NamedTuple):
    """The messages in the file's order, and what is missing, a sentence each."""

    messages: list[Message]
    notes: tuple[str, ...] = ()


def read_van(data: bytes) -> VanProfile:
    """Return the messages of a van profile. Never raises; a file cut between two lines looks whole."""
    *lines, rest = data.decode("utf-8-sig", "replace").split("\n")
    found = [_message(line) for line in lines]
    notes = [] if data.strip() else [EMPTY]
    if rest.strip():
        notes.append(f"the file ends in the middle of line {len(lines) + 1:,}; it is missing, and anything after it")
    if strange := sum(one is None and bool(line.strip()) for one, line in zip(found, lines, strict=True)):
        notes.append(f"lines left out because they are not a van profile's: {strange:,}")
    return VanProfile([one for one in found if one is not None], tuple(notes))


def _message(line: str) -> Message | None:
    """Return what *line* says, whichever system has ended it; None for what no node writes, a key over 16 bits too."""
    found = _LINE.fullmatch(line.removesuffix("\r"))
    if found is None or int(found[1]) >= 1 << 16 or int(found[4]) > _LATEST:
        return None
    return Message(int(found[1]), found[2], found[3], int(found[4]))


def van_lines(messages: Iterable[Message]) -> Iterator[bytes]:
    """Yield the lines of a van profile."""
    return (f"{m.partition}\t{m.role}_van_recv_{m.operation}\t{m.at}\n".encode() for m in messages)

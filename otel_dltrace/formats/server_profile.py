"""The server profile of BytePS's first servers: pushes and pulls by key and sender, as begin and end events.

No writer ever closed the file, and its last 8 KB are lost; what we write is closed. Pushes and pulls of several workers
interleave on one key, so an end belongs to the earliest open begin of the same key and name.
"""

import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from otel_dltrace.formats.json_events import read_events
from otel_dltrace.model.server_keys import KEYS, first_key

_NAME = re.compile(r"(push|pull)-([0-9]{1,9})")
_MOST_KEY = 1 << 47
"""A key of a tensor is below; what is above is a server's place in ps-lite's range of keys."""
_PARTITIONS = 1 << 16
_MOST_PARTITION = 1 << 15
"""No tensor has so many partitions."""
_LATEST = 9_000_000_000_000_000
_MOST_SERVERS = 1 << 12
BEGIN, END = "B", "E"
_CLOSED = "\n\t]\n}\n"


class Request(NamedTuple):
    """A push or pull at the server; times are Unix us, *end* is None if the file does not hold it.

    *key* is the tensor's (declared key << 16 | partition), *sender* ps-lite's number of the node: 9, 11, 13 ...
    """

    operation: str
    sender: int
    key: int
    start: int
    end: int | None


@dataclass(frozen=True)
class Profile:
    """One server's requests in the order in which they came, and which of how many servers it was."""

    requests: Sequence[Request]
    server: int = 0
    servers: int = 1
    notes: tuple[str, ...] = ()


# -- reading ------------------------------------------------------------------------------------


def read_profile(data: bytes, servers: int = 0) -> Profile:
    """Return the requests in a ``server_profile.json``; *notes* says what of it is missing. Never raises.

    Args:
        data: The file.
        servers: How many servers there were; 0 to tell it from the keys.
    """
    found = read_events(data.decode("utf-8-sig", "replace"))
    requests, strange, lone = _paired(found.events)
    notes = list(found.notes)
    if found.notes and requests:
        notes.append("BytePS's servers never close this file, so up to 8 KB at its end may be lost too")
    if strange:
        notes.append(f"events left out because they are neither push nor pull: {strange:,}")
    if lone:
        notes.append(f"ends left out because they have no begin: {lone:,}")
    if still_open := sum(request.end is None for request in requests):
        notes.append(f"pushes and pulls whose end is not in the file: {still_open:,}")
    if backwards := sum(request.end is not None and request.end < request.start for request in requests):
        notes.append(f"pushes and pulls that end before they begin, because the clock was set back: {backwards:,}")
    server, count, offset = _place({request.key for request in requests}, servers)
    if server is None:
        whose = f"belong to none of {servers} servers (--servers)" if servers else "fit no number of servers"
        notes.append(f"the keys {whose}; they were read as they are")
    elif server and not servers:
        notes.append(f"its keys are those of server {server} of {count}, or a multiple of both; say it with --servers")
    told = [request._replace(key=request.key - offset) for request in requests]
    return Profile(told, server or 0, count, tuple(notes))


def _paired(events: Iterable[Any]) -> tuple[list[Request], int, int]:
    """Return the requests, how many events are none of a server, and how many ends have no begin."""
    requests: list[Request] = []
    waiting: dict[tuple[str, int, int], deque[int]] = {}
    strange = lone = 0
    for event in events:
        try:
            is_begin, request = _event(event)
        except (KeyError, ValueError, TypeError, AttributeError, OverflowError):
            strange += 1
            continue
        opened = waiting.setdefault(request[:3], deque())
        if is_begin:
            opened.append(len(requests))
            requests.append(request)
        elif opened:
            number = opened.popleft()
            requests[number] = requests[number]._replace(end=request.start)
        else:
            lone += 1
    return requests, strange, lone


def _event(event: Any) -> tuple[bool, Request]:
    """Return whether *event* is a begin, and its request as if it began then."""
    phase, key, at, name = event["ph"], int(event["pid"]), int(event["ts"]), _NAME.fullmatch(event["name"])
    if name is None or phase not in (BEGIN, END) or not 0 <= key <= KEYS or abs(at) > _LATEST:
        raise ValueError(event)
    return phase == BEGIN, Request(name[1], int(name[2]), key, at, None)


def _place(keys: Collection[int], servers: int) -> tuple[int | None, int, int]:
    """Return which server of how many has *keys*, and what ps-lite added to them: the server's share of all keys.

    Server 5 of 10 begins two keys below server 1 of 2, and one above server 4 of 8. So of the numbers of servers that
    fit it is the smallest with which some tensor's first partition is here, and none has too many.
    """
    if not keys:
        return 0, max(servers, 1), 0
    found: tuple[int | None, int, int] = None, max(servers, 1), 0
    best = 3
    for place in _fits(keys, [servers] if servers else range(1, _MOST_SERVERS)):
        partitions = [(key - place[2]) % _PARTITIONS for key in keys]
        doubts = 2 if max(partitions) >= _MOST_PARTITION else int(min(partitions) > 0)
        if doubts < best:
            found, best = place, doubts
        if not doubts:
            break
    return found


def _fits(keys: Collection[int], counts: Iterable[int]) -> Iterator[tuple[int, int, int]]:
    """Yield for each of *counts* which server can have *keys*, of how many, and where its share begins."""
    least, most = min(keys), max(keys)
    for count in counts:
        server = min(least // first_key(1, count), count - 1)
        first = first_key(server, count)
        if most - first < _MOST_KEY:
            yield server, count, first


# -- writing ------------------------------------------------------------------------------------


class Mark(NamedTuple):
    """A begin or an end (*phase*) as the file has it: ``push-9``, the server's own key, Unix us."""

    name: str
    phase: str
    key: int
    ts: int


def write_profile(marks: Iterable[Mark]) -> Iterator[bytes]:
    """Yield the text of a ``server_profile.json``, in pieces, as *marks* come; unlike its first writers we close it."""
    behind = b'{\n\t"traceEvents": [\n'
    for name, phase, key, ts in marks:
        line = f'\t\t{{"name": "{name}", "ph": "{phase}", "pid": {key}, "tid": {key}, "ts": {ts}}}'
        yield behind + line.encode()
        behind = b",\n"
    yield _CLOSED.encode()

"""Which of BytePS's files one is: what is in it says so, else its name."""

import re
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from otel_dltrace.formats.others import instead_of_byteps


class Kind(Enum):
    """The files of BytePS and its ps-lite."""

    COMM = "worker timeline"
    SERVER = "server profile"
    VAN = "van profile"


class _Mark(NamedTuple):
    kind: Kind
    in_text: tuple[bytes, ...]
    in_name: Callable[[str], bool]


_MARKS = (
    _Mark(Kind.VAN, (b"_van_recv_",), lambda name: "_van_" in name),
    _Mark(Kind.COMM, (b'"Comm.',), lambda name: name in {"comm.json", "comm.json.gz"}),
    _Mark(Kind.SERVER, (b'"push-', b'"pull-'), lambda name: "server_profile" in name),
)

_SERVER = re.compile(rb'\s*\{\s*"traceEvents"\s*:\s*\[\s*\{\s*"name"\s*:\s*"(?:push|pull)-[0-9]{1,9}"')


def kind_of(name: str, head: bytes) -> Kind:
    """Return what a file called *name* is whose first kilobytes are *head*; a worker timeline if nothing tells."""
    by_text = (mark.kind for mark in _MARKS if any(text in head for text in mark.in_text))
    return next(by_text, kind_by_name(name) or Kind.COMM)


def kind_by_name(name: str) -> Kind | None:
    """Return what a file called *name* should be, None for none of BytePS's."""
    return next((mark.kind for mark in _MARKS if mark.in_name(name)), None)


def is_comm(head: bytes) -> bool:
    """Return whether a file that begins with *head* is a worker's timeline, whatever its name."""
    return b'"traceEvents"' in head and b'"Comm.' in head and not instead_of_byteps(head)


def is_server_profile(head: bytes) -> bool:
    """Return whether a file that begins with *head* is a server's profile, whatever its name."""
    return _SERVER.match(head) is not None

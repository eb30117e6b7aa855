"""The names file beside a ring: append-only, self-checking, so that a lap of the ring cannot erase a name."""

import json
import os
import struct
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any
from zlib import crc32

from otel_dltrace.model.errors import RingError
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.operation import MAX_DESCRIPTORS, MAX_TEXT, OTHER, Descriptor
from otel_dltrace.model.time import Anchor
from otel_dltrace.record.guard import say
from otel_dltrace.record.ring_file import close_if_still, file_of, is_still

STRING, DESCRIPTOR, BIND, ANCHOR, TIMELINE = 1, 2, 3, 4, 5
_HEAD = struct.Struct("<IB")
_CRC = struct.Struct("<I")
_NO_ROOM = "the names file cannot grow (is the ring folder full?)"
_MOST = f"a process has {MAX_DESCRIPTORS - 1:,} names of tensors, phases and calls at most"
_NO_NUMBER = f"{_MOST} (leave out of them what counts up)"
_AS_OTHER = f"what is new is called {OTHER.name!r}"


@dataclass(frozen=True, slots=True)
class Followed:
    """A timeline that the process's framework writes itself, at *path*; *anchor* are the clocks when it was named."""

    path: str
    anchor: Anchor


class NamesWriter:
    """Interns descriptors and strings; once a file is open, each is in it before its number is used.

    The table outlives the file: a forked child writes it to its own, so numbers stay valid.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._file = (0, 0)
        self._lock = threading.RLock()
        self._descriptors: dict[Descriptor, int] = {OTHER: 0}
        self._strings: dict[str, int] = {}
        self._descriptor_numbers, self._string_numbers = count(1), count(1)
        self.binds: list[Bind] = []
        self._timelines: list[Followed] = []

    def open(self, path: Path, mode: int, anchor: Anchor, home: dict[str, Any]) -> None:
        """Write what is known so far to *path*, then everything that comes.

        Args:
            path: The file; it must not exist.
            mode: Its permission bits.
            anchor: The writer's paired clocks.
            home: Whose drain and which folder this ring is for, and who the environment says we are.

        Raises:
            RingError: The file cannot be made, or there is no room for it.
        """
        with self._lock:
            try:
                self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, mode)
                self._file = file_of(self._fd)
                os.fchmod(self._fd, mode)  # whatever the umask is
            except OSError as error:
                self.close()
                raise RingError(f"{path} cannot be made: {error.strerror}") from None
            # Copies: a signal handler may add a name meanwhile, which then writes itself.
            written = [self._append(ANCHOR, json.dumps(asdict(anchor) | home).encode())]
            written += [self._append_descriptor(number, known) for known, number in [*self._descriptors.items()]]
            written += [self._append_string(number, text) for text, number in [*self._strings.items()]]
            written += [self._append_bind(bind) for bind in [*self.binds]]
            written += [self._append_timeline(timeline) for timeline in [*self._timelines]]
        if not all(written):
            self.close()
            raise RingError(f"no room for {path}")

    def descriptor(self, descriptor: Descriptor) -> int:
        """Return the number of *descriptor*; 0, which is ``other``, once the table or the file is full."""
        known = self._descriptors.get(descriptor)
        if known is not None:
            return known
        normal = descriptor.normal()
        with self._lock:
            known = self._descriptors.get(normal)
            if known is not None:
                return known
            # A signal handler or a collection may come anywhere and intern: it takes another number.
            number = next(self._descriptor_numbers)
            if number >= MAX_DESCRIPTORS:
                self._say(_NO_NUMBER, _AS_OTHER)
                return 0
            if not self._append_descriptor(number, normal):
                self._say(_NO_ROOM, _AS_OTHER)
                return 0
            self._descriptors[normal] = number
            return number

    def string(self, text: str) -> int:
        """Return the number of *text*, from 1; 0 once the table or the file is full."""
        text = text[:MAX_TEXT]
        with self._lock:
            known = self._strings.get(text)
            if known is not None:
                return known
            number = next(self._string_numbers)
            if number >= MAX_DESCRIPTORS or not self._append_string(number, text):
                return 0
            self._strings[text] = number
            return number

    def bind(self, bind: Bind) -> None:
        """Say who this process is, from a step on."""
        with self._lock:
            self.binds.append(bind)
            if not self._append_bind(bind):
                self._say(_NO_ROOM, "who this process is may be lost")

    def follow(self, timeline: Followed) -> None:
        """Have the drain read *timeline* as it grows."""
        with self._lock:
            self._timelines.append(timeline)
            self._append_timeline(timeline)

    def _say(self, why: str, what: str) -> None:
        """Say *what* comes of it, unless a daemon has closed all it had: standard error may be another file, too."""
        if is_still(self._fd, self._file):
            say(f"{why}: {what}", what)

    def _append_timeline(self, timeline: Followed) -> bool:
        return self._append(TIMELINE, json.dumps(asdict(timeline)).encode())

    def _append_descriptor(self, number: int, descriptor: Descriptor) -> bool:
        return self._append(DESCRIPTOR, json.dumps({"id": number, **descriptor.fields()}).encode())

    def _append_string(self, number: int, text: str) -> bool:
        return self._append(STRING, number.to_bytes(4, "little") + text.encode("utf-8", "replace"))

    def _append_bind(self, bind: Bind) -> bool:
        return self._append(BIND, json.dumps(bind.fields()).encode())

    def _append(self, kind: int, payload: bytes) -> bool:
        """Write one record; return whether it is in the file (true, too, while there is none)."""
        if self._fd < 0:
            return True
        head = _HEAD.pack(len(payload), kind)
        data = head + payload + _CRC.pack(crc32(head[4:] + payload))
        try:
            if file_of(self._fd) != self._file:
                return False  # a daemon closed all it had, and the number is another file's now
            written = os.write(self._fd, data)
            if written != len(data):  # tmpfs is full: half a name would hide all that follow
                os.ftruncate(self._fd, os.fstat(self._fd).st_size - written)
            return written == len(data)
        except OSError:
            return False

    def close(self) -> None:
        """Close the file; it stays for the readers."""
        with self._lock:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                close_if_still(fd, self._file)

    def after_fork(self) -> None:
        """Forget the parent's file, which this child must not write to, its lock, and what its framework writes."""
        self._lock = threading.RLock()
        self._timelines = []
        self.close()


@dataclass
class Names:
    """What a names file says so far; `read` goes on where it stopped."""

    descriptors: list[Descriptor] = field(default_factory=lambda: [OTHER])
    strings: dict[int, str] = field(default_factory=dict)
    binds: list[Bind] = field(default_factory=list)
    anchor: Anchor | None = None
    home: dict[str, Any] = field(default_factory=dict)
    position: int = 0
    timelines: list[Followed] = field(default_factory=list)

    def read(self, data: bytes) -> None:
        """Take in *data*, the file's bytes from `position` on; half a record at the end waits for the next call.

        A record whose checksum is wrong ends the reading: what follows has no known start. One that
        is whole but not understood, of a newer writer, is passed over.
        """
        at = 0
        while at + _HEAD.size <= len(data):
            length, kind = _HEAD.unpack_from(data, at)
            end = at + _HEAD.size + length
            if end + _CRC.size > len(data):
                break
            payload = data[at + _HEAD.size : end]
            if _CRC.unpack_from(data, end)[0] != crc32(data[at + 4 : end]):
                break
            with suppress(ValueError, TypeError, KeyError, AttributeError):
                self._take(kind, payload)
            at = end + _CRC.size
        self.position += at

    def _take(self, kind: int, payload: bytes) -> None:
        if kind == STRING:
            self.strings[int.from_bytes(payload[:4], "little")] = payload[4:].decode("utf-8", "replace")
            return
        if kind not in (DESCRIPTOR, BIND, ANCHOR, TIMELINE):
            return
        fields = json.loads(payload)
        if kind == DESCRIPTOR:
            number = fields.pop("id")
            known = Descriptor.read(fields)
            if 0 < number < MAX_DESCRIPTORS:
                # Numbers may come out of order, where a signal handler's overtook the one it interrupted.
                missing = number + 1 - len(self.descriptors)
                self.descriptors += [OTHER] * missing
                self.descriptors[number] = known
        elif kind == BIND:
            self.binds.append(Bind.read(fields))
        elif kind == TIMELINE:
            self.timelines.append(Followed(fields["path"], Anchor(**fields["anchor"])))
        elif kind == ANCHOR:
            self.anchor = Anchor(fields.pop("monotonic"), fields.pop("wall"), fields.pop("uncertainty"))
            self.home = fields

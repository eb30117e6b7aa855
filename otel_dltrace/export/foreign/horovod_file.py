"""A timeline of Horovod as a file that grows, is emptied and is begun anew."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from otel_dltrace.formats.horovod_json import START
from otel_dltrace.formats.horovod_spans import Row
from otel_dltrace.formats.horovod_tail import TailBuilder, TailReader
from otel_dltrace.record.names import Followed

AT_ONCE = 1 << 21
"""Bytes of a timeline that are read before rings are looked at again; they are a fraction of a second's work."""
_HEAD = 256
_WALL_SLACK_NS = 1_000_000_000


@dataclass
class Group:
    """What the timeline tells of one operation; *number* and *end* are its own once it is over."""

    rows: list[Row] = field(default_factory=list)
    number: int = 0
    end: int = 0


class Timeline:
    """One timeline: as much of it as has been read.

    Attributes:
        is_behind: Whether more of it was there than was read at once.
        is_over: Whether nothing comes any more.
    """

    def __init__(self, followed: Followed, draw: Iterator[int]) -> None:
        self.followed, self._draw = followed, draw
        self.is_behind = self.is_over = self._was_read = self._is_foreign = False
        self.reader, self.builder = TailReader(), TailBuilder(draw)
        self._notes: list[str] = []
        self._begin_anew()

    @property
    def notes(self) -> list[str]:
        """What of it could not be read so far, a sentence each; what a later run has written is no part of it."""
        damage = [] if self._is_foreign else self.reader.damage()
        return self._notes + [f"{self.followed.path}: {note}" for note in damage]

    def named_again(self, followed: Followed) -> bool:
        """Know that the process named the same file again, as Horovod began anew; return whether it was read before."""
        was_read, self._was_read, self.followed = self._was_read, False, followed
        if self._is_foreign:
            self._begin_anew()
        return was_read

    def _begin_anew(self) -> None:
        self._notes = self.notes
        self.reader, self.builder = TailReader(), TailBuilder(self._draw, self.builder)
        self.groups: dict[tuple[str, int], Group] = {}
        self._position, self._head, self._is_foreign = 0, b"", False

    def read(self, *, final: bool) -> list[Row]:
        """Return rows that are new; *final*: with the last piece of the file, what is left open as well."""
        if self.is_over:
            return []
        rows = self._read()
        if final and not self.is_behind:
            self.is_over = True
            rows += [*self._take(b"", final=True), *self.builder.cut_off()]
        return rows

    def _read(self) -> list[Row]:
        """Return the rows of the next piece: Horovod empties the file at each of its starts."""
        rows: list[Row] = []
        self.is_behind = False
        try:
            fd = os.open(self.followed.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return rows  # not there yet, or no more
        try:
            head = os.pread(fd, _HEAD, 0)
            if not head.startswith(self._head) or os.fstat(fd).st_size < self._position:
                rows += self.builder.cut_off()
                self._begin_anew()
            self._head = head[: max(len(head) - 1, 0)]  # a bracket may become a comma
            data = os.pread(fd, AT_ONCE, self._position)
            self._position += len(data)
            self.is_behind = len(data) == AT_ONCE
            rows += self._take(data)
        finally:
            os.close(fd)
        return rows

    def _take(self, data: bytes, *, final: bool = False) -> list[Row]:
        for event in self.reader.feed(data, final=final):
            # A later run may have taken the file for its own before this one was read.
            self._is_foreign |= event.phase == START and event.ts * 1000 > self.followed.anchor.wall + _WALL_SLACK_NS
            if not self._is_foreign:
                self._was_read = True
                self.builder.add(event)
        return self.builder.take()

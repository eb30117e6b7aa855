"""One ring as the drain sees it: finished spans come out once, each when nothing more can change it."""

import mmap
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from otel_dltrace.export.rings.device import HELD, DeviceAmends
from otel_dltrace.export.rings.error_amends import ErrorAmends
from otel_dltrace.export.rings.open_spans import OpenSpans
from otel_dltrace.export.rings.reader import RingReader
from otel_dltrace.export.rings.records import RECORD_DTYPE, decode
from otel_dltrace.export.rundir.joint_names import JointNames
from otel_dltrace.export.rundir.remote import RemoteParents
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.descriptors import Descriptors
from otel_dltrace.model.errors import RingError
from otel_dltrace.model.identity import Bind, bind_from_home
from otel_dltrace.model.semconv import Flag
from otel_dltrace.model.spans import Process, empty_rows, stack_rows
from otel_dltrace.model.time import Anchor
from otel_dltrace.record.names import Names
from otel_dltrace.record.ring_file import open_for_reading, writer_is_alive

MAX_COUNTERS = 1000
"""Batches of counters that are held while nobody knows whose they are."""
NAMES_AT_ONCE = 1 << 24


class RingSource:
    """Reads one ring and its names file.

    Attributes:
        open: What has begun and not ended, as far as was read.

    Args:
        path: The ring file.
        taken: What an earlier drain read of it.
        unfinished: Rows that it still held.
        buffer: The ring's bytes, in the process that writes it: opening it there a second time and
            closing it would free the writer's lock.

    Raises:
        RingError: The file is no ring, or is gone.
    """

    def __init__(
        self,
        path: Path,
        taken: Column | None = None,
        unfinished: Column | None = None,
        buffer: mmap.mmap | None = None,
    ) -> None:
        self.path = path
        self.names = Names()
        self.ended = False
        self._late = 0
        self._last = 0
        self.fd = self._names_fd = -1
        self._map: mmap.mmap | None = None
        try:
            self.reader = RingReader(self._mapped() if buffer is None else buffer, taken)
        except (OSError, ValueError) as error:
            self._let_go()
            raise RingError(f"{path} cannot be read: {error}") from error
        except RingError:
            self._let_go()
            raise
        try:
            self.read_names()
        except OSError as error:
            self.close()
            raise RingError(f"the names of {path} cannot be read: {error}") from error
        self._table = Descriptors(())
        self._table_at = -1
        self.joint: JointNames | None = None
        self.lapped_before = [0] * len(self.reader.lapped)
        self.waiting = self._early = 0
        self._records: list[Any] = []  # arrays, which are buffers
        self._is_over = False
        self.open = OpenSpans(lambda: self.own)
        self._remote, self._device, self._errors = RemoteParents(), DeviceAmends(), ErrorAmends()
        self._counters: list[Column] = []
        if unfinished is not None:
            self._hold_again(unfinished)

    def _mapped(self) -> mmap.mmap:
        self.fd = open_for_reading(self.path)
        self._map = mmap.mmap(self.fd, 0, prot=mmap.PROT_READ)
        return self._map

    @property
    def nonce(self) -> int:
        """The process's nonce as the number that its span ids are made of."""
        return int.from_bytes(self.reader.header.nonce, "little")

    @property
    def descriptors(self) -> Descriptors:
        """The table that rows passed on are described by: the ring's, or one that holds more than its."""
        return self.own if self.joint is None else self.joint.descriptors

    @property
    def own(self) -> Descriptors:
        """The names read so far; the table is made anew only when there are new ones, of which there may be 64k."""
        if self._table_at != self.names.position:
            self._table_at, self._table = self.names.position, Descriptors.of(self.names.descriptors)
        return self._table

    def scan(self, alive: bool | None = None, again: bool = False) -> int:
        """Copy what is new out of the ring, for `take`; return how many records came.

        *alive* tells whether the writer is, where the caller knows better than the ring's lock; *again* that the
        last scan was just now.
        """
        self._is_over = not (writer_is_alive(self.fd) if alive is None else alive)
        self._early = self.waiting
        records = self.reader.read(self._is_over, again)
        if len(records):
            self._records.append(records)
            self.waiting += len(records)
        return len(records)

    @property
    def late(self) -> int:
        """How many records came when what they belong to had been passed on."""
        return self._late + self.open.late + self._device.late

    def take(self, now: float = 0.0) -> Column:
        """Return the rows finished since the last call, without ids; *now* (s) is what devices' times are awaited by.

        Once the writer is gone everything comes: what was open is closed as truncated, where its
        last record was.
        """
        self.read_names()  # after the scan: a descriptor is in the file before it is used
        is_last = self._is_over and not self.ended
        held = self.open.is_closing or len(self._remote.held) or len(self._device.held)
        if not (self._records or held or is_last):
            return empty_rows()
        scans, self._records, self.waiting = self._records, [], 0
        records = scans[0] if len(scans) == 1 else np.frombuffer(b"".join(scans), RECORD_DTYPE)
        decoded = decode(records, self._early)
        for times in (decoded.own["end"], decoded.spans["end"], decoded.begun["start"]):
            self._last = max(self._last, int(times.max(initial=0)))
        if len(decoded.counters):
            self._counters = [*self._counters, decoded.counters][-MAX_COUNTERS:]
        self._late += self._errors.hold(decoded.errors)
        self.open.hold_begun(decoded)
        lost = self.open.lost(decoded, any(self.lapped), is_last)
        placed = self._remote.place(decoded.spans, decoded.parents, is_last)
        rows = stack_rows([placed, self.open.release(decoded.own, decoded.early), lost])
        if is_last:
            self.ended = True
            rows = stack_rows([rows, self.open.truncate(self._last)])
        rows = self._device.place(rows, decoded.devices, now, is_last)
        self._errors.apply(rows, lambda number: self.names.strings.get(number, "Exception"))
        return rows

    def take_counters(self) -> list[Column]:
        """Return the COUNTER records that came with the rows taken since the last call."""
        counters, self._counters = self._counters, []
        return counters

    def unfinished(self) -> Column:
        """Return what was read but may still change.

        Open spans, stages of steps that are not over, children without parent, what a device is late at.
        """
        return stack_rows([self.open.rows, self._remote.held, self._device.held])

    @property
    def errors(self) -> Sequence[tuple[str, str]]:
        """Type and message of the errors that rows passed on have numbers of; the first stands for none."""
        return self._errors.errors

    def renumber_errors(self, rows: Column, errors: Sequence[tuple[str, str]]) -> None:
        """Have *rows*, whose errors are numbers in *errors*, speak of this source's `errors`; in place."""
        self._errors.renumber(rows, errors)

    def _hold_again(self, rows: Column) -> None:
        is_lost = rows["flags"] & np.uint16(Flag.REMOTE) != 0
        self._remote.held, rows = rows.compress(is_lost), rows.compress(~is_lost)
        waits = rows["flags"] & HELD != 0
        self._device.held, rows = rows.compress(waits), rows.compress(~waits)
        self.open.hold_again(rows)

    def read_names(self) -> None:
        """Take in what is new in the names file."""
        try:
            if self._names_fd < 0:
                self._names_fd = open_for_reading(self.path.with_suffix(".names"))
        except (FileNotFoundError, PermissionError):
            return  # the ring gets its name first; the names follow at once, and then who may read them
        while data := os.pread(self._names_fd, NAMES_AT_ONCE, self.names.position):
            before = self.names.position
            self.names.read(data)
            if self.names.position == before:
                return  # half a record, of a writer that is at it

    @property
    def names_torn(self) -> bool:
        """Whether the names file has something after the last name that could be read, or nothing at all."""
        try:
            size = self.path.with_suffix(".names").stat().st_size
        except FileNotFoundError:
            return True
        except OSError:  # its program, whose thread we are, has another user now; or the disk does not tell
            return False
        return size > self.names.position or not size

    def environment_bind(self) -> Bind:
        """Return who the writer's environment says it was, for one that ended before it was bound."""
        return bind_from_home(self.names.home, self.reader.header.nonce.hex())

    def process(self, bind: Bind | None, anchor: Anchor | None, resource: Iterable[tuple[str, Any]] = ()) -> Process:
        """Return who wrote this ring, with the host's *anchor* or, of another boot, the writer's own."""
        header = self.reader.header
        own = self.names.anchor or Anchor(header.monotonic, header.wall, 1_000_000)
        host = str(self.names.home.get("host") or socket.gethostname())
        boot = header.boot_id.hex()
        return Process(self.nonce, bind, host, boot, header.pid, anchor or own, tuple(resource))

    @property
    def lapped(self) -> list[int]:
        """How many records of each level (1..4) were overwritten before they were read, with those before us."""
        return [before + now for before, now in zip(self.lapped_before, self.reader.lapped, strict=True)]

    def remove(self) -> None:
        """Remove the ring's files, once all of it is safe elsewhere and while it is still ours to read.

        Raises:
            OSError: They are not ours to remove.
        """
        for left in self.path.parent.glob(f".{self.path.stem}.cursor.*"):  # by a drain killed as it wrote
            left.unlink(missing_ok=True)
        for suffix in (".cursor", ".names", ".ring"):  # the ring last: its absence says all is done
            self.path.with_suffix(suffix).unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the ring."""
        self.reader.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._map is not None:
            self._map.close()
        for fd in (self.fd, self._names_fd):
            if fd >= 0:
                os.close(fd)

"""The hot path: one 64-byte record for each thing that happened, written by the thread that saw it."""

import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from otel_dltrace.model.errors import RingError
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import Flag, Level
from otel_dltrace.model.time import tightest_anchor
from otel_dltrace.record import guard
from otel_dltrace.record.names import NamesWriter
from otel_dltrace.record.ring import (
    AMEND,
    AMEND_ERROR,
    BEGIN,
    COUNTER,
    RECORD_FORMAT,
    SPAN,
    RingWriter,
)

_pack = struct.Struct(RECORD_FORMAT).pack_into
_pack_amend_error = struct.Struct("<IIIBBHI36sII").pack_into
_M16, _M32, _M64 = 0xFFFF, 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF
BLOCK = 256  # span numbers a thread takes at a time

Slots = tuple[Iterator[int], int, Any]  # offsets left, lease, buffer: always of one chunk
_NO_SLOTS: Slots = (iter(()), 0, None)


class _Lane:
    """What one thread holds: a chunk, and a block of span numbers."""

    __slots__ = ("chunk", "index", "numbers", "ring")

    def __init__(self) -> None:
        self.chunk = _NO_SLOTS
        self.numbers: Iterator[int] = iter(())
        self.index = -1
        self.ring: RingWriter | None = None

    def __del__(self) -> None:
        if self.ring is not None:
            self.ring.release(self.index)


class Recorder:
    """Writes the records of one process; makes its ring at the first one.

    Attributes:
        level: The finest level that is recorded; 0 while tracing is off.
        step: The ordinal of the current step, ``NO_STEP`` before the first.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        level: int = Level.PHASE,
        home: dict[str, Any] | None = None,
        on_first_record: Callable[[], None] = lambda: None,
    ) -> None:
        self.level = int(level)
        self.step = NO_STEP
        self.names = NamesWriter()
        self.ring: RingWriter | None = None
        self._folder, self._size, self._home = folder, size, home or {}
        self._on_first_record = on_first_record
        self._off_level = int(level)
        self._lock = threading.RLock()
        self._next_block = 1
        self._local = threading.local()

    # -- the hot path: one flat function for each kind of record --------------------------------

    def span(  # exempt from brevity: a call into a helper costs a fifth of a record
        self,
        descriptor: int,
        level: int,
        start: int,
        end: int,
        size: int = 0,
        parent: int = 0,
        seq: int = 0,
        partition: int = 0,
        a: int = 0,
        b: int = 0,
        flags: int = 0,
        source: int = 0,
        number: int = 0,
        step: int = -1,
    ) -> None:
        """Record something that is over: times in monotonic ns, sizes in bytes (contract 2)."""
        if level > self.level:
            return
        try:
            lane = self._local.lane
        except AttributeError:
            lane = self._new_lane()
        slots, lease, buffer = lane.chunk
        offset = next(slots, 0)
        if not offset:
            offset, lease, buffer = self._next_slot(lane)
            if not offset:
                return
        _pack(
            buffer,
            offset,
            number or next(lane.numbers, 0) or self._next_number(lane),
            (self.step if step < 0 else step) & _M32,
            descriptor & _M32,
            SPAN,
            level << 4 | source,
            flags & _M16,
            start & _M64,
            end & _M64,
            size & _M64,
            parent & _M32,
            seq & _M32,
            a & _M32,
            b & _M32,
            partition & _M16,
            0,
            lease,
        )

    def begin(
        self,
        descriptor: int,
        level: int,
        start: int,
        size: int = 0,
        parent: int = 0,
        seq: int = 0,
        a: int = 0,
        b: int = 0,
        flags: int = 0,
        step: int = -1,
        number: int = 0,
    ) -> int:
        """Record that something has begun, so that a hang or a kill shows it; return its span number.

        0, and nothing recorded, where *level* is not recorded.
        """
        if level > self.level:
            return 0
        try:
            lane = self._local.lane
        except AttributeError:
            lane = self._new_lane()
        number = number or next(lane.numbers, 0) or self._next_number(lane)
        slots, lease, buffer = lane.chunk
        offset = next(slots, 0)
        if not offset:
            offset, lease, buffer = self._next_slot(lane)
            if not offset:
                return number
        _pack(
            buffer,
            offset,
            number,
            (self.step if step < 0 else step) & _M32,
            descriptor & _M32,
            BEGIN,
            level << 4,
            flags & _M16,
            start & _M64,
            0,
            size & _M64,
            parent & _M32,
            seq & _M32,
            a & _M32,
            b & _M32,
            0,
            0,
            lease,
        )
        return number

    def counter(self, descriptor: int, level: int, at: int, value: int) -> None:
        """Record that the metric *descriptor* had *value* at *at* (monotonic ns)."""
        if level > self.level:
            return
        lane = self._lane()
        offset, lease, buffer = self._slot(lane)
        if offset:
            head = (0, self.step & _M32, descriptor & _M32, COUNTER, level << 4, 0)
            _pack(buffer, offset, *head, at & _M64, 0, value & _M64, 0, 0, 0, 0, 0, 0, lease)

    def error(self, number: int, level: int, error: BaseException, step: int = -1) -> None:
        """Record that the span *number* failed with *error*: its type, and 36 bytes of its message."""
        if level > self.level:
            return
        lane = self._lane()
        kind = self.names.string(f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins."))
        message = str(error).encode("utf-8", "replace")[:36]
        offset, lease, buffer = self._slot(lane)
        if offset:
            head = (number, (self.step if step < 0 else step) & _M32, 0, AMEND, level << 4, Flag.ERROR)
            _pack_amend_error(buffer, offset, *head, kind, message, AMEND_ERROR, lease)

    # -- lanes ----------------------------------------------------------------------------------

    def number(self) -> int:
        """Draw a span number."""
        lane = self._lane()
        return next(lane.numbers, 0) or self._next_number(lane)

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._local, "lane", None)
        return lane if lane is not None else self._new_lane()

    def _new_lane(self) -> _Lane:
        lane = self._local.lane = _Lane()
        return lane

    def _slot(self, lane: _Lane) -> tuple[int, int, Any]:
        slots, lease, buffer = lane.chunk
        offset = next(slots, 0)
        return (offset, lease, buffer) if offset else self._next_slot(lane)

    def _next_slot(self, lane: _Lane) -> tuple[int, int, Any]:
        """Return a slot of a freshly leased chunk; offset 0 where there is no ring to write to."""
        ring = self.ring or self._make_ring()
        if ring is None:
            return 0, 0, None
        if lane.ring is not ring:
            lane.ring, lane.index = ring, -1
        slots, lease, lane.index = ring.lease(lane.index)
        lane.chunk = (slots, lease, ring.buffer)
        return next(slots, 0), lease, ring.buffer

    def _next_number(self, lane: _Lane) -> int:
        with self._lock:
            first = self._next_block
            self._next_block = first + BLOCK
        lane.numbers = iter(range(first, first + BLOCK))
        return next(lane.numbers)

    # -- the ring's life ------------------------------------------------------------------------

    def _make_ring(self) -> RingWriter | None:
        """Make the ring and its names file; without room, tracing is off with one sentence."""
        with self._lock:
            if self.ring is not None or not self.level:
                return self.ring
            try:
                ring = RingWriter(self._folder, self._size)
                mode = os.stat(ring.path).st_mode & 0o777
                anchor = tightest_anchor(time.monotonic_ns, time.time_ns)
                self.names.open(ring.path.with_suffix(".names"), mode, anchor, self._home)
            except (RingError, OSError) as error:
                self.level = 0
                guard.say(str(error))
                return None
            self.ring = ring
        self._on_first_record()
        return ring

    def intern(self, descriptor: Descriptor) -> int:
        """Return the number of *descriptor* in this process."""
        return self.names.descriptor(descriptor)

    def bind(self, bind: Bind) -> None:
        """Say who this process is, from the current step on (from the first, if it is the first to say so)."""
        start = 0 if self.step == NO_STEP or not self.names.binds else self.step
        self.names.bind(bind.from_now(start))

    @property
    def bound(self) -> Bind | None:
        """The latest bind."""
        return self.names.binds[-1] if self.names.binds else None

    def close(self) -> None:
        """Record nothing more and free the ring's lock, so that the drain reads it to its end."""
        with self._lock:
            self.level = 0
            ring, self.ring = self.ring, None
            self._local = threading.local()
            if ring is not None:
                ring.close()
            self.names.close()

    def after_fork(self) -> None:
        """Leave the parent's ring alone: this child makes its own at its first record."""
        self._lock = threading.RLock()
        self._local = threading.local()
        ring, self.ring = self.ring, None
        if ring is not None:
            ring.close()  # the child's descriptor; the parent's lock is the parent's
        self.names.after_fork()

"""The hot path: one 64-byte record for each thing that happened, written by the thread that saw it."""

import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from otel_dltrace.model.errors import RingError
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import Flag, Level
from otel_dltrace.model.time import tightest_anchor
from otel_dltrace.record import guard
from otel_dltrace.record.names import Followed, NamesWriter
from otel_dltrace.record.ring import (
    AMEND,
    AMEND_DEVICE,
    AMEND_ERROR,
    AMEND_PARENT,
    BEGIN,
    COUNTER,
    RECORD,
    SPAN,
    RingWriter,
)

# RECORD_FORMAT with its spare field as padding, which costs nothing to pack.
_pack = struct.Struct("<IIIBBHQQQIIiiH2xI").pack_into
# A BEGIN has no end and no partition yet.
_pack_begin = struct.Struct("<IIIBBHQ8xQIIii4xI").pack_into
# The same bytes for a phase, whose flags, source, seq, a, b and partition are 0; kind and level are one field.
_pack_phase = struct.Struct("<IIIIQQQI16xI").pack_into
_pack_block = struct.Struct("<IIIIQQQQ12xI").pack_into
_PHASE_SPAN = SPAN | Level.PHASE << 12
_pack_amend_error = struct.Struct("<IIIBBHI36sII").pack_into
_pack_amend_device = struct.Struct("<IIIBBHQQIQ12xII").pack_into
_pack_amend_parent = struct.Struct("<IIIBBH16s8sII8xII").pack_into
_error = struct.error
_HOLE = bytes(RECORD)
_REMOTE = int(Flag.REMOTE)
_M16, _M32, _M64, _SIGN = 0xFFFF, 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF, 0x8000_0000
DRAIN_CHECK_S = 1.0
BLOCK = 256  # span numbers a thread takes at a time

Chunk = tuple[Iterator[int], int, Any, int]
"""Offsets left, lease, buffer, index: replaced as one, so that they always belong together."""
_NO_CHUNK: Chunk = (iter(()), 0, None, -1)


class _Lane:
    """What one thread holds: a chunk, and a block of span numbers.

    When the thread ends (or, called from C, loses its Python state after each call) what is left
    goes to *parked*, for the next thread: else every such call would use up a chunk.
    """

    __slots__ = ("chunk", "numbers", "parked", "thread")

    def __init__(self, parked: list[tuple[Chunk, Iterator[int]]]) -> None:
        self.parked = parked
        self.thread = threading.get_native_id()
        try:
            self.chunk, self.numbers = parked.pop()
        except IndexError:
            self.chunk, self.numbers = _NO_CHUNK, iter(())

    def __del__(self) -> None:
        if self.chunk[3] >= 0:
            self.parked.append((self.chunk, self.numbers))


class Block(Protocol):
    """A phase as it is written: what `Recorder.phase` takes one by one.

    *parent* is the parent's number and, above its 32 bits, the occurrence, as they lie in the record.
    """

    descriptor: int
    start: int
    size: int
    parent: int
    number: int
    step: int


class Recorder:
    """Writes the records of one process; makes its ring at the first one.

    A signal handler or a garbage collection may interrupt a record anywhere a Python call returns,
    and record itself. So a slot is packed only if its chunk is still this thread's (`lane.chunk is
    chunk`), and nothing can come between that test and the pack.

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
        need_drain: Callable[[], None] = lambda: None,
    ) -> None:
        self.level = int(level)
        self.step = NO_STEP
        self.names = NamesWriter()
        self.ring: RingWriter | None = None
        self._folder, self._size, self.home = folder, size, home or {}
        self._need_drain = need_drain
        self._drain_seen = 0.0
        self._lock = threading.RLock()
        self._making = False
        self._next_block = 1
        self._parked: list[tuple[Chunk, Iterator[int]]] = []
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
        if not number:
            number = next(lane.numbers, 0) or self._next_number(lane)
        if step < 0:
            step = self.step
        chunk = lane.chunk
        slots, lease, buffer, _ = chunk
        offset = next(slots, 0)
        if offset and lane.chunk is chunk:
            try:
                _pack(
                    buffer,
                    offset,
                    number,
                    step,
                    descriptor,
                    2,  # SPAN
                    level << 4 | source,
                    flags,
                    start,
                    end,
                    size,
                    parent,
                    seq,
                    a,
                    b,
                    partition,
                    lease,
                )
            except _error:
                buffer[offset : offset + RECORD] = _HOLE
            else:
                return
        fields = (number, step, descriptor, SPAN, level << 4 | source, flags)
        self._write(lane, _pack, _masked(fields, start, end, size, parent, seq, a, b, partition))

    def phase(
        self, descriptor: int, start: int, end: int, size: int = 0, parent: int = 0, number: int = 0, step: int = -1
    ) -> None:
        """Record a phase that is over, the most frequent record: `span` without the fields that a phase leaves 0."""
        if self.level < 3:
            return
        try:
            lane = self._local.lane
        except AttributeError:
            lane = self._new_lane()
        if not number:
            number = next(lane.numbers, 0) or self._next_number(lane)
        chunk = lane.chunk
        slots, lease, buffer, _ = chunk
        offset = next(slots, 0)
        if offset and lane.chunk is chunk:
            try:
                _pack_phase(
                    buffer,
                    offset,
                    number,
                    self.step if step < 0 else step,
                    descriptor,
                    _PHASE_SPAN,
                    start,
                    end,
                    size,
                    parent,
                    lease,
                )
            except _error:
                buffer[offset : offset + RECORD] = _HOLE
            else:
                return
        self.span(descriptor, 3, start, end, size, parent, number=number, step=step)

    def block(self, block: Block, end: int) -> None:
        """Record a phase that knows its own fields and is over: handing them over costs 4 % of a `phase()`.

        It asked for the level when it began; where recording has ended since, no thread has a chunk.
        """
        try:
            lane = self._local.lane
        except AttributeError:
            lane = self._new_lane()
        number = block.number or next(lane.numbers, 0) or self._next_number(lane)
        chunk = lane.chunk
        slots, lease, buffer, _ = chunk
        offset = next(slots, 0)
        if offset and lane.chunk is chunk:
            try:
                _pack_block(
                    buffer,
                    offset,
                    number,
                    block.step,
                    block.descriptor,
                    _PHASE_SPAN,
                    block.start,
                    end,
                    block.size,
                    block.parent,
                    lease,
                )
            except _error:
                buffer[offset : offset + RECORD] = _HOLE
            else:
                return
        parent, seq = block.parent & _M32, block.parent >> 32
        self.span(block.descriptor, 3, block.start, end, block.size, parent, seq, number=number, step=block.step)

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
        if not number:
            number = next(lane.numbers, 0) or self._next_number(lane)
        if step < 0:
            step = self.step
        chunk = lane.chunk
        slots, lease, buffer, _ = chunk
        offset = next(slots, 0)
        if offset and lane.chunk is chunk:
            try:
                _pack_begin(
                    buffer,
                    offset,
                    number,
                    step,
                    descriptor,
                    1,  # BEGIN
                    level << 4,
                    flags,
                    start,
                    size,
                    parent,
                    seq,
                    a,
                    b,
                    lease,
                )
            except _error:
                buffer[offset : offset + RECORD] = _HOLE
            else:
                return number
        head = (number, step, descriptor, BEGIN, level << 4, flags)
        self._write(lane, _pack, _masked(head, start, 0, size, parent, seq, a, b, 0))
        return number

    def counter(self, descriptor: int, level: int, at: int, value: int) -> None:
        """Record that the metric *descriptor* had *value* at *at* (monotonic ns)."""
        if level <= self.level:
            head = (0, self.step, descriptor, COUNTER, level << 4, 0)
            self._write(self._lane(), _pack, _masked(head, at, 0, value, 0, 0, 0, 0, 0))

    def error(self, number: int, level: int, error: BaseException, step: int = -1) -> None:
        """Record that the span *number* failed with *error*: its type, and 36 bytes of its message."""
        if level <= self.level:
            kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
            self.failure(number, level, kind, guard.text_of(error), step)

    def failure(self, number: int, level: int, kind: str, message: str, step: int = -1) -> None:
        """Record that the span *number* failed with an error of which only type and *message* are known."""
        if level > self.level:
            return
        step = (self.step if step < 0 else step) & _M32
        head = (number & _M32, step, 0, AMEND, level << 4, int(Flag.ERROR))
        text = message.encode("utf-8", "replace")[:36]
        self._write(self._lane(), _pack_amend_error, (*head, self.names.string(kind), text, AMEND_ERROR))

    def device(
        self, number: int, level: int, start: int, end: int, residual: int, total: int, source: int, step: int
    ) -> None:
        """Record that a device was at the span *number*, which says so by ``Flag.DEVICE``, from *start* to *end*.

        Args:
            number: The span's.
            level: The span's.
            start: Monotonic ns of the host.
            end: Likewise.
            residual: By how many ns the device's clock, as it is tied to the host's, may be wrong.
            total: ns in all its pieces together, of a stage.
            source: What the end means.
            step: The span's.
        """
        if level <= self.level:
            head = (number & _M32, step & _M32, 0, AMEND, level << 4 | source, int(Flag.DEVICE))
            times = (start & _M64, end & _M64, min(residual, _M32), total & _M64)
            self._write(self._lane(), _pack_amend_device, (*head, *times, AMEND_DEVICE))

    def remote_parent(self, number: int, level: int, trace: bytes, span: bytes, step: int, rank: int) -> None:
        """Record that the span *number*, which says so by ``Flag.REMOTE``, is below *span*, of another process.

        Args:
            number: The span's.
            level: The span's.
            trace: Id of the trace that both are in.
            span: Id of the span above it.
            step: Of the process that has sent the request.
            rank: Likewise.
        """
        if level <= self.level:
            step, number = step & _M32, number & _M32
            fields = (number, step, 0, AMEND, level << 4, _REMOTE, trace, span, step, rank & _M32, AMEND_PARENT)
            self._write(self._lane(), _pack_amend_parent, fields)

    def _write(self, lane: _Lane, pack: Callable[..., None], fields: tuple[int | bytes, ...]) -> None:
        """Pack *fields* into the next slot, of a newly leased chunk if need be."""
        while True:
            chunk = lane.chunk
            slots, lease, buffer, _ = chunk
            offset = next(slots, 0)
            if not offset:
                if not self._lease(lane):
                    return
            elif lane.chunk is chunk:
                pack(buffer, offset, *fields, lease)
                return

    # -- lanes ----------------------------------------------------------------------------------

    def number(self) -> int:
        """Draw a span number."""
        try:
            lane = self._local.lane
        except AttributeError:
            lane = self._new_lane()
        return next(lane.numbers, 0) or self._next_number(lane)

    def _lane(self) -> _Lane:
        lane: _Lane | None = getattr(self._local, "lane", None)
        return lane or self._new_lane()

    def _new_lane(self) -> _Lane:
        lane = self._local.lane = _Lane(self._parked)
        return lane

    def _lease(self, lane: _Lane) -> bool:
        """Give *lane* a new chunk for its full one; return whether there was one.

        Every chunk that is put into a lane is taken out once and given back by who took it out,
        whatever a signal handler does in between.
        """
        ring = self.ring or self._make_ring()
        if ring is None:
            return False
        old, lane.chunk = lane.chunk, _NO_CHUNK
        ring.release(old[3])
        slots, lease, index = ring.lease(lane.thread)
        if index >= 0:
            chunk = (slots, lease, ring.buffer, index)
        elif self._parked:
            chunk = self._parked.pop()[0]
        else:
            return False
        old, lane.chunk = lane.chunk, chunk
        ring.release(old[3])
        if time.monotonic() - self._drain_seen >= DRAIN_CHECK_S:
            self._see_to_drain()
        return True

    def _next_number(self, lane: _Lane) -> int:
        with self._lock:
            first = self._next_block
            # The last number has 32 bits; the step beside it keeps ids apart after that.
            self._next_block = first + BLOCK if first + 2 * BLOCK <= 1 << 32 else 1
        lane.numbers = iter(range(first + 1, first + BLOCK))
        return first

    # -- the ring's life ------------------------------------------------------------------------

    def _make_ring(self) -> RingWriter | None:
        """Make the ring and its names file; without room, tracing is off with one sentence."""
        with self._lock:
            if self.ring is not None or not self.level or self._making:
                return self.ring  # none: a signal handler that records while the ring is being made
            self._making = True
            ring = None
            try:
                ring = RingWriter(self._folder, self._size)
                mode = ring.mode
                anchor = tightest_anchor(time.monotonic_ns, time.time_ns)
                self.names.open(ring.path.with_suffix(".names"), mode, anchor, self.home)
            except RingError as error:
                self.level = 0
                guard.say(f"{error}; tracing is off")
                if ring is not None:
                    ring.close()
                return None
            finally:
                self._making = False
            self.ring = ring
        self._see_to_drain()
        return ring

    def _see_to_drain(self) -> None:
        """Have a drain started if none runs: at the first record, and now and then, since it may have been killed."""
        self._drain_seen = time.monotonic()
        guard.guarded(self._need_drain)()

    def intern(self, descriptor: Descriptor) -> int:
        """Return the number of *descriptor* in this process."""
        return self.names.descriptor(descriptor)

    def bind(self, bind: Bind) -> None:
        """Say who this process is, from the current step on (from the first, if it is the first to say so)."""
        start = 0 if self.step == NO_STEP or not self.names.binds else self.step
        self.names.bind(bind.from_now(start))

    def follow(self, path: str) -> None:
        """Have the drain read the timeline *path*, which the process's framework writes, as it grows."""
        anchor = tightest_anchor(time.monotonic_ns, time.time_ns)
        self.names.follow(Followed(str(Path(path).absolute()), anchor))

    @property
    def bound(self) -> Bind | None:
        """The latest bind."""
        return self.names.binds[-1] if self.names.binds else None

    def close(self) -> None:
        """Record nothing more and free the ring's lock, so that the drain reads it to its end."""
        with self._lock:
            self.level = 0
            ring, self.ring = self.ring, None
            self._forget_lanes()
            if ring is not None:
                ring.close()
            self.names.close()

    def after_fork(self) -> None:
        """Leave the parent's ring alone: this child makes its own at its first record."""
        self._lock = threading.RLock()
        self._making = False
        self._lane().chunk = _NO_CHUNK  # a record that the fork interrupted goes to the new ring
        self._forget_lanes()
        ring, self.ring = self.ring, None
        if ring is not None:
            ring.close()  # the child's descriptor; the parent's lock is the parent's
        self.names.after_fork()

    def _forget_lanes(self) -> None:
        self._local = threading.local()
        self._parked.clear()


def _masked(
    head: tuple[int, int, int, int, int, int],
    start: int,
    end: int,
    size: int,
    parent: int,
    seq: int,
    a: int,
    b: int,
    partition: int,
) -> tuple[int, ...]:
    """Return a record's fields, each cut to its width."""
    number, step, descriptor, kind, level, flags = head
    return (
        number & _M32,
        step & _M32,
        descriptor & _M32,
        kind,
        level & 0xFF,
        flags & _M16,
        start & _M64,
        end & _M64,
        size & _M64,
        parent & _M32,
        seq & _M32,
        ((a + _SIGN) & _M32) - _SIGN,
        ((b + _SIGN) & _M32) - _SIGN,
        partition & _M16,
    )

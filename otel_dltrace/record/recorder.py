"""The hot path: one 64-byte record for each thing that happened, written by the thread that saw it."""

import re
import struct
import time
from collections.abc import Callable
from pathlib import Path

from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import Flag
from otel_dltrace.model.time import tightest_anchor
from otel_dltrace.record import guard
from otel_dltrace.record.lanes import Lane, Lanes
from otel_dltrace.record.names import Followed
from otel_dltrace.record.packing import (
    BEGINS,
    MESSAGE,
    PARENTS,
    SPANS,
    masked,
    pack_amend_device,
    pack_amend_error,
    pack_amend_parent,
    pack_begin,
    pack_span,
)
from otel_dltrace.record.ring_file import AMEND, AMEND_DEVICE, AMEND_ERROR, AMEND_PARENT, BEGIN, COUNTER, SPAN

_error = (struct.error, TypeError)  # the second is that of an array, which is an index only where it has one number
_SOURCE = re.compile(r"^\[[^]]*\.(cc|cpp|h):\d+\] *")
"""Where in Gloo's source an error is from, with which its messages begin: nothing else would find room."""
_M32, _M64 = 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF


class Recorder(Lanes):
    """Writes the records of one process; makes its ring at the first one."""

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
            lane = self.local.lane
        except AttributeError:
            lane = self.new_lane()
        if not number:
            number = next(lane.numbers, 0) or self.next_number(lane)
        if step < 0:
            step = self.step
        head = SPANS[level]
        if source or flags:  # not among what is packed: Python 3.10 lets others come in where it jumps
            head |= source << 8 | flags << 16
        chunk = lane.chunk
        slots, lease, buffer, _ = chunk
        offset = next(slots, 0)
        if offset and lane.chunk is chunk:
            try:
                pack_span(
                    buffer,
                    offset,
                    number,
                    step,
                    descriptor,
                    head,
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
                if not self.spoil(offset, lease):
                    return
            else:
                return
        fields = (number, step, descriptor, SPAN, level << 4 | source, flags)
        self._write(lane, pack_span, masked(fields, start, end, size, parent, seq, a, b, partition))

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
            lane = self.local.lane
        except AttributeError:
            lane = self.new_lane()
        if not number:
            number = next(lane.numbers, 0) or self.next_number(lane)
        if step < 0:
            step = self.step
        head = BEGINS[level]
        if flags:  # here, as in `span`
            head |= flags << 16
        chunk = lane.chunk
        slots, lease, buffer, _ = chunk
        offset = next(slots, 0)
        if offset and lane.chunk is chunk:
            try:
                pack_begin(
                    buffer,
                    offset,
                    number,
                    step,
                    descriptor,
                    head,
                    start,
                    size,
                    parent,
                    seq,
                    a,
                    b,
                    lease,
                )
            except _error:
                if not self.spoil(offset, lease):
                    return number
            else:
                return number
        fields = (number, step, descriptor, BEGIN, level << 4, flags)
        self._write(lane, pack_span, masked(fields, start, 0, size, parent, seq, a, b, 0))
        return number

    def counter(self, descriptor: int, level: int, at: int, value: int) -> None:
        """Record that the metric *descriptor* had *value* at *at* (monotonic ns)."""
        if level <= self.level:
            head = (0, self.step, descriptor, COUNTER, level << 4, 0)
            self._write(self.lane(), pack_span, masked(head, at, 0, value, 0, 0, 0, 0, 0))

    def error(self, number: int, level: int, error: BaseException, step: int = -1) -> None:
        """Record that the span *number* failed with *error*: its type, and what 36 bytes hold of its message."""
        if level > self.level:
            return
        kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        step = (self.step if step < 0 else step) & _M32
        head = (number & _M32, step, 0, AMEND, level << 4, int(Flag.ERROR))
        text = _SOURCE.sub("", guard.text_of(error)).encode("utf-8", "replace")
        short = text if len(text) <= MESSAGE else text[: MESSAGE - 3] + b"..."
        self._write(self.lane(), pack_amend_error, (*head, self.names.string(kind), short, AMEND_ERROR))

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
            self._write(self.lane(), pack_amend_device, (*head, *times, AMEND_DEVICE))

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
            fields = (number, step, 0, PARENTS[level], trace, span, step, rank & _M32, AMEND_PARENT)
            self._write(self.lane(), pack_amend_parent, fields)

    def _write(self, lane: Lane, pack: Callable[..., None], fields: tuple[int | bytes, ...]) -> None:
        """Pack *fields* into the next slot, of a newly leased chunk if need be."""
        while True:
            chunk = lane.chunk
            slots, lease, buffer, _ = chunk
            offset = next(slots, 0)
            if not offset:
                if not self.lease(lane):
                    return
            elif lane.chunk is chunk:
                pack(buffer, offset, *fields, lease)
                return

    # -- names ----------------------------------------------------------------------------------

    def intern(self, descriptor: Descriptor) -> int:
        """Return the number of *descriptor* in this process."""
        return self.names.descriptor(descriptor)

    def bind(self, bind: Bind, step: int | None = None, since: int = 0) -> None:
        """Say who this process is, from *step* (the current one) on; from the first, if it is the first to say so.

        What is in no step is of its time: it was so *since* then (monotonic ns, default now).
        """
        current = 0 if self.step == NO_STEP else self.step
        start = 0 if not self.names.binds else current if step is None else step
        self.names.bind(bind.from_now(start, since or time.monotonic_ns()))

    def follow(self, path: str) -> None:
        """Have the drain read the timeline *path*, which the process's framework writes, as it grows."""
        anchor = tightest_anchor(time.monotonic_ns, time.time_ns)
        self.names.follow(Followed(str(Path(path).absolute()), anchor))

    @property
    def bound(self) -> Bind | None:
        """The latest bind."""
        return self.names.binds[-1] if self.names.binds else None

"""The ring of one process, made at its first record, and where its threads write in it."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from otel_dltrace.model.errors import RingError
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.semconv import Level
from otel_dltrace.model.time import tightest_anchor
from otel_dltrace.record import guard
from otel_dltrace.record.names import NamesWriter
from otel_dltrace.record.ring import RingWriter
from otel_dltrace.record.ring_file import above_standard

DRAIN_CHECK_S = 1.0
BLOCK = 256  # span numbers a thread takes at a time

Chunk = tuple[Iterator[int], int, Any, int]
"""Offsets left, lease, buffer, index: replaced as one, so that they always belong together."""
_NO_CHUNK: Chunk = (iter(()), 0, None, -1)


class Lane:
    """What all threads share, or where there is no GIL one of them holds: a chunk, and a block of span numbers.

    When a thread ends that has one of its own (or, called from C, loses its Python state after each call) what is
    left goes to *parked*, for the next thread: else every such call would use up a chunk.
    """

    __slots__ = ("chunk", "numbers", "parked")

    def __init__(self, parked: list[tuple[Chunk, Iterator[int]]]) -> None:
        self.parked = parked
        try:
            self.chunk, self.numbers = parked.pop()
        except IndexError:
            self.chunk, self.numbers = _NO_CHUNK, iter(())

    def __del__(self) -> None:
        """Leave what is left to another."""
        if self.chunk[3] >= 0:
            self.parked.append((self.chunk, self.numbers))


class _OneForAll:
    """The lane of every thread, under the GIL.

    A thread's own is found by `threading.local`, which in a training step, where nothing of it is in the processor's
    caches, takes 8 us, a quarter of a record.
    """

    __slots__ = ("lane",)

    def __init__(self) -> None:
        self.lane = Lane([])


def _lanes_of_threads() -> Any:
    """Return what has the lane of whoever asks; a Python that can do without GIL may have it for a moment alone."""
    return threading.local() if "t" in sys.abiflags else _OneForAll()


class Lanes:
    """The ring and the names file of one process, and what its threads hold of them.

    Another thread, a signal handler or a garbage collection may interrupt a record anywhere a Python call returns,
    and record itself. So a slot is packed only if its chunk is still the lane's (`lane.chunk is chunk`), and nothing
    can come between that test and the pack; a slot whose chunk is not any more stays a hole.

    Attributes:
        level: The finest level that is recorded; 0 while tracing is off.
        step: The ordinal of the current step, ``NO_STEP`` before the first.
        names: The names file.
        ring: None before the first record, and after the last.
        home: What the drain needs to know of who writes.
        local: Its `lane` is this thread's; without the GIL it has none before the thread's first record.
    """

    def __init__(
        self,
        folder: Path,
        size: int,
        level: int = Level.PHASE,
        home: dict[str, Any] | None = None,
        need_drain: Callable[[], None] = lambda: None,
    ) -> None:
        self.level, self.step = int(level), NO_STEP
        self.names = NamesWriter()
        self.ring: RingWriter | None = None
        self._folder, self._size, self.home = folder, size, home or {}
        self._need_drain = need_drain
        self._drain_seen = 0.0
        self._lock = threading.RLock()
        self._making = False
        self._next_block = 1
        self._parked: list[tuple[Chunk, Iterator[int]]] = []
        self.local = _lanes_of_threads()

    def number(self) -> int:
        """Draw a span number."""
        try:
            lane = self.local.lane
        except AttributeError:
            lane = self.new_lane()
        return next(lane.numbers, 0) or self.next_number(lane)

    def lane(self) -> Lane:
        """Return what this thread holds."""
        lane: Lane | None = getattr(self.local, "lane", None)
        return lane or self.new_lane()

    def new_lane(self) -> Lane:
        """Return what this thread, without the GIL, holds from now on, at its first record."""
        lane = self.local.lane = Lane(self._parked)
        return lane

    def lease(self, lane: Lane) -> bool:
        """Give *lane* a new chunk for its full one; return whether there was one.

        Every chunk that is put into a lane is taken out once and given back by who took it out,
        whatever another thread or a signal handler does in between.
        """
        ring = self.ring or self._make_ring()
        if ring is None:
            return False
        old, lane.chunk = lane.chunk, _NO_CHUNK
        ring.release(old[3])
        slots, lease, index = ring.lease(threading.get_native_id())
        try:
            chunk = (slots, lease, ring.buffer, index) if index >= 0 else self._parked.pop()[0]
        except IndexError:
            return False
        old, lane.chunk = lane.chunk, chunk
        ring.release(old[3])
        if time.monotonic() - self._drain_seen >= DRAIN_CHECK_S:
            self._see_to_drain()
        return True

    def next_number(self, lane: Lane) -> int:
        """Give *lane* a new block of span numbers; return the first one."""
        with self._lock:
            first = self._next_block
            # The last number has 32 bits; the step beside it keeps ids apart after that.
            self._next_block = first + BLOCK if first + 2 * BLOCK <= 1 << 32 else 1
        lane.numbers = iter(range(first + 1, first + BLOCK))
        return first

    def spoil(self, offset: int, lease: int) -> bool:
        """Make the slot at *offset*, into which packing has failed, one that was never written; return whether it was.

        It is not where the chunk has been leased anew since: Python 3.10 lets other threads in where an error is
        caught, and others collect garbage where one is made. Then it counts as overwritten, and is another's by now.
        """
        ring = self.ring
        return ring is None or ring.spoil(offset, lease)

    # -- the ring's life ------------------------------------------------------------------------

    def _make_ring(self) -> RingWriter | None:
        """Make the ring and its names file; without room, tracing is off with one sentence."""
        with self._lock:
            if self.ring is not None or not self.level or self._making:
                return self.ring  # none: a signal handler that records while the ring is being made
            self._making = True
            ring = None
            try:
                with above_standard():
                    ring = RingWriter(self._folder, self._size)
                    anchor = tightest_anchor(time.monotonic_ns, time.time_ns)
                    self.names.open(ring.path.with_suffix(".names"), ring.mode, anchor, self.home)
            except RingError as error:
                self.level = 0
                guard.say(f"{error}; tracing is off")
                if ring is not None:  # no drain reads one that says nothing of whose it is
                    ring.close()
                    ring.path.with_suffix(".names").unlink(missing_ok=True)
                    ring.path.unlink(missing_ok=True)
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
        self.lane().chunk = _NO_CHUNK  # a record that the fork interrupted goes to the new ring
        self._forget_lanes()
        ring, self.ring = self.ring, None
        if ring is not None:
            ring.close()  # the child's descriptor; the parent's lock is the parent's
            ring.end_reading()
        self.names.after_fork()

    def _forget_lanes(self) -> None:
        self.local = _lanes_of_threads()
        self._parked.clear()

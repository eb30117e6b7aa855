"""The reading side of a ring: new records, each once, from a writer that is alive or dead (contract 2)."""

import mmap

import numpy as np

from otel_dltrace.export.rings.records import RECORD_DTYPE
from otel_dltrace.model.arrays import Column
from otel_dltrace.record.ring_file import CHUNK, HISTORY_AT, LEVELS, PAGE, RECORD, RECORDS, UNRECORDED_AT, read_header

TAKEN = np.dtype([("slots", "<u8"), ("levels", "<u4", (LEVELS,)), ("lease", "<u4")], align=True)
"""What was read of one chunk: its lease, a bit per slot, and all records accounted for, per level."""
_PLACES = CHUNK // RECORD  # of 64 bytes in a chunk: its header, then the slots; as many as a number has bits
_ALL_SLOTS = np.uint64(0xFFFF_FFFF_FFFF_FFFE)
_HISTORY = slice(HISTORY_AT // 4, HISTORY_AT // 4 + LEVELS)  # in words of 32 bits
_LEVEL_CODES = 16  # what four bits can hold; 1 to 4 are levels
_STRIDE = 256
"""So many chunks are looked at together: in the five seconds between two reads a rank leases some hundred."""


class RingReader:
    """Reads the ring in *buffer*.

    *taken* (an array of `TAKEN`, an entry per chunk) can be stored and given back, so that a later
    reader goes on where this one stopped.

    Raises:
        RingError: These bytes are no ring.
    """

    def __init__(self, buffer: mmap.mmap | memoryview, taken: Column | None = None) -> None:
        with memoryview(buffer) as view:  # let go of at once, else the traceback keeps the caller from closing it
            self.header = read_header(view)
        chunks = self.header.chunks
        self._unrecorded = np.frombuffer(buffer, "<u8", 1, UNRECORDED_AT)
        self._records = np.frombuffer(buffer, RECORD_DTYPE, chunks * _PLACES, PAGE)
        self._words = np.frombuffer(buffer, "<u4", chunks * CHUNK // 4, PAGE).reshape(chunks, -1)
        self._leases, self._history = self._words[:, 0], self._words[:, _HISTORY]
        self._commits = self._words.reshape(chunks, _PLACES, -1)[:, :, -1]
        state = taken if taken is not None and len(taken) == chunks else np.zeros(chunks, TAKEN)
        self._slots, self._levels, self._lease = (state[name].copy() for name in ("slots", "levels", "lease"))
        self._seen = np.zeros(chunks, np.uint64)
        # For each chunk the lease under which all its slots have been read.
        self._done = np.where(self._slots == _ALL_SLOTS, self._lease, np.uint32(0))
        self._next = 0
        self._open = self._everywhere()
        self._lapped = np.zeros(LEVELS, np.int64)

    @property
    def taken(self) -> Column:
        """What has been read, for a later reader."""
        taken = np.zeros(len(self._slots), TAKEN)
        taken["slots"], taken["levels"], taken["lease"] = self._slots, self._levels, self._lease
        return taken

    @property
    def chunks(self) -> int:
        """How many chunks the ring has."""
        return len(self._done)

    @property
    def records(self) -> int:
        """How many records fit into the ring."""
        return self.chunks * RECORDS

    @property
    def lapped(self) -> list[int]:
        """How many records of each level (1..4) were overwritten before they were read."""
        return [0, *self._lapped.tolist()]

    @property
    def unrecorded(self) -> int:
        """How many records were not written, because others held every chunk."""
        return int(self._unrecorded[0])

    def is_past(self, chunks: int) -> bool:
        """Return whether so many *chunks* were leased since the last `read`: a look at the last of them."""
        at = (self._next + chunks - 1) % self.chunks
        return bool(self._leases[at] != self._lease[at])

    def read(self, final: bool = False, again: bool = False) -> Column:
        """Return the records that were committed before the last call (all, if *final*) as `RECORD_DTYPE`.

        *again* says that the last call was just now: then what it would have found in vain is not looked for.
        """
        unread = self._unread(everywhere=final, again=again)
        leases = self._leases[unread]
        is_leased = leases > 0  # else it is being leased
        at, lease = _in_order(unread[is_leased], leases[is_leased])
        is_new = lease != self._lease[at]
        if is_new.any():
            self._begin_leases(at[is_new], lease[is_new])
        while True:
            committed, new, chunk, records = self._look(at, lease, final)
            still = self._leases[at] == lease
            if still.all():
                break
            at, lease = at[still], lease[still]  # the others were leased anew while they were copied
        self._seen[at] = committed
        if len(records):
            self._slots[at] |= new
            self._done[at] = np.where(self._slots[at] == _ALL_SLOTS, lease, np.uint32(0))
            self._levels[at] += _levels_of(records, chunk, len(at))
        self._open = unread[leases != self._done[unread]]
        if final:
            self._count_lost(np.flatnonzero(self._leases == 0))
        return records

    def _unread(self, everywhere: bool, again: bool) -> Column:
        """Return the chunks that may have something new; all such, if *everywhere*.

        Chunks are leased in turn, so a writer goes on where it was: looking there is enough, and ten
        times as fast. Only many chunks in a row that threads keep stop this search, and then all are
        looked at, but not *again*.
        """
        if not everywhere:
            ahead = self._ahead()
            if len(ahead) or again:
                is_unread = np.zeros(len(self._done), bool)
                is_unread[self._open] = is_unread[ahead] = True
                return is_unread.nonzero()[0]
        return self._everywhere()

    def _everywhere(self) -> Column:
        """Return all chunks that have something new, and go on after the latest of them from now on."""
        found = np.flatnonzero(self._leases != self._done)
        if len(found):
            self._next = int(found[np.argmax(self._leases[found])]) + 1
        return found

    def _ahead(self) -> Column:
        """Return the chunks that were leased, one after the other, since the last call, but for some that are kept."""
        chunks, begin, found = len(self._done), self._next, [np.zeros(0, np.intp)]
        while self._next < begin + chunks:
            at = self._next % chunks
            end = at + min(_STRIDE, begin + chunks - self._next)  # once round: what it finds looks new until it is read
            new = (self._leases[at:end] != self._lease[at:end]).nonzero()[0]
            if not len(new):
                break
            found.append(at + new)
            self._next += int(new[-1]) + 1
        # Once round it is back where it began, and not where the writer is.
        return np.concatenate(found) if self._next < begin + chunks else self._everywhere()

    def _begin_leases(self, at: Column, lease: Column) -> None:
        """Forget what was read of the chunks *at* under earlier leases, and count what was not.

        If one is leased once more at this moment, its history may speak of *lease* already: then what
        it held is counted now, nothing of it is read, and the next call finds nothing more to count.
        """
        self._count_lapped(at, self._history[at])
        self._lease[at], self._slots[at], self._seen[at] = lease, 0, 0

    def _look(self, at: Column, lease: Column, final: bool) -> tuple[Column, Column, Column, Column]:
        """Look for new records in the chunks *at*, leased as *lease*: first at the commits, then at the records.

        Returns:
            For each chunk its committed slots and its new ones, as bits; for each new record which
            of the chunks it is in, and the record.
        """
        matches = self._commits[at] == lease[:, None]
        committed = np.packbits(matches.ravel(), bitorder="little").view("<u8") & _ALL_SLOTS
        # An earlier scan saw their commit: their bytes have arrived on every machine.
        settled = committed if final else committed & self._seen[at]
        new = settled & ~self._slots[at]
        places = np.unpackbits(new.view(np.uint8), bitorder="little").nonzero()[0]
        chunk = places // _PLACES
        return committed, new, chunk, self._records.take(at[chunk] * _PLACES + places % _PLACES)

    def _count_lapped(self, at: Column, history: Column) -> None:
        lapped = history - self._levels[at]  # both are 32 bits wide and go round
        if lapped.any():
            self._lapped += np.where(lapped < 1 << 31, lapped, 0).sum(axis=0, dtype=np.int64)
            self._levels[at] = history

    def _count_lost(self, at: Column) -> None:
        """Count what a writer erased that was killed while it leased a chunk anew."""
        self._count_lapped(at, self._history[at])
        self._lease[at] = self._slots[at] = 0

    def close(self) -> None:
        """Let go of the bytes."""
        del self._unrecorded, self._records, self._words, self._leases, self._history, self._commits


def _in_order(at: Column, lease: Column) -> tuple[Column, Column]:
    """Return both in the order in which the chunks were leased: of a stage's pieces the last one counts."""
    if not len(lease):
        return at, lease
    order = (lease - lease[0]).view(np.int32).argsort()  # the lease goes round, too
    return at[order], lease[order]


def _levels_of(records: Column, chunk: Column, chunks: int) -> Column:
    """Return how many of *records* have which level, shape (chunks, 4); *chunk* is that of each."""
    codes = chunk * _LEVEL_CODES + (records["level_source"] >> 4)
    counts = np.bincount(codes, minlength=chunks * _LEVEL_CODES).reshape(-1, _LEVEL_CODES)
    return counts[:, 1 : LEVELS + 1].astype(np.uint32)

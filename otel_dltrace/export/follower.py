"""Follows one ring from its first record to its last, for the drain."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from otel_dltrace.export.foreign.horovod_live import Told
from otel_dltrace.export.member import Member
from otel_dltrace.export.outgoing.gate import MAX_HELD
from otel_dltrace.export.rings.cursor import Cursor, Place
from otel_dltrace.export.rings.source import RingSource
from otel_dltrace.export.rings.unbound import KEEP_ROWS, KEEP_S, Unbound
from otel_dltrace.export.rundir.reader import read_descriptors
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.spans import empty_rows, stack_rows
from otel_dltrace.record import guard
from otel_dltrace.record.names import Followed
from otel_dltrace.record.ring_file import RECORDS, writer_is_alive

MakeMember = Callable[[RingSource, Bind], Member]
MOST_AT_ONCE = 16_384
"""So many records are not left for later; nor what a quarter of the ring holds: it shows them to the next drain."""
SCANS = 3
"""In a row: the first sees a record, the next copies it, after another one the step is final that it ended."""
LEAST_S = 0.1
"""Between two scans, for what the second one says of the writer's speed."""


class Follower:
    """Reads a ring, tells its rows to the member they belong to, and keeps the cursor.

    Attributes:
        filled: How much of its ring the writer fills in a second, as far as the last scan tells.
        is_over: Whether the writer is gone, as far as the last scan tells.
        is_dirty: Whether the cursor lags behind what was passed on.
        comes_back: Whether spans that waited for a name are still to be passed on.

    Args:
        source: The ring's reader.
        cursor: Where an earlier drain stopped.
        unbound: Where rows wait for a name.
        make_member: Returns the member for a bind of this ring.
    """

    def __init__(self, source: RingSource, cursor: Cursor, unbound: Unbound, make_member: MakeMember) -> None:
        self.source = source
        self.members: list[Member] = []
        self.filled = 0.0
        self._cursor, self._unbound, self._make_member = cursor, unbound, make_member
        self._owed: list[tuple[int, bool]] = []
        self._waiting: list[Column] = []
        self._count = 0
        self.comes_back = False
        self._coming: Iterator[Column] | None = None
        self._since = 0.0
        self._scanned_at = -LEAST_S
        self.is_dirty = self._is_stuck = self.is_over = False
        self._told: Told | None = None
        self._knows_timelines = False

    def scan(self, now: float, alive: bool | None = None, is_due: bool = True) -> bool:
        """Copy what is new out of the ring, for `take`, if there is reason to take; return whether there is.

        There is if it *is_due*, if it has become much, or if the writer is gone. *alive* tells whether the writer is,
        where the caller knows better than the ring's lock.
        """
        source = self.source
        alive = writer_is_alive(source.fd) if alive is None else alive
        self.is_over = not alive
        if self.comes_back:
            return True  # what is new stays in the ring, behind what is older
        much = min(MOST_AT_ONCE, source.reader.records // 4)
        if not (is_due or not alive or source.reader.is_past(much // RECORDS)):
            return False
        # With the run directory full or gone rows wait; in the ring, that counts what it overwrites, rather than here.
        if self._count < MAX_HELD:
            came = sum(source.scan(alive, again=turn > 0) for turn in range(SCANS if alive else 1))
            self.filled = came / source.reader.records / max(now - self._scanned_at, LEAST_S)
            self._scanned_at = now
        return True

    def take(self, now: float, asked: bool = False) -> None:
        """Pass on what was scanned; who has *asked* waits until all is on disk, also of a writer without a name."""
        rows = self._unbound.without_written(self.source.take(now), now)
        if len(rows):
            self._wait(rows, now)
        self._bind(now)
        if self.members:
            self._follow_timelines()
            for counters in self.source.take_counters():
                self._share_counters(counters)
            if self._count:
                self._pass_on(now)
            if self.comes_back:
                self._take_back(now)
            else:
                self._tell(now)  # what a timeline tells belongs to what is known by then
            self._show_open(now)
        elif self._count >= KEEP_ROWS or (self._count and (asked or now - self._since >= KEEP_S)):
            self._write_unbound(now)

    def _wait(self, rows: Column, now: float) -> None:
        self._since = self._since if self._count else now
        self._waiting.append(rows)
        self._count += len(rows)

    def _write_unbound(self, now: float) -> None:
        rows = self._drop_waiting()
        try:
            self._unbound.write(rows)
        except OSError:
            self._wait(rows, now)
            raise

    def _drop_waiting(self) -> Column:
        rows = self._waiting[0] if len(self._waiting) == 1 else stack_rows(self._waiting)
        self._waiting, self._count = [], 0
        self.is_dirty = True
        return rows

    def _bind(self, now: float) -> None:
        """Make a member for each bind; a writer that ended unbound is who its environment says."""
        binds = self.source.names.binds
        if not binds and self.source.ended:
            binds.append(self.source.environment_bind())
        if binds and not self.members:
            self.comes_back = self._unbound.is_there
            if self.comes_back and self._count:
                self._write_unbound(now)  # behind what is older
            self._unbound.close()
        goes_on = not self.members  # else what is in a run that it had before is this drain's own work
        for bind in binds[len(self.members) :]:
            member = self._make_member(self.source, bind)
            is_shared = any(member.writer is other.writer for other in self.members)
            if goes_on or not is_shared:
                member.go_on(self._cursor, now, holds=not is_shared)
            if is_shared or member.writer.has_counted(self.source.nonce):
                member.written = member.truncated = 0  # counted before, or by the first of the run, which sends it
            self.members.append(member)

    def _take_back(self, now: float) -> None:
        """Give the members the next file of the spans that waited for a name: all at once may be more than fits.

        The whole file, since no cursor says that half of one is elsewhere; after an error the rest comes next time.
        """
        self._is_stuck = True
        self._coming = self._coming or self._unbound.take_back()
        for rows in self._coming:
            self._wait(rows, now)
            self._pass_on(now)
        self._coming, self._is_stuck = None, False
        self.is_dirty = True
        dropped = self._unbound.remove_empty()
        if dropped is not None:
            self.members[0].dropped, self.comes_back = dropped, False

    def _pass_on(self, now: float) -> None:
        rows = self._drop_waiting()
        renumbered = self._renumbered(rows)
        if self._told is not None:
            guard.guarded(self._told.know)(renumbered)
        self._share_out(renumbered, now, lambda left: self._wait(rows[left], now))

    def _share_out(self, rows: Column, now: float, give_back: Callable[[Column], None]) -> None:
        """Give the members *rows*; where the disk is full the mask of those that nobody has is given back."""
        is_left = np.ones(len(rows), bool)
        try:
            for member, mine in self._by_member(rows):
                member.take(rows[mine], now)
                is_left[mine] = False
        except OSError:
            give_back(is_left)
            raise

    def _share_counters(self, counters: Column) -> None:
        renumbered = self._renumbered(counters)
        for member, mine in self._by_member(renumbered):
            member.take_counters(renumbered[mine])

    def _by_member(self, rows: Column) -> Iterator[tuple[Member, Any]]:
        """Yield each member, and a mask of those of *rows* that are of its steps, or of its time if of none."""
        if len(self.members) == 1:
            yield self.members[0], slice(None)
            return
        later = [member.bind for member in self.members[1:]]
        of_step = np.searchsorted([bind.from_step for bind in later], rows["step"].astype(np.int64), side="right")
        of_time = np.searchsorted([bind.since for bind in later], rows["start"].astype(np.int64), side="right")
        whose = np.where(rows["step"] == NO_STEP, of_time, of_step)
        for i, member in enumerate(self.members):
            mine = whose == i
            if mine.any():
                yield member, mine

    # -- timelines that the process's framework writes itself -----------------------------------

    def _follow_timelines(self) -> None:
        """Read the timelines that the process names; where that fails its spans go on without them."""
        timelines = self.source.names.timelines
        if timelines and not self._knows_timelines:
            self._knows_timelines = True
            guard.guarded(self._join)(timelines)

    def _join(self, timelines: Sequence[Followed]) -> None:
        """Have rows and what the timelines tell described by one table from now on."""
        source, member = self.source, self.members[-1]
        written = read_descriptors(member.writer.folder).get(source.nonce, ())
        before = member.all_rows() if self._cursor.taken is not None else empty_rows()
        self._told = Told(timelines, written, before, member.process.anchor.offset)
        source.joint = self._told.names

    def _renumbered(self, rows: Column) -> Column:
        """Return *rows*, which have the ring's numbers of descriptors, with those that `members` know."""
        joint = self.source.joint
        return rows if joint is None else joint.translate(rows, self.source.own)

    def _tell(self, now: float) -> None:
        """Pass on what the timelines tell; one that we cannot make sense of is read no further."""
        if self._told is None:
            return
        rows = guard.guarded(self._told.rows)(final=self.source.ended)
        if rows is None:
            self._told = None
        elif len(rows):
            self.is_dirty = True
            told = self._told
            self._share_out(rows, now, lambda left: told.give_back(rows[left]))

    def _show_open(self, now: float) -> None:
        """Have the run directory say what the process has had open for long."""
        standing = self._renumbered(self.source.open.standing(int(now * 1e9)))
        for member in self.members:
            guard.guarded(member.show_open)(standing if member is self.members[-1] else empty_rows(), now)

    @property
    def notes(self) -> list[str]:
        """What is missing of the timelines that were followed, a sentence each."""
        return [] if self._told is None else self._told.notes

    @property
    def is_drained(self) -> bool:
        """Whether the writer is gone and all it wrote has been passed on."""
        is_passed_on = not (self._count or self.comes_back)
        return self.source.ended and is_passed_on and (self._told is None or self._told.is_over)

    @property
    def is_coming_back(self) -> bool:
        """Whether spans that waited for a name are being moved, and find room."""
        return self.comes_back and not self._is_stuck

    def save(self, unsettled: Collection[int], again: bool = False) -> bool:
        """Write the cursor, if what it covers has changed, or (*again*) where in the folder that is, or on request.

        Return whether it was.

        What was sent of the steps *unsettled* is not yet elsewhere. Once it is, the cursor has changed as well: what is
        acknowledged long after it was read would be sent again by the next drain.
        """
        if self._count or self.source.waiting:
            return False
        places: dict[str, Place] = {}
        for member in self.members:  # several may be of one run
            folder, place = str(member.writer.folder), member.place(unsettled)
            places[folder] = place.behind(places.get(folder))
        owed = [(place.undelivered, place.loose) for place in places.values()]
        if not (self.is_dirty or again or owed != self._owed):
            return False
        cursor = Cursor(self.source.reader.taken, self.source.unfinished(), places, self.source.lapped)
        try:
            cursor.write(self.source.path.with_suffix(".cursor"))
        except OSError as error:
            guard.say(f"{self.source.path.parent} has no room for a cursor ({error}): it is tried again")
            return False
        self.is_dirty, self._owed = False, owed
        return True

"""Horovod's own timeline, read while Horovod writes it: phases below the operations that its ring tells of.

Both are of one process and one clock. An operation of the timeline belongs to the operation of the ring, of the same
tensor, in which it ended: Horovod has but one of a tensor under way at a time. Of unnamed tensors the number says it.
"""

from bisect import bisect
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from otel_dltrace.export.foreign.horovod_file import Group, Timeline
from otel_dltrace.export.rundir.joint_names import JointNames
from otel_dltrace.formats.horovod_spans import Row, as_rows
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import empty_rows, stack_rows
from otel_dltrace.record.names import Followed

FIRST_NUMBER = 0x8000_0000
"""Of its spans: the process itself counts its own from 1, and comes this far after two billion."""
PATIENCE_NS = 60_000_000_000
"""How long an operation of the timeline waits for the ring's, whose end is when the program asked for its result."""
SLACK_NS = 2_000
"""The timeline counts microseconds."""
REMEMBERED_NS = 30_000_000_000
"""How long the ring's operations and steps wait for the timeline, which may have been stopped."""
MOST_UNNAMED = 1 << 14
"""Unnamed operations that do."""
SAME_OFFSET_NS = 10_000
"""Offsets that differ by less are the same one, read twice; with that of the spans a timeline comes back as it was."""
_OPEN_END = 1 << 62
_UNNAMED = ".noname.N"
_START, _END, _PARENT = 5, 6, 8  # places in a Row


@dataclass(slots=True)
class _Known:
    """An operation of the ring."""

    start: int
    end: int
    step: int
    number: int
    seq: int


class Told:
    """What timelines tell of one process.

    Args:
        timelines: Those that it named so far; the list grows.
        written: Its descriptors as far as they are in the run directory.
        before: Its rows that an earlier drain wrote there.
        offset: What its times are taken to be before Unix time, in ns.
    """

    def __init__(
        self, timelines: Sequence[Followed], written: Sequence[Descriptor], before: Column, offset: int
    ) -> None:
        self._timelines, self._offset = timelines, offset
        self.names = JointNames(written)
        self._notes: list[str] = []
        self._draw = count(FIRST_NUMBER)
        self._tails: dict[str, Timeline] = {}
        self._opened, self._taken_over = 0, len(timelines) if len(before) else 0
        self._known: dict[str, deque[_Known]] = {}
        self._unnamed: dict[tuple[str, int], _Known] = {}
        self._steps: deque[tuple[int, int, int]] = deque()
        self._seen = 0
        self._loose: list[tuple[Timeline, Row]] = []
        self._kept = empty_rows()
        is_told = before["span_no"] >= FIRST_NUMBER
        self._written = set(before["span_no"][is_told].tolist())
        mine = before.compress(~is_told)
        self.know(mine.take(np.argsort(mine["start"], kind="stable")))

    @property
    def notes(self) -> list[str]:
        """What of them is missing so far, a sentence each."""
        return self._notes + [note for tail in self._tails.values() for note in tail.notes]

    def know(self, rows: Column) -> None:
        """Learn of the ring's operations and steps in *rows*, whose descriptors are those of `names`."""
        table = self.names.descriptors
        if not len(rows):
            return
        self._seen = max(self._seen, int(rows["end"].max()))
        for row in rows.compress(table.is_kind(rows, s.COLLECTIVE)):
            d = table[int(row["descriptor"])]
            if d.backend == h.BACKEND:
                is_cut = row["source"] == s.Source.HOST_ISSUE or row["flags"] & s.Flag.TRUNCATED
                end = _OPEN_END if is_cut else int(row["end"])
                known = _Known(int(row["start"]), end, int(row["step"]), int(row["span_no"]), int(row["seq"]))
                self._remember(d.tensor, known)
        for row in rows.compress(table.is_kind(rows, s.STEP)):
            self._steps.append((int(row["start"]), int(row["end"]), int(row["step"])))

    def _remember(self, tensor: str, known: _Known) -> None:
        if _UNNAMED not in tensor:
            before = self._known.setdefault(tensor, deque())
            if before and before[-1].end == _OPEN_END:
                before[-1].end = known.start  # nobody waited for it, but over it is
            before.append(known)
            return
        self._unnamed[tensor, known.seq] = known
        if len(self._unnamed) > MOST_UNNAMED:
            del self._unnamed[next(iter(self._unnamed))]

    def rows(self, *, final: bool) -> Column:
        """Return the rows that are new and know their place.

        Args:
            final: Nothing comes any more: once `is_over` says so, all rows have been returned.
        """
        for followed in self._timelines[self._opened :]:
            self._opened += 1
            if followed.path in self._tails:
                was_read = self._tails[followed.path].named_again(followed) or self._opened <= self._taken_over
                if not was_read:
                    self._notes.append(
                        f"{followed.path} was started anew before it had been read: what it held is missing here"
                    )
            else:
                self._tails[followed.path] = Timeline(followed, self._draw)
        out = [self._kept]
        self._kept = empty_rows()
        for tail in self._tails.values():
            self._sort(tail, tail.read(final=final))
            is_over = tail.is_over
            out.append(
                self._columns(tail, [*self._place(tail, final=is_over), *self._place_loose(tail, final=is_over)])
            )
        if not any(tail.is_behind for tail in self._tails.values()):
            self._forget()
        return stack_rows(out)

    @property
    def is_over(self) -> bool:
        """Whether all has been read and returned; only a *final* call can make it so."""
        return not len(self._kept) and all(tail.is_over for tail in self._tails.values())

    def give_back(self, rows: Column) -> None:
        """Take *rows* again, which could not be written."""
        self._kept = rows

    def _sort(self, tail: Timeline, rows: list[Row]) -> None:
        """Put *rows* with their operation; in the clock of the ring."""
        table, offset = tail.builder.descriptors, self._offset
        if abs(tail.followed.anchor.offset - offset) > SAME_OFFSET_NS:
            offset = tail.followed.anchor.offset  # the wall clock was set, or drifted, since Horovod read it
        for number, _, descriptor, level, flags, start, end, size, parent, seq, a in rows:
            row = (number, NO_STEP, descriptor, level, flags, start - offset, end - offset, size, parent, seq, a)
            d = table[descriptor]
            if not d.tensor:
                self._loose.append((tail, row))
                continue
            group = tail.groups.setdefault((d.tensor, seq), Group())
            if d.kind == s.COLLECTIVE:
                group.number, group.end = number, end - offset
            else:
                group.rows.append(row)

    def _place(self, tail: Timeline, *, final: bool) -> Iterator[Row]:
        """Yield the rows of the operations whose place is known, below the ring's operation."""
        for key, group in [*tail.groups.items()]:
            if final and group.rows and not group.number:
                group.end = group.rows[-1][_END]
            found = self._find(*key, group.end) if group.end else None
            if found is not None:
                del tail.groups[key]
                for number, _, *rest, parent, _, a in group.rows:
                    below = found.number if parent in (group.number, 0) else parent
                    yield (number, found.step, *rest, below, found.seq, a)
            elif final or self._is_stale(group.rows[-1] if group.rows else None):
                del tail.groups[key]
                self._loose += [(tail, _without(row, group.number)) for row in group.rows]

    def _find(self, tensor: str, seq: int, end: int) -> _Known | None:
        """Return the ring's operation on *tensor* in which the timeline's ended at *end*."""
        if _UNNAMED in tensor:
            return self._unnamed.pop((tensor, seq), None)
        known = self._known.get(tensor, deque())
        while known and known[0].end + SLACK_NS < end:
            known.popleft()
        return next((one for one in reversed(known) if one.start - SLACK_NS <= end <= one.end + SLACK_NS), None)

    def _forget(self) -> None:
        """Forget what the timeline does not speak of any more."""
        oldest = self._seen - REMEMBERED_NS
        for tensor, known in [*self._known.items()]:
            while known and known[0].end < oldest:
                known.popleft()
            if not known:
                del self._known[tensor]
        while self._steps and self._steps[0][1] < oldest:
            self._steps.popleft()

    def _is_stale(self, last: Row | None) -> bool:
        return last is None or last[_END] + PATIENCE_NS < self._seen

    def _place_loose(self, tail: Timeline, *, final: bool) -> list[Row]:
        """Return what is in no operation of the ring's, in the step in which it began."""
        out, waiting = [], []
        begins = [begin for begin, _, _ in self._steps]
        reached = self._steps[-1][1] if self._steps else 0
        for of, row in self._loose:
            start = row[_START]
            if of is not tail:
                waiting.append((of, row))
            elif final or start <= reached or start + PATIENCE_NS < self._seen:
                _, end, step = self._steps[bisect(begins, start) - 1] if begins and begins[0] <= start else (0, 0, 0)
                out.append((row[0], step if start < end else NO_STEP, *row[2:]))
            else:
                waiting.append((of, row))
        self._loose = waiting
        return out

    def _columns(self, tail: Timeline, rows: list[Row]) -> Column:
        """Return *rows* as columns, but for those that an earlier drain wrote."""
        rows = [row for row in rows if row[0] not in self._written]
        columns = as_rows(rows)
        places = np.array([self.names.number(d) for d in tail.builder.descriptors], np.uint32)
        columns["descriptor"] = places[columns["descriptor"]]
        return columns


def _without(row: Row, number: int) -> Row:
    """Return *row* below nothing, if it was below *number*."""
    return (*row[:_PARENT], 0 if row[_PARENT] == number else row[_PARENT], *row[_PARENT + 1 :])

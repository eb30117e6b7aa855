"""Horovod's timeline as spans: an operation of a tensor, below it its negotiation, its bar and activities.

The operation lasts from the begin of its negotiation to its end. The file tells the order of events below a
microsecond, and spans keep it: the k-th event of a microsecond is k ns late. The file has no steps; a step begins when
a tensor is negotiated that the step has already.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from otel_dltrace.formats.horovod_json import BEGIN, MARK, OVER, START, TICK, Event
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.identity import NO_STEP, NO_USER_STEP
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.spans import empty_rows

_US = 1000
_LAST_OF_US = _US - 1
_NUMBERED = re.compile(r"\.noname\.(0|[1-9][0-9]{0,8})(?=\Z|_[0-9]+of[0-9]+\Z)")
_FOLDED = ".noname.N"
_UNNAMED = re.compile(r"\.noname\.N(?=\Z|_[0-9]+of[0-9]+\Z)")
_RANK = re.compile(r"0|[1-9][0-9]{0,8}")
_COLUMNS = ("span_no", "step", "descriptor", "level", "flags", "start", "end", "size", "parent_no", "seq", "a")
Row = tuple[int, ...]


class _Bar(NamedTuple):
    """A begin without its end; *opened* is the begin of the operation that it belongs to."""

    number: int
    name: str
    start: int
    parent: int
    opened: int | None = None


class _Lane:
    """A tensor: its open bars, and the negotiation that no operation has followed yet."""

    __slots__ = ("bars", "count", "folded", "held", "is_numbered", "negotiated", "request", "seq", "step")

    def __init__(self, tensor: str) -> None:
        self.folded, number = fold(tensor)
        self.is_numbered = number is not None
        self.seq, self.count, self.step = number or 0, 0, NO_STEP
        self.bars: list[_Bar] = []
        self.held: list[list[int]] = []
        self.negotiated, self.request = 0, ""


class Builder:
    """Takes events in the file's order and makes rows of them, without ids; times are Unix ns.

    Args:
        first_step: The ordinal of the first step.
    """

    def __init__(self, first_step: int = 0) -> None:
        self.descriptors: list[Descriptor] = [RANK_STEP]
        self.step = first_step
        self.unended = self.unbegun = self.backwards = 0
        self._known: dict[tuple[str, ...], int] = {}
        self._lanes: dict[str, _Lane] = {}
        self._rows: list[Row] = []
        self._number = 0
        self._origin = self._nth = self._now = self._events = 0
        self._last = -1
        self._in_step: set[str] = set()
        self._extents: dict[int, list[int]] = {}
        self._take = {BEGIN: self._begin, OVER: self._end, TICK: self._tick}

    def add(self, event: Event) -> None:
        """Take the next event."""
        if event.phase == START:
            self._origin = event.ts
            self._start(0)
            return
        self.backwards += event.ts < self._last
        self._events += 1
        self._nth = min(self._nth + 1, _LAST_OF_US) if event.ts == self._last else 0
        self._last = event.ts
        self._now = (self._origin + event.ts) * _US + self._nth
        if event.phase == MARK:
            self._row(self._draw(), NO_STEP, self._mark(event.name), (self._now, self._now), a=-1)
            return
        lane = self._lanes.get(event.tensor)
        if lane is None:
            lane = self._lanes[event.tensor] = _Lane(event.tensor)
        self._take[event.phase](lane, event)

    def rows(self) -> Column:
        """Return the rows that are complete, and forget them."""
        out = as_rows(self._rows)
        self._rows = []
        return out

    def finish(self) -> Column:
        """Return the last rows: what is still open, cut off at the last event, and the steps."""
        self._end_all()
        for step, (start, end) in sorted(self._extents.items()):
            self._rows.append((self._draw(), step, 0, s.Level.STEP, 0, start, end, NO_USER_STEP, 0, 0, 0))
        return self.rows()

    def _end_all(self) -> None:
        for lane in [*self._lanes.values()]:
            self._release(lane, 0)
            while lane.bars:
                self.unended += 1
                self._close(lane, "", s.Flag.TRUNCATED)
            self._release(lane, 0)

    def notes(self) -> list[str]:
        """Return what of begins and ends has no other half, a sentence each."""
        odd = {
            f"bars still open at the end of the file, marked as cut off: {self.unended:,}": self.unended,
            f"ends without a begin in the file, shown without a duration: {self.unbegun:,}": self.unbegun,
            f"events with an earlier time than the one before them: {self.backwards:,}": self.backwards,
        }
        return [sentence for sentence, count in odd.items() if count]

    @property
    def is_empty(self) -> bool:
        """Whether no event of a tensor, and no mark, was there."""
        return not self._events

    # -- events ---------------------------------------------------------------------------------

    def _begin(self, lane: _Lane, event: Event) -> None:
        number = self._draw()
        if lane.bars:
            lane.bars.append(_Bar(number, event.name, self._now, lane.bars[-1].number))
        elif event.name.startswith(h.NEGOTIATE):
            self._release(lane, 0)
            lane.request = event.name.removeprefix(h.NEGOTIATE)
            self._occur(lane, event.tensor)
            lane.bars.append(_Bar(number, event.name, self._now, 0))
        else:
            opened = lane.negotiated if lane.held else self._now
            if not lane.held:
                lane.request = event.name
                self._occur(lane, event.tensor)
            operation = self._draw()
            self._release(lane, operation)
            lane.bars.append(_Bar(number, event.name, self._now, operation, opened))

    def _end(self, lane: _Lane, event: Event) -> None:
        if lane.bars:
            self._close(lane, event.args, 0)
        else:
            self._lone_end(lane, event)

    def _tick(self, lane: _Lane, event: Event) -> None:
        parent, step = (lane.bars[-1].number, lane.step) if lane.bars else (0, self.step)
        is_rank = _RANK.fullmatch(event.name) is not None
        rank, name, activity = (int(event.name), h.READY, "") if is_rank else (-1, h.MARK, event.name)
        descriptor = self._descriptor(s.TICK, name, lane.folded, activity)
        self._row(self._draw(), step, descriptor, (self._now, self._now), parent=parent, seq=lane.seq, a=rank)

    def _close(self, lane: _Lane, args: str, flags: int) -> None:
        bar = lane.bars.pop()
        descriptor = self._descriptor(s.PHASE, bar.name, lane.folded, bar.name, args)
        extent = (bar.start, self._now)
        if not bar.parent:
            lane.negotiated = bar.start
            self._hold(lane, bar.number, descriptor, extent, flags)
            return
        size = _size(args)
        self._row(bar.number, lane.step, descriptor, extent, size, bar.parent, lane.seq, flags=flags)
        if bar.opened is not None:
            failed = s.Flag.ERROR if bar.name == h.ERROR else 0
            name = lane.request if failed else bar.name
            self._operation(lane, bar.parent, name, (bar.opened, self._now), args, flags | failed)

    def _lone_end(self, lane: _Lane, event: Event) -> None:
        """Take an end without a begin: BARRIER and JOIN have one each, and what began before the file did."""
        parent = 0
        if lane.held or event.tensor == h.JOIN_TENSOR:
            if not lane.held:
                lane.request, lane.negotiated = h.JOIN, self._now
                self._occur(lane, event.tensor)
            parent = self._draw()
            self._operation(lane, parent, lane.request, (lane.negotiated, self._now), event.args, 0)
            self._release(lane, parent)
        else:
            self.unbegun += 1
        descriptor = self._descriptor(s.TICK, h.END, lane.folded, dtype=event.args)
        step = lane.step if parent else self.step
        self._row(self._draw(), step, descriptor, (self._now, self._now), parent=parent, seq=lane.seq, a=-1)

    # -- rows -----------------------------------------------------------------------------------

    def _occur(self, lane: _Lane, tensor: str) -> None:
        """Count the operation of *lane* that begins, and find its step."""
        lane.count += 1
        if not lane.is_numbered:
            lane.seq = lane.count
            if lane.request not in h.UNCUT:
                if tensor in self._in_step:
                    self._in_step.clear()
                    self.step += 1
                self._in_step.add(tensor)
        lane.step = self.step

    def _operation(self, lane: _Lane, number: int, name: str, extent: tuple[int, int], args: str, flags: int) -> None:
        dtype = args.partition("[")[0]
        descriptor = self._descriptor(s.COLLECTIVE, name.lower(), lane.folded, dtype=dtype)
        self._row(number, lane.step, descriptor, extent, _size(args), 0, lane.seq, 0, s.Level.COLLECTIVE, flags)

    def _hold(self, lane: _Lane, number: int, descriptor: int, extent: tuple[int, int], flags: int) -> None:
        lane.held.append([number, lane.step, descriptor, s.Level.PHASE, flags, *extent, 0, 0, lane.seq, 0])

    def _release(self, lane: _Lane, parent: int) -> None:
        """Write the negotiation that *lane* holds, below the operation *parent*, 0 for none."""
        for row in lane.held:
            self._extend(row[1], row[5], row[6])
            self._rows.append((*row[:8], parent, *row[9:]))
        lane.held = []

    def _row(
        self,
        number: int,
        step: int,
        descriptor: int,
        extent: tuple[int, int],
        size: int = 0,
        parent: int = 0,
        seq: int = 0,
        a: int = 0,
        level: int = s.Level.PHASE,
        flags: int = 0,
    ) -> None:
        if step != NO_STEP:
            self._extend(step, *extent)
        self._rows.append((number, step, descriptor, level, flags, *extent, size, parent, seq, a))

    def _extend(self, step: int, start: int, end: int) -> None:
        known = self._extents.setdefault(step, [start, end])
        known[0], known[1] = min(known[0], start), max(known[1], end)

    def _start(self, since: int) -> None:
        """Write that the timeline begins, *since* so many us of those that its times count."""
        at = (self._origin + since) * _US
        descriptor = self._descriptor(s.TICK, h.TIMELINE_START, "", str(since or ""))
        self._row(self._draw(), NO_STEP, descriptor, (at, at), a=-1)

    def _draw(self) -> int:
        self._number += 1
        return self._number

    def _mark(self, name: str) -> int:
        known = name == h.CYCLE_START
        return self._descriptor(s.TICK, name if known else h.MARK, "", "" if known else name)

    def _descriptor(self, kind: str, name: str, tensor: str, activity: str = "", dtype: str = "") -> int:
        key = (kind, name, tensor, activity, dtype)
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.descriptors)
            self.descriptors.append(
                Descriptor(kind, name, backend=h.BACKEND, tensor=tensor, activity=activity, dtype=dtype)
            )
        return number


def fold(tensor: str) -> tuple[str, int | None]:
    """Return *tensor* and None; of an unnamed one, which Horovod numbers without end, the common name and the number.

    The number is what tells its operations apart, so it is their sequence number.
    """
    found = _NUMBERED.findall(tensor)
    if len(found) != 1:
        return tensor, None
    return _NUMBERED.sub(_FOLDED, tensor), int(found[0])


def unfold(tensor: str, seq: int) -> str:
    """Return the name that `fold` folded."""
    return _UNNAMED.sub(f".noname.{seq}", tensor) if _FOLDED in tensor else tensor


@lru_cache(maxsize=4096)
def _size(args: str) -> int:
    """Return the bytes of a result that is told as ``float32[64, 3]``; 0 if that is not known."""
    dtype, _, shape = args.partition("[")
    size = h.ITEM_SIZES.get(dtype, 0)
    for length in shape.rstrip("]").split(",") if size else ():
        text = length.strip()
        size *= int(text) if text.isdecimal() and len(text) < 12 else not text
    return size if size < 1 << 63 else 0


def as_rows(rows: list[Row]) -> Column:
    """Return *rows* as columns, without ids."""
    out = empty_rows(len(rows))
    if rows:
        for name, values in zip(_COLUMNS, zip(*rows, strict=True), strict=True):
            out[name] = values
    out["b"] = -1
    return out

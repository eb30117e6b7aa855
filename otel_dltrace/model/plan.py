"""What is recorded, what goes out in full, and how many spans a trace may hold (contract 5 and 8)."""

import re
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass

from otel_dltrace.model.errors import FieldError
from otel_dltrace.model.identity import h64
from otel_dltrace.model.semconv import Level

STEP_SHARE = 16
"""Spans that a rank sends in every step, whatever the budget: itself and its stages."""
FULL_RANK = 2000
"""Spans of one rank at full detail that the budget reckons with."""
SERVERS_PART = 5
"""Where there are parameter servers, one part in so many of what a rank in full may send is for what they did."""
FINEST = "they are recorded at level partition: otel-dltrace run --level partition, or OTEL_DLTRACE_LEVEL=partition"
"""What to do where stages of partitions, or requests of servers, are missing."""
SLOW = 1.5
SLOW_WINDOW = 50

_RANGE = re.compile(r"([0-9]{1,10})-([0-9]{1,10})")
_COMPLETIONS = re.compile(r"([1-9][0-9]{0,9})-([1-9][0-9]{0,9})")
_SETTING = re.compile(r"(first|every)=([0-9]{1,10})")


def parse_level(text: str) -> Level:
    """Return the level called *text*.

    Raises:
        ConfigError: There is no such level.
    """
    try:
        return Level[text.strip().upper()]
    except KeyError:
        names = ", ".join(level.name.lower() for level in Level)
        raise FieldError("level", text, f" is not a level; use one of {names}") from None


def parse_completions(text: str) -> "Window":
    """Return the window of a tensor's completions written as ``10-20``, counted from 1, or ``all``, which "" is, too.

    Raises:
        ConfigError: It is no range.
    """
    if text in ("", "all"):
        return Window(everything=True)
    found = _COMPLETIONS.fullmatch(text)
    if found is None or int(found[1]) > int(found[2]):
        raise FieldError("comm_steps", text, " is not a range; write A-B, counted from 1, or all")
    return Window(((int(found[1]), int(found[2])),))


@dataclass(frozen=True, slots=True)
class Window:
    """The steps that go out in full: the union of ranges (both ends included) and periods."""

    ranges: tuple[tuple[int, int], ...] = ()
    periods: tuple[int, ...] = ()
    everything: bool = False

    def __contains__(self, step: object) -> bool:
        """Return whether *step* goes out in full."""
        return isinstance(step, int) and (
            self.everything
            or any(low <= step <= high for low, high in self.ranges)
            or any(step % period == 0 for period in self.periods)
        )

    def overlaps(self, first: int, last: int) -> bool:
        """Return whether any step from *first* to *last*, both included, goes out in full."""
        return (
            self.everything
            or any(low <= last and first <= high for low, high in self.ranges)
            or any(last // period * period >= first for period in self.periods)
        )

    @classmethod
    def parse(cls, text: str) -> "Window":
        """Return the window written as ``first=50,every=50``, ``10-20`` or ``all``.

        Raises:
            ConfigError: A part is none of these.
        """
        ranges, periods, everything = [], [], False
        for part in (part.strip() for part in text.split(",")):
            if match := _RANGE.fullmatch(part):
                low, high = int(match[1]), int(match[2])
                if high < low:
                    raise FieldError("steps", text, f": {part} ends before it starts")
                ranges.append((low, high))
            elif (match := _SETTING.fullmatch(part)) and int(match[2]) > 0:
                value = int(match[2])
                if match[1] == "first":
                    ranges.append((0, value - 1))
                else:
                    periods.append(value)
            elif part == "all":
                everything = True
            else:
                raise FieldError(
                    "steps", text, f": {part!r} is not a window; use first=N, every=N, A-B or all, joined by commas"
                )
        return cls(tuple(ranges), tuple(periods), everything)


class SlowSteps:
    """Tells a step that took more than 1.5 times the median of the rank's last 50."""

    def __init__(self) -> None:
        self._last: deque[int] = deque()
        self._sorted: list[int] = []

    def is_slow(self, duration: int) -> bool:
        """Return whether *duration* (ns) is slow against the steps before it, and remember it."""
        last, number = self._sorted, len(self._sorted)
        # `statistics` would cost every training process 3 ms of its start.
        slow = number >= 3 and duration > SLOW * (last[(number - 1) // 2] + last[number // 2]) / 2
        if number == SLOW_WINDOW:
            del last[bisect_left(last, self._last.popleft())]
        self._last.append(duration)
        insort(last, duration)
        return slow


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank may send of one step: its shard, and how many spans beyond its stages."""

    shard: int
    full: bool
    limit: int


_ALL = Share(0, True, 1 << 62)


def share_of(rank: int, world_size: int, servers: int, budget: int, step: int) -> Share:
    """Return *rank*'s share of the budget of spans per trace in *step*.

    All drains compute the same from what they are bound to, so nobody needs to be asked.
    A budget of 0 means none: everything goes out.
    """
    if budget <= 0:
        return _ALL
    members = max(1, world_size + servers)
    shards = -(-members * STEP_SHARE * 10 // (8 * budget))
    shard = rank * shards // members
    first = -(-shard * members // shards)
    width = max(1, -(-(shard + 1) * members // shards) - first)
    left = budget - width * STEP_SHARE
    in_full = min(max(left // FULL_RANK, 1), width)
    full = (rank + h64("turn", step)) % width < in_full
    if servers:
        left = left * (SERVERS_PART - 1) // SERVERS_PART
    return Share(shard, full, max(0, left // in_full))


def for_servers(share: Share, servers: int) -> int:
    """Return how many spans each of *servers* may send for a rank with *share*, in a step that it sends in full."""
    return share.limit // (SERVERS_PART - 1) // max(1, servers)

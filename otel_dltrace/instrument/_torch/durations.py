"""What PyTorch's Flight Recorder has measured of collectives, and when they ended, as their order says."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Key = tuple[str, int]
"""A collective: its group's name, its number."""


class Measured(NamedTuple):
    """A collective that is over: when it was launched, for how long the device was at it, when that was noticed."""

    launched: int
    lasted: int
    noticed: int


def measured(entries: Iterable[Mapping[str, Any]], behind: int, now: int) -> tuple[dict[Key, Measured], dict[str, int]]:
    """Return the collectives among *entries* of a dump, and the first number that it has of each group.

    Args:
        entries: As the recorder gives them, in the order of their launch.
        behind: By how many ns its clock, the wall's, is before the one of all times here, the monotonic one.
        now: By that.
    """
    over: dict[Key, Measured] = {}
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for entry in entries:
        if entry["is_p2p"]:
            continue
        group, seq = key = (entry["process_group"][0], entry["collective_seq_id"])
        if seq < last.get(group, sys.maxsize):  # a group of this name was there before
            first[group] = seq
        last[group] = seq
        if "duration_ms" in entry:  # of several in one launch, one has it
            noticed = min(entry["time_discovered_completed_ns"] - behind, now)
            over[key] = Measured(entry["time_created_ns"] - behind, round(entry["duration_ms"] * 1e6), noticed)
    return over, first


class Active(NamedTuple):
    """What is known of when a device was at an operation, monotonic ns of the host.

    Attributes:
        since: It did not begin before.
        lasted: For how long the device was at it.
        over: It was over by then.
        is_waited_for: *over* is when the device went on that had to wait for it.
    """

    since: int
    lasted: int
    over: int
    is_waited_for: bool


class End(NamedTuple):
    """When an operation ended: at the earliest, as is assumed, at the latest."""

    earliest: int
    assumed: int
    latest: int


def ends(active: Sequence[Active], reached: int = 0) -> list[End]:
    """Return the ends of operations of one group, which a device does one after another.

    None begins before the device comes to it and the one before is over. Where *since* is when the device came to it,
    it begins just then: so the earliest end is assumed. But where the device waited for all of them, their last one
    ended when it went on: there the latest is assumed.

    Args:
        active: In the order of their launch.
        reached: When the one before the first was over, at the earliest.
    """
    out: list[End] = []
    for one, late in zip(active, _latest(active), strict=True):
        reached = min(max(reached, one.since) + one.lasted, one.over)
        out.append(End(reached, max(reached, late) if one.is_waited_for else reached, late))
    return out


def _latest(active: Sequence[Active]) -> list[int]:
    out: list[int] = []
    bound = sys.maxsize
    for one in reversed(active):
        bound = min(bound, one.over)
        out.append(bound)
        bound -= one.lasted
    return out[::-1]

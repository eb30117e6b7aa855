"""What the stages of a step cover of one thread's time: disjoint pieces, in order, each counted for once."""

from bisect import bisect

Piece = tuple[int, int, str]
"""From when to when (monotonic ns), and of which stage."""


def cover(pieces: list[Piece], name: str, start: int, end: int) -> tuple[int, int]:
    """Note a piece of the stage *name* among *pieces*, whose last one ends behind its *start*.

    Returns:
        How much of it (ns) others have, and how many of these, all inside it, are of the same stage.
    """
    if pieces[-1][1] > end:
        return _cover_late(pieces, name, start, end), 0
    inner = again = 0
    first = start
    while pieces and pieces[-1][1] > start:
        since, until, whose = pieces.pop()
        if since < start:  # they overlap, or it is in the earlier one
            first = since
            inner += until - start
        else:
            inner += until - since
            again += whose == name
    pieces.append((first, end, name))
    return inner, again


def _cover_late(pieces: list[Piece], name: str, start: int, end: int) -> int:
    """Note a piece that is told of after a later one; return how much of it others have: nothing is inside it."""
    at = bisect(pieces, (start, end))
    before, after = pieces[at - 1][1] if at else start, pieces[at][0] if at < len(pieces) else end
    if before <= start and end <= after:
        pieces.insert(at, (start, end, name))
        return 0
    return min(end, before) - start if before > start else end - after

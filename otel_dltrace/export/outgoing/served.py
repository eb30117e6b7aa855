"""What a server did in the steps of others: it goes out where their own spans do, and only where these go out."""

from collections.abc import Collection, Iterator

from otel_dltrace.export.outgoing.budget import hung_higher
from otel_dltrace.model.arrays import Column, distinct
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.plan import Window, for_servers, share_of
from otel_dltrace.model.spans import stack_rows

MAX_WAITING = 200_000
"""Rows that wait for the end of somebody's step; beyond, nobody is waited for."""
_REMEMBERED = 1024
_LEFT_OUT = 64
"""Steps of ranks of which it is known what was left out."""


class SlowHere:
    """Which steps were slow, failed or were cut off, on which worker rank of this host, and left what out.

    That is known after the step, and nowhere else.

    Attributes:
        deciding: The ranks that are here and go on; of others nothing more will be known.
    """

    def __init__(self) -> None:
        self.deciding: Collection[int] = ()
        self._slow: dict[tuple[int, int], None] = {}
        self._last: dict[int, int] = {}
        self._left_out: dict[tuple[int, int], Column] = {}

    def note(self, rank: int, step: int, slow: bool, left_out: Column | None = None) -> None:
        """Take in that *rank* has ended *step*, whether that was *slow*, and which spans it has *left_out*."""
        if left_out is not None:
            self._left_out[rank, step] = left_out
            if len(self._left_out) > _LEFT_OUT:
                del self._left_out[next(iter(self._left_out))]
        self._last[rank] = max(step, self._last.get(rank, step))
        if slow:
            self._slow[rank, step] = None
            if len(self._slow) > _REMEMBERED:
                del self._slow[next(iter(self._slow))]

    def is_slow(self, rank: int, step: int) -> bool | None:
        """Return whether *step* was slow on *rank*, None where that is not over yet."""
        if (rank, step) in self._slow:
            return True
        # A rank decides in order: what it passed over had lost its end, and is slow for nobody.
        return None if rank in self.deciding and step > self._last.get(rank, -1) else False

    def hung(self, rank: int, step: int, rows: Column) -> Column:
        """Return *rows*, done for *rank* in *step*, below what of that goes out."""
        left_out = self._left_out.get((rank, step))
        return rows if left_out is None else hung_higher(rows, left_out)


class Served:
    """Holds what a server did for ranks (in `b`) until it is known whether these send the step in full.

    In others nothing would be there to hang under. Of a rank on another host the window alone tells.

    Args:
        bind: Who the server is.
        window: The steps that go out in full.
        budget: Spans per trace, 0 for no limit.
        slow: What is known of steps outside the window.
    """

    def __init__(self, bind: Bind, window: Window, budget: int, slow: SlowHere) -> None:
        self._bind, self._window, self._budget, self._slow = bind, window, budget, slow
        self._waiting: dict[tuple[int, int], list[Column]] = {}
        self._count = 0
        self._sent: dict[tuple[int, int], int] = {}

    @property
    def steps(self) -> set[int]:
        """The steps of which something waits."""
        return {step for step, _ in self._waiting}

    def add(self, step: int, rows: Column) -> None:
        """Take in *rows*, all of them done in *step*."""
        for rank in distinct(rows["b"])[0].tolist():
            self._waiting.setdefault((step, rank), []).append(rows.compress(rows["b"] == rank))
        self._count += len(rows)

    def due(self) -> Iterator[tuple[int, Column, int, int]]:
        """Yield what is decided: a step, what goes out of it, how many rows do not, and the shard."""
        found: dict[tuple[int, int], list[Column]] = {}
        left_out: dict[tuple[int, int], int] = {}
        for step, rank in list(self._waiting):
            share = share_of(max(rank, 0), self._bind.world_size, self._bind.servers, self._budget, step)
            slow = self._slow.is_slow(rank, step)
            full = share.full and (step in self._window or slow)
            # Within a budget what is above them may be left out, which is known once the step is over.
            waits = share.full and slow is None and (self._budget > 0 or not full)
            if waits and self._count <= MAX_WAITING:
                continue
            rows = stack_rows(self._waiting.pop((step, rank)))
            self._count -= len(rows)
            chosen = self._within(step, rank, rows, for_servers(share, self._bind.servers)) if full else rows[:0]
            chosen = self._slow.hung(rank, step, chosen)
            found.setdefault((step, share.shard), []).append(chosen)
            left_out[step, share.shard] = left_out.get((step, share.shard), 0) + len(rows) - len(chosen)
        for (step, shard), parts in found.items():
            yield step, stack_rows(parts), left_out[step, shard], shard

    def _within(self, step: int, rank: int, rows: Column, limit: int) -> Column:
        """Return of *rows* as many as a server may still send of *step* for *rank*."""
        sent = self._sent.get((step, rank), 0)
        chosen = rows[: limit - sent]
        self._sent[step, rank] = sent + len(chosen)
        if len(self._sent) > _REMEMBERED:
            del self._sent[next(iter(self._sent))]
        return chosen

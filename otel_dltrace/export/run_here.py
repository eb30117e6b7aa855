"""What the processes of one run on this host know together: roots of steps, slow steps, whether they count alike."""

from collections.abc import Sequence
from pathlib import Path

from otel_dltrace.export.member import Member
from otel_dltrace.export.outgoing.gate import Outgoing
from otel_dltrace.export.outgoing.roots import Roots
from otel_dltrace.export.outgoing.served import SlowHere
from otel_dltrace.export.rings.drift import Drift
from otel_dltrace.model.identity import Bind


class RunHere:
    """One run (job, generation, world) on this host.

    Args:
        bind: Of any of its processes.
        root: Its run directory.
        settle: How long a step's root waits for more local ranks, in seconds.
    """

    def __init__(self, bind: Bind, root: Path, settle: float) -> None:
        self.root = root
        self.roots = Roots(bind, settle)
        self.slow = SlowHere()
        self._drift = Drift()

    def note(self, member: Member, decided: Sequence[Outgoing], now: float) -> None:
        """Tell roots and servers what goes out of what the worker *member* has *decided*."""
        for out in decided:
            if out.extent is not None:
                self.roots.add(member, out.step, out.shard, out.extent, now)
                self.slow.note(member.bind.rank, out.step, out.slow, member.gate.left_out(out.step))

    def drifted(self, decided: Sequence[Outgoing]) -> int:
        """Return in how many of the steps that a worker has *decided* it is the first to disagree with another rank."""
        return sum(self._drift.is_news(out.step, out.seq) for out in decided if out.extent is not None)

"""What a host's gates have decided, handed to the ways out: the steps of each process, and the roots ranks share."""

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING

from otel_dltrace.export.follower import Follower
from otel_dltrace.export.host_time import HostTime
from otel_dltrace.export.outgoing.gate import Outgoing
from otel_dltrace.export.outgoing.roots import ROOT
from otel_dltrace.export.run_here import RunHere
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.spans import SpanBatch, empty_rows

if TYPE_CHECKING:
    from otel_dltrace.export.outgoing.outlets import Outlets


class Dispatch:
    """Sends what is decided.

    Args:
        outlet: Where spans go; None for nowhere.
        time: The host's clocks, which spans are sent by.
        settle: How long a step's root waits for more local ranks, in seconds.
    """

    def __init__(self, outlet: "Outlets | None", time: HostTime, settle: float) -> None:
        self._outlet, self._time, self._settle = outlet, time, settle
        self._here: dict[tuple[str, str, str], RunHere] = {}

    def run_of(self, bind: Bind, root: Path) -> RunHere:
        """Return what the processes of the run of *bind*, whose directory is *root*, know together."""
        return self._here.setdefault((bind.job, bind.generation, bind.world), RunHere(bind, root, self._settle))

    def forget(self, roots: AbstractSet[Path]) -> None:
        """Let go of the runs whose directories are *roots*."""
        self._here = {run: here for run, here in self._here.items() if here.root not in roots}

    def waiting_steps(self, follower: Follower) -> set[int]:
        """Return from which steps on a root waits for other ranks: it is made again from its owner's ring."""
        return {self._here[member.run].roots.pending_from() for member in follower.members} - {NO_STEP}

    def send(self, follower: Follower, followers: Collection[Follower], now: float) -> Iterator[tuple[Path, int]]:
        """Send what *follower*'s gates decide; yield run directories, and in how many steps a rank disagrees there."""
        for member in follower.members:
            here, is_worker = self._here[member.run], member.bind.role == "worker"
            if member.bind.role == "server" and self._outlet is not None:
                here.slow.deciding = _deciding(member.run, followers)
            decided = member.outgoing(now, follower.is_drained)
            if decided and self._outlet is not None:
                self._outlet.spill_to(member.writer.folder)
                self._outlet.send(member.batch(empty_rows(), self._time.anchor_of(member.process.boot_id)), decided)
                if is_worker:
                    here.note(member, decided, now)
            if is_worker and (drifted := here.drifted(decided)):
                yield member.writer.root, drifted

    def send_roots(self, followers: Collection[Follower], now: float) -> None:
        """Send the roots of the steps that all local ranks have told of, or that have waited long enough."""
        final = all(follower.is_drained for follower in followers)
        members = [m for follower in followers for m in follower.members if m.bind.role == "worker"]
        unbound = sum(not follower.members for follower in followers)  # they may be anybody's
        for run, here in self._here.items():
            if here.roots.pending_from() == NO_STEP:
                continue
            mine = [member for member in members if member.run == run]
            standing = {step for member in mine for step in member.source.open.steps()}
            due = here.roots.due(len(mine) + unbound, now, final, standing)
            if due and self._outlet is not None:
                owner = due[-1].owner
                process = owner.batch(due[-1].row, self._time.anchor_of(owner.process.boot_id)).process
                decided = [Outgoing(root.step, root.row, shard=root.shard) for root in due]
                self._outlet.spill_to(owner.writer.folder)
                self._outlet.send(SpanBatch(due[-1].row, ROOT, process), decided)


def _deciding(run: tuple[str, str, str], followers: Iterable[Follower]) -> set[int]:
    """Return the worker ranks of *run* that are here and may yet decide a step."""
    going_on = (member for follower in followers if not follower.is_drained for member in follower.members)
    return {member.bind.rank for member in going_on if member.run == run and member.bind.role == "worker"}

"""The drain: one process per host that turns rings into the run directory, OTLP and a summary."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_dltrace.export.follower import Follower
from otel_dltrace.export.host_time import HostTime
from otel_dltrace.export.member import Member
from otel_dltrace.export.metrics.metering import Metering
from otel_dltrace.export.outgoing.dispatch import Dispatch
from otel_dltrace.export.rings.cursor import Cursor
from otel_dltrace.export.rings.folder import RingFolder
from otel_dltrace.export.rings.source import RingSource
from otel_dltrace.export.rings.unbound import Unbound
from otel_dltrace.export.run_ends import RunEnds
from otel_dltrace.export.run_folders import RunFolders
from otel_dltrace.export.rundir.delivered import Delivered
from otel_dltrace.export.rundir.host_folder import run_root
from otel_dltrace.export.rundir.reader import read_named
from otel_dltrace.export.serving import LONGEST_PAUSE_S, Serving
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.record import guard

if TYPE_CHECKING:
    from otel_dltrace.export.outgoing.outlets import Outlets

CLOSE_S = 1.5
"""What delivery gets at the end of a drain; spans that are left go to the spill folder."""
PATIENCE_S = 5.0
"""What the last sample gets, and the SDK if it is still being loaded: a job may have been over in a moment."""
GIVE_UP_S = 1.0
"""How long a run directory that cannot be written is tried again once the writer is gone, who waits for twice that."""
TRY_AGAIN_S = 0.1
"""Between two of these tries."""
SHORTEST_PAUSE_S = 0.01
TOGETHER = 1 << 20
"""Rings that hold so many records are scanned before any of them is worked on: the code is in the caches, and 64 MB."""


class Drain:
    """Serves rings until their writers are gone.

    Args:
        serving: Which rings.
        outlet: Where spans go; None for nowhere.
        metering: Where metrics go, and whether any are sampled; None for nowhere.

    Attributes:
        postponed: Orphaned rings for another drain: what is in their runs is in other folders than this one's.
    """

    def __init__(self, serving: Serving, outlet: "Outlets | None" = None, metering: Metering | None = None) -> None:
        self.serving, self.outlet, self.metering = serving, outlet, metering
        self.followers: dict[Path, Follower] = {}
        self.stop_requested = self.hurry = False
        self.linger = serving.linger
        self.delivery_s = CLOSE_S
        self.time = HostTime()
        self.dispatch = Dispatch(outlet, self.time, serving.settle_roots)
        self._scanned, self._served = guard.guarded(self._scan), guard.guarded(self._serve)
        self.rings = RingFolder(serving)
        self.runs = RunFolders(serving.quota, self._delivered, serving.budget)
        self.postponed = set[Path]()
        self._failing: dict[Path, float] = {}
        self._ends = RunEnds()
        self._sent = Delivered(self._figures)
        self._due = self._told = 0.0
        self._has_news = False

    def run(self, pause: Callable[[float], None] = time.sleep) -> None:
        """Serve until nobody writes any more and *linger* seconds have passed; *pause* waits for a while or a bell."""
        idle_since = time.monotonic()
        while True:
            self.tick()
            now = time.monotonic()
            if self.stop_requested and all(f.is_drained for f in self.followers.values()):
                break
            if not all(f.is_drained for f in self.followers.values()):
                idle_since = now  # rings that only wait for the collector do not count: disk takes what they hold
            elif now - idle_since >= self.linger:
                break
            pause(self._pause())
        self.finish()

    def _pause(self) -> float:
        """Return how long the fastest writer takes to fill a sixteenth of its ring, as far as the last scan tells."""
        if any(follower.is_coming_back for follower in self.followers.values()):
            return SHORTEST_PAUSE_S
        if any(self.followers[path].is_over for path in self._failing):
            return TRY_AGAIN_S
        sixteenths = 16 * max((follower.filled for follower in self.followers.values()), default=0.0)
        return max(SHORTEST_PAUSE_S, LONGEST_PAUSE_S / max(1.0, sixteenths))

    def tick(self) -> None:
        """Look at every ring, and read those of which it is time, or that need it."""
        now = time.monotonic()
        for source, cursor in self.rings.take(self.followers):
            try:
                self._adopt(source, cursor)
            except OSError as error:
                self.rings.wait_for(source.path, error)
                source.close()
        self.time.renew()
        asked = self.hurry
        is_due = self._is_due(now, asked)
        for paths in self._together():
            scanned = [path for path in paths if self._done(path, self._scanned(path, now, is_due))]
            for path in scanned:
                self._done(path, self._served(path, now, asked))
        self.dispatch.send_roots(self.followers.values(), now)
        if self.outlet is not None:
            self.outlet.flush()
        if self.metering is not None:
            guard.guarded(self.metering.tick)([member for f in self.followers.values() for member in f.members])
        self._settle(asked)
        if is_due and not self.serving.orphans_only:  # `recover` tells of all its runs when it ends
            self._end_runs(now)

    def _together(self) -> Iterator[list[Path]]:
        """Yield rings that are read together; servers last: what they did goes out with the workers' steps."""
        group, records = list[Path](), 0
        for path in sorted(self.followers, key=lambda path: _is_server(self.followers[path])):
            group.append(path)
            records += self.followers[path].source.reader.records
            if records >= TOGETHER:
                yield group
                group, records = [], 0
        yield group

    def _is_due(self, now: float, asked: bool) -> bool:
        """Return whether to read all rings, together: much of what that costs it costs however little there is."""
        if asked:  # who asks from now on, in another thread, waits for the next turn
            self.hurry = False
        is_due = asked or now >= self._due
        if is_due:
            self._due = now + self.serving.delay
        return is_due

    def _leave(self, path: Path, why: str) -> None:
        self.rings.unread.add(path)
        self.rings.refuse(path, f"{path} {why} and stays where it is; `otel-dltrace recover` tries it again")
        follower = self.followers.pop(path)
        self._failing.pop(path, None)
        self._end_runs_of(follower)
        follower.source.close()

    def _end_runs_of(self, follower: Follower) -> None:
        """Count no more for the runs of which *follower*'s was the last ring."""
        for root in _roots([follower]) - _roots(self.followers.values()):
            self._sent.end(root)

    def _done(self, path: Path, outcome: bool | None) -> bool:
        """Return the *outcome* of what was done with a ring; an error of our own, None, says it cannot be followed."""
        if outcome is None:
            self._leave(path, "is damaged")
        return bool(outcome)

    def _scan(self, path: Path, now: float, is_due: bool) -> bool:
        """Copy out of a ring what is new there, if there is reason to; return whether there is."""
        # Our own ring's lock says nothing to us: a process may always take it again.
        alive = None if self.rings.own is None else not self.stop_requested
        follower = self.followers[path]
        # A rank is sampled once it is known who it is.
        is_awaited = self.metering is not None and self.metering.is_sampling and not follower.members
        return follower.scan(now, alive, is_due or is_awaited)

    def _serve(self, path: Path, now: float, asked: bool) -> bool:
        """Pass on what was scanned of a ring."""
        follower = self.followers[path]
        try:
            follower.take(now, asked)
            for root, drifted in self.dispatch.send(follower, self.followers.values(), now):
                self.runs.add(root, drifted_steps=drifted)
        except OSError as error:
            self._fail(path, error, now)
        else:
            self._failing.pop(path, None)
        return True

    def _fail(self, path: Path, error: OSError, now: float) -> None:
        """Say that what a ring holds found no place; give that up once its writer is gone and time has not helped."""
        follower, since = self.followers[path], self._failing.setdefault(path, now)
        if not follower.is_over:
            guard.say(f"the run directory cannot be written ({error}); spans wait in the ring while it has room")
        elif now - since >= GIVE_UP_S:
            self.runs.left |= _roots([follower])
            self._leave(path, f"cannot be emptied into its run directory ({error})")

    # -- rings ----------------------------------------------------------------------------------

    def _adopt(self, source: RingSource, cursor: Cursor) -> None:
        if not self.runs.go_on(map(Path, cursor.places)) and self.serving.orphans_only:
            self.postponed.add(source.path)
            source.close()
            return
        if cursor.places and not any(follower.members for follower in self.followers.values()):
            self.time.go_on(read_named(Path([*cursor.places][-1])).get(source.nonce))
        unbound = Unbound(self.serving.parent(source.names.home), source, self.serving.quota)
        self.followers[source.path] = Follower(source, cursor, unbound, self._make_member)

    def _make_member(self, source: RingSource, bind: Bind) -> Member:
        resource = source.names.home.get("resource") or {}
        process = source.process(bind, self.time.anchor_of(source.reader.header.boot_id.hex()), resource.items())
        root = run_root(self.serving.parent(source.names.home), bind, source.nonce)
        writer = self.runs.open(root, bind, process, source.names.home.get("at_end") or {})
        self._sent.begin(root)
        self._ends.forget(root)
        slow = self.dispatch.run_of(bind, root).slow
        member = Member(source, bind, process, writer, self.serving, slow, goes_out=self.outlet is not None)
        member.metrics = self.metering.rank_of(member) if self.metering is not None else None
        return member

    def _settle(self, asked: bool) -> None:
        """Save the cursors, and let go of the rings that are safe elsewhere; who *asked* waits for a new cursor."""
        unsettled: dict[int, set[int]] = {}
        for nonce, step in self.outlet.unsettled() if self.outlet is not None else ():
            unsettled.setdefault(nonce, set()).add(step)
        is_due = self.runs.is_compaction_due
        for path, follower in list(self.followers.items()):
            again = is_due or (asked and not follower.is_drained)
            mine = unsettled.get(follower.source.nonce, set()) | self.dispatch.waiting_steps(follower)
            undecided = min((m.gate.undecided_from() for m in follower.members), default=NO_STEP)
            self._has_news |= follower.save(mine, again)
            if follower.is_drained and not mine and undecided == NO_STEP:
                self._let_go(path)
        self._tell_so_far(asked)
        # Only here: the cursors just saved no longer speak of the segments that go.
        self.runs.compact_due()

    def _tell_so_far(self, asked: bool) -> None:
        """Write down what is read and delivered: who ends (*asked*) does not wait for a collector that is away.

        Nor is it known of a drain that is killed. The cursors come first: what is counted is not sent again, but for
        spans outside any step and steps whose root waits for other ranks, which the next drain sends and counts again.
        """
        now = time.monotonic()
        if asked or (self._has_news and now - self._told >= LONGEST_PAUSE_S):
            self._told, self._has_news = now, False
            self.runs.tell_so_far(self.followers.values())

    def _let_go(self, path: Path) -> None:
        """Remove a ring whose spans are all in the run directory, and delivered or spilled."""
        follower = self.followers.pop(path)
        mine = _roots([follower])
        # First: once its ring is counted a program reads how many of its spans are lost.
        self.runs.keep_quota(mine - _roots(self.followers.values()), lambda: follower.save((), again=True))
        self.runs.count(follower, goes_out=self.outlet is not None)
        self.runs.write_summaries(ended=False, roots=mine)  # a sweep has thousands, and theirs stand
        self._end_runs_of(follower)
        if follower.source.names_torn:
            self.rings.refuse(path, f"{path.with_suffix('.names')} was damaged: some of its spans have no names")
        try:
            follower.source.remove()
        except OSError as error:  # another user's, in a folder where only they may
            self.rings.refuse(path, f"{path} has been read and cannot be removed: {error.strerror}")
        follower.source.close()

    # -- the end --------------------------------------------------------------------------------

    def _end_runs(self, now: float) -> None:
        """Finish the runs that have ended, and let go of them: of a sweep that has one drain there are thousands."""
        ended = self._ends.among(self.runs.writers, _roots(self.followers.values()), now)
        waiting = [root for root in ended if not self.runs.is_finished(root)]
        self.runs.finish(waiting[:1])  # one in a turn: meanwhile no ring is read
        settled = {root for root in ended if self.runs.is_finished(root) and self._is_settled(root)}
        self.runs.close(settled)
        for root in settled:
            for known in (self.runs, self._sent, self._ends):
                known.forget(root)
        self.dispatch.forget(settled)

    def _is_settled(self, root: Path) -> bool:
        """Return whether nothing of a run is on its way, or waits on disk to be sent: its folder is ours until then."""
        otlp = self._figures(root).get("otlp", {})
        has_metrics = self.metering is not None and self.metering.has(root)
        return not (has_metrics or otlp.get("waiting") or otlp.get("spilled"))

    def _figures(self, root: Path) -> dict[str, Any]:
        return self.outlet.figures(root) if self.outlet is not None else {}

    def _delivered(self, root: Path) -> dict[str, Any]:
        """Return what became of the spans so far, and what was wrong with the metrics of *root*."""
        told: dict[str, Any] = {}
        if self.outlet is not None:
            told |= self._sent.of(root)
        if self.metering is not None and (trouble := self.metering.trouble_of(root)):
            told["metrics"] = {"trouble": trouble}
        return told

    def finish(self) -> None:
        """Deliver or spill what is left, close the run directories."""
        with suppress(OSError):  # what others have left may lie there until the next drain ends
            self.rings.remove_unborn()
            self.rings.remove_old_logs()
        if self.metering is not None:
            guard.guarded(self.metering.finish)(PATIENCE_S)
        ends = time.monotonic() + self.delivery_s
        if self.outlet is not None:
            self.outlet.close(self.delivery_s)
        for path in [path for path, follower in self.followers.items() if follower.is_drained]:
            self._let_go(path)
        self.runs.finish(self.runs.writers)
        if self.metering is not None:
            guard.guarded(self.metering.close)(ends)
        self.runs.close(self.runs.writers)
        self.rings.close()


def _roots(followers: Iterable[Follower]) -> set[Path]:
    return {member.writer.root for follower in followers for member in follower.members}


def _is_server(follower: Follower) -> bool:
    return (follower.source.names.home.get("bind") or {}).get("role") == "server"

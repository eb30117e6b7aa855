"""The drain: one process per host that turns rings into the run directory, OTLP and a summary."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_dltrace.export.choice import DELAY_S
from otel_dltrace.export.cursor import Cursor
from otel_dltrace.export.delivered import Delivered
from otel_dltrace.export.drift import Drift
from otel_dltrace.export.follower import Follower
from otel_dltrace.export.gate import SETTLE_S, Outgoing
from otel_dltrace.export.member import Member
from otel_dltrace.export.metrics.metering import Metering
from otel_dltrace.export.ring_source import RingSource
from otel_dltrace.export.roots import Roots
from otel_dltrace.export.run_folders import RunFolders
from otel_dltrace.export.rundir import run_root
from otel_dltrace.export.served import SlowHere
from otel_dltrace.export.unbound import Unbound
from otel_dltrace.model.errors import RingError
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.plan import Window
from otel_dltrace.model.semconv import STEP, TRAIN_STEP
from otel_dltrace.model.spans import SpanBatch, empty_rows
from otel_dltrace.model.time import HostClock, tightest_anchor
from otel_dltrace.record import guard
from otel_dltrace.record.launch import ALL_RINGS, lock_is_held, take_lock
from otel_dltrace.record.ring import boot_id, changed_at, take_for_reading, writer_is_alive

if TYPE_CHECKING:
    from otel_dltrace.export.outlets import Outlets

LINGER_S = 5.0
"""A drain ends this long after its last writer."""
CLOSE_S = 1.5
"""What delivery gets at the end of a drain; spans that are left go to the spill folder."""
PATIENCE_S = 5.0
"""What the last sample gets, and the SDK if it is still being loaded: a job may have been over in a moment."""
CLOCK_SET_S = 0.1
"""By how much a wall clock moves that was set by hand; one that is kept in step moves by less at a time."""
UNBORN_S = 60.0
LONGEST_PAUSE_S, SHORTEST_PAUSE_S = 1.0, 0.01
_ROOT = [Descriptor(STEP, TRAIN_STEP)]


@dataclass(frozen=True)
class Serving:
    """Which rings a drain serves, and where their spans go.

    Attributes:
        rings: The ring folder.
        directory: Where run directories are made; None: where each ring's writer asked for.
        home: Only rings of this drain's name; None for all.
        orphans_only: Only rings whose writer is gone (`recover`).
        window: The steps that go out in full.
        budget: Spans per trace.
        resource: Attributes that every process's resource gets.
        quota: Bytes of spans that a host may keep in a run directory.
        linger: Seconds to wait for more writers.
        delay: The longest that a record waits in its ring, in seconds.
    """

    rings: Path
    directory: Path | None = None
    home: str | None = None
    orphans_only: bool = False
    window: Window = Window(everything=True)
    budget: int = 0
    resource: tuple[tuple[str, str | int], ...] = ()
    quota: int = 5 << 30
    linger: float = LINGER_S
    delay: float = DELAY_S

    @property
    def settle(self) -> float:
        """How long, in seconds, a step waits for what may still come of it: until every ring was read once more."""
        return max(SETTLE_S, self.delay + LONGEST_PAUSE_S)


@dataclass
class Drain:
    """Serves rings until their writers are gone.

    Args:
        serving: Which rings.
        outlet: Where spans go; None for nowhere.
        metering: Where metrics go, and whether any are sampled; None for nowhere.
        own: This process's own ring, where the drain is one of its threads: path and bytes.
    """

    serving: Serving
    outlet: "Outlets | None" = None
    metering: Metering | None = None
    own: tuple[Path, Any] | None = None
    followers: dict[Path, Follower] = field(default_factory=dict)
    roots: dict[tuple[str, str, str], Roots] = field(default_factory=dict)
    drift: dict[tuple[str, str, str], Drift] = field(default_factory=dict)
    slow: dict[tuple[str, str, str], SlowHere] = field(default_factory=dict)
    refused: dict[Path, str] = field(default_factory=dict)
    stop_requested: bool = False
    hurry: bool = False

    def __post_init__(self) -> None:
        """Read the host's clocks."""
        self.linger = self.serving.linger
        self.delivery_s = CLOSE_S
        self.clock = HostClock(self._read_clocks())
        self._boot = boot_id().hex()
        self._served = guard.guarded(self._read_and_send)
        self.runs = RunFolders(self.serving.quota, self._delivered)
        self._delivery: dict[str, Any] | None = None
        self._sent = Delivered(self._figures)
        self._locks: dict[str, int] = {}
        self._due = 0.0

    @staticmethod
    def _read_clocks() -> Any:
        return tightest_anchor(time.monotonic_ns, time.time_ns)

    def _renew_clock(self) -> None:
        """Follow the host's wall clock; one that was set, and did not only drift, is told of once."""
        before = self.clock.anchor.offset
        self.clock.renew(self._read_clocks())
        moved = (self.clock.anchor.offset - before) / 1e9
        if abs(moved) >= CLOCK_SET_S:
            way = "back" if moved < 0 else "forward"
            guard.say(
                f"the host's wall clock was set {way} by {abs(moved):.1f} s: what is sent from now on has the new "
                "time; lengths, shares and the report are of a clock that is never set",
                "clock",
            )

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
        """Return how long the fastest writer takes to fill a sixteenth of its ring, as far as the last take tells."""
        sixteenths = 16 * max((follower.filled for follower in self.followers.values()), default=0.0)
        return max(SHORTEST_PAUSE_S, LONGEST_PAUSE_S / max(1.0, sixteenths))

    def tick(self) -> None:
        """Read every ring once."""
        now = time.monotonic()
        self._discover()
        self._renew_clock()
        is_due = self._is_due(now)
        # Servers last: what they did goes out with the workers' steps.
        for path in sorted(self.followers, key=lambda path: _is_server(self.followers[path])):
            if not self._served(path, now, is_due):
                self._leave(path, "is damaged")
        self._send_roots(now)
        if self.outlet is not None:
            self.outlet.flush()
        if self.metering is not None:
            guard.guarded(self.metering.tick)([member for f in self.followers.values() for member in f.members])
        self._settle()

    def _is_due(self, now: float) -> bool:
        """Return whether to read all rings, together: much of what that costs it costs however little there is."""
        is_due = self.hurry or now >= self._due
        if is_due:
            self._due, self.hurry = now + self.serving.delay, False
        return is_due

    def _leave(self, path: Path, why: str) -> None:
        self.refused[path] = f"{path} {why} and stays where it is; `otel-dltrace recover` tries it again"
        guard.say(self.refused[path])
        follower = self.followers.pop(path)
        self._end_runs_of(follower)
        follower.source.close()

    def _end_runs_of(self, follower: Follower) -> None:
        """Count no more for the runs of which *follower*'s was the last ring."""
        for root in _roots([follower]) - _roots(self.followers.values()):
            self._sent.end(root)

    def _read_and_send(self, path: Path, now: float, is_due: bool) -> bool:
        """Read one ring; return whether it can be followed, which an error of our own says it cannot."""
        follower = self.followers[path]
        # Our own ring's lock says nothing to us: a process may always take it again.
        alive = None if self.own is None else not self.stop_requested
        try:
            follower.tick(now, alive, is_due)
            self._send(follower, now)
        except OSError as error:
            if follower.source.ended:
                self._leave(path, f"cannot be emptied into its run directory ({error})")
            else:
                guard.say(f"the run directory cannot be written ({error}); spans wait in the ring while it has room")
        return True

    # -- rings ----------------------------------------------------------------------------------

    def _remove_unborn(self) -> None:
        """Remove rings whose writer was killed while it made them; they never held a record."""
        for path in self.serving.rings.glob(".*.new"):
            try:
                with path.open("rb") as file:
                    if time.time() - os.fstat(file.fileno()).st_mtime > UNBORN_S and not writer_is_alive(file.fileno()):
                        path.unlink(missing_ok=True)
            except OSError:
                continue  # it got its name, or another drain was faster

    def _discover(self) -> None:
        found = _rings_in(self.serving.rings)
        for path in found - self.followers.keys() - self.refused.keys():
            self._adopt(path)
        # Other drains' rings come and go for as long as this one serves.
        self.refused = {path: reason for path, reason in self.refused.items() if reason or path in found}

    def _adopt(self, path: Path) -> None:
        is_own = self.own is not None and path == self.own[0]
        if self.own is not None and not is_own:
            return
        state = path.with_suffix(".cursor")
        changed, cursor = changed_at(state), Cursor.read(state)
        try:
            buffer = self.own[1] if self.own and is_own else None
            source = RingSource(path, cursor.taken, cursor.unfinished, buffer)
        except RingError as error:
            if path.exists():  # else another drain has just removed it
                self.refused[path] = f"{path} is no ring that can be read, and stays where it is: {error}"
                guard.say(self.refused[path])
            return
        if not self._is_ours(source):
            if source.names.home or self.serving.orphans_only:
                self.refused[path] = ""  # another drain's; the names of a new ring may still be on their way
            source.close()
            return
        if not is_own and not (take_for_reading(source.fd) and path.exists() and changed_at(state) == changed):
            source.close()  # another drain reads it, as long as it lives, or has done so since we looked
            return
        unbound = Unbound(self._parent(source), source)
        self.followers[path] = Follower(source, cursor, unbound, self._make_member)

    def _is_ours(self, source: RingSource) -> bool:
        home = str(source.names.home.get("drain", ""))
        if self.serving.orphans_only:
            served = lock_is_held(self.serving.rings / f"{ALL_RINGS}.lock") or not self._stand_in_for(home)
            return not served and not writer_is_alive(source.fd)
        return self.serving.home is None or home == self.serving.home

    def _stand_in_for(self, home: str) -> bool:
        """Keep the drain *home* from being started while its rings are recovered: two would write the same files."""
        if home and home not in self._locks:
            fd = take_lock(self.serving.rings / f"{home}.lock")
            if fd is None:
                return False
            self._locks[home] = fd
        return True

    def _parent(self, source: RingSource) -> Path:
        return self.serving.directory or Path(source.names.home.get("directory") or ".")

    def _make_member(self, source: RingSource, bind: Bind) -> Member:
        same_boot = source.reader.header.boot_id.hex() == self._boot
        resource = (*self.serving.resource, *(source.names.home.get("resource") or {}).items())
        process = source.process(bind, self.clock.anchor if same_boot else None, resource)
        root = run_root(self._parent(source), bind, source.nonce)
        writer = self.runs.open(root, bind, process, source.names.home.get("at_end") or {})
        self._sent.begin(root)
        serving = self.serving
        slow = self.slow.setdefault((bind.job, bind.generation, bind.world), SlowHere())
        member = Member(source, bind, process, writer, serving.window, serving.budget, serving.settle, slow)
        member.metrics = self.metering.rank_of(member) if self.metering is not None else None
        self.roots.setdefault(member.run, Roots(bind, serving.settle))
        return member

    # -- OTLP -----------------------------------------------------------------------------------

    def _send(self, follower: Follower, now: float) -> None:
        for member in follower.members:
            if member.bind.role == "server":
                self.slow[member.run].deciding = self._deciding(member.run)
            decided = member.outgoing(now, follower.is_drained)
            if decided and self.outlet is not None:
                self.outlet.spill_to(member.writer.folder)
                self.outlet.send(member.batch(empty_rows(), self._anchor(member)), decided)
            if decided and member.bind.role == "worker":
                self._note_steps(member, decided, now)

    def _note_steps(self, member: Member, decided: Sequence[Outgoing], now: float) -> None:
        """Tell roots and servers what *member* has done of their steps, and look whether ranks count alike."""
        roots, drift, slow = self.roots[member.run], self.drift.setdefault(member.run, Drift()), self.slow[member.run]
        for out in decided:
            if out.extent is not None:
                roots.add(member, out.step, out.shard, out.extent, now)
                slow.note(member.bind.rank, out.step, out.slow)
                if drift.is_news(out.step, out.seq):
                    self.runs.add(member.writer.root, drifted_steps=1)

    def _deciding(self, run: tuple[str, str, str]) -> set[int]:
        """Return the worker ranks of *run* that are here and may yet decide a step."""
        going_on = (member for f in self.followers.values() if not f.is_drained for member in f.members)
        return {member.bind.rank for member in going_on if member.run == run and member.bind.role == "worker"}

    def _anchor(self, member: Member) -> Any:
        """Return the host's offset of today, for a process of this boot."""
        return self.clock.anchor if member.process.boot_id == self._boot else None

    def _send_roots(self, now: float) -> None:
        final = all(f.is_drained for f in self.followers.values())
        workers = [m.run for f in self.followers.values() for m in f.members if m.bind.role == "worker"]
        for run, roots in self.roots.items():
            due = roots.due(workers.count(run), now, final)
            if due and self.outlet is not None:
                owner = due[-1].owner
                process = owner.batch(due[-1].row, self._anchor(owner)).process
                decided = [Outgoing(root.step, root.row, shard=root.shard) for root in due]
                self.outlet.spill_to(owner.writer.folder)
                self.outlet.send(SpanBatch(due[-1].row, _ROOT, process), decided)

    def _settle(self) -> None:
        """Save the cursors, and let go of the rings that are safe elsewhere."""
        unsettled = self.outlet.unsettled() if self.outlet is not None else set()
        is_due = self.runs.is_compaction_due
        for path, follower in list(self.followers.items()):
            mine = {step for nonce, step in unsettled if nonce == follower.source.nonce}
            # A root that waits for other ranks is made again from its owner's ring, if we are killed.
            mine |= {self.roots[m.run].pending_from() for m in follower.members} - {NO_STEP}
            undecided = min((m.gate.undecided_from() for m in follower.members), default=NO_STEP)
            loose = any(m.gate.has_loose for m in follower.members) or NO_STEP in mine
            follower.save(min([undecided, *mine]), loose, again=is_due)
            if follower.is_drained and not mine and undecided == NO_STEP:
                self._let_go(path)
        # Only here: the cursors just saved no longer speak of the segments that go.
        self.runs.compact_due()

    def _let_go(self, path: Path) -> None:
        """Remove a ring whose spans are all in the run directory, and delivered or spilled."""
        follower = self.followers.pop(path)
        # First: once its ring is counted a program reads how many of its spans are lost.
        self.runs.keep_quota(_roots([follower]) - _roots(self.followers.values()))
        self.runs.count(follower, goes_out=self.outlet is not None)
        self.runs.write_summaries(ended=False)
        self._end_runs_of(follower)
        if follower.source.names_torn:
            self.refused[path] = f"{path.with_suffix('.names')} was damaged: some of its spans have no names"
            guard.say(self.refused[path])
        follower.source.close(unlink=True)

    # -- the end --------------------------------------------------------------------------------

    def _figures(self) -> dict[str, Any]:
        return self._delivery or (self.outlet.figures() if self.outlet is not None else {})

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
        self._remove_unborn()
        if self.metering is not None:
            guard.guarded(self.metering.finish)(PATIENCE_S)
        ends = time.monotonic() + self.delivery_s
        self._delivery = self.outlet.close(self.delivery_s) if self.outlet is not None else None
        for path in [path for path, follower in self.followers.items() if follower.is_drained]:
            self._let_go(path)
        self.runs.finish()
        if self.metering is not None:
            guard.guarded(self.metering.close)(ends)
        self.runs.close()
        for home, fd in self._locks.items():
            (self.serving.rings / f"{home}.lock").unlink(missing_ok=True)
            os.close(fd)


def _roots(followers: Iterable[Follower]) -> set[Path]:
    return {member.writer.root for follower in followers for member in follower.members}


def _is_server(follower: Follower) -> bool:
    return (follower.source.names.home.get("bind") or {}).get("role") == "server"


def _rings_in(folder: Path) -> set[Path]:
    try:
        names = os.listdir(folder)  # noqa: PTH208  -- asked for at every turn, and `glob` takes ten times as long
    except OSError:
        return set()
    return {_ring_path(folder, name) for name in names if name.endswith(".ring")}


@lru_cache(maxsize=1024)
def _ring_path(folder: Path, name: str) -> Path:
    return folder / name

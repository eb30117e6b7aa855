"""The drain: one process per host that turns rings into the run directory, OTLP and a summary."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from otel_dltrace.export.compaction import compact, keep_within
from otel_dltrace.export.cursor import Cursor
from otel_dltrace.export.follower import Follower
from otel_dltrace.export.gate import Outgoing
from otel_dltrace.export.member import Member
from otel_dltrace.export.ring_source import RingSource
from otel_dltrace.export.roots import Roots
from otel_dltrace.export.rundir import RunWriter, host_folder_name, run_root
from otel_dltrace.export.unbound import Unbound
from otel_dltrace.model.errors import RingError
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.plan import Window
from otel_dltrace.model.semconv import STEP, TRAIN_STEP
from otel_dltrace.model.spans import SpanBatch, empty_rows
from otel_dltrace.model.time import HostClock, tightest_anchor
from otel_dltrace.record.launch import ALL_RINGS, lock_is_held
from otel_dltrace.record.ring import boot_id, writer_is_alive

if TYPE_CHECKING:
    from otel_dltrace.export.outlet import Outlet

LINGER_S = 5.0
"""A drain ends this long after its last writer."""
CLOSE_S = 1.5
UNBORN_S = 60.0
COMPACT_SEGMENTS = 4
LONGEST_PAUSE_S, SHORTEST_PAUSE_S = 0.5, 0.01
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


@dataclass
class Drain:
    """Serves rings until their writers are gone.

    Args:
        serving: Which rings.
        outlet: Where OTLP goes; None for nowhere.
        own: This process's own ring, where the drain is one of its threads: path and bytes.
    """

    serving: Serving
    outlet: "Outlet | None" = None
    own: tuple[Path, Any] | None = None
    followers: dict[Path, Follower] = field(default_factory=dict)
    writers: dict[Path, RunWriter] = field(default_factory=dict)
    roots: dict[tuple[str, str, str], Roots] = field(default_factory=dict)
    totals: dict[Path, dict[str, Any]] = field(default_factory=dict)
    refused: dict[Path, str] = field(default_factory=dict)
    stop_requested: bool = False
    hurry: bool = False

    def __post_init__(self) -> None:
        """Read the host's clocks."""
        self.linger = self.serving.linger
        self.clock = HostClock(self._read_clocks())
        self._boot = boot_id().hex()
        self._hurried = False

    @staticmethod
    def _read_clocks() -> Any:
        return tightest_anchor(time.monotonic_ns, time.time_ns)

    def run(self, pause: Callable[[float], None] = time.sleep) -> None:
        """Serve until nobody writes any more and *linger* seconds have passed; *pause* waits for a while or a bell."""
        idle_since = time.monotonic()
        while True:
            came = self.tick()
            now = time.monotonic()
            if self.stop_requested and all(f.is_drained for f in self.followers.values()):
                break
            if self.followers:
                idle_since = now
            elif now - idle_since >= self.linger:
                break
            pause(self._pause_after(came))
        self.finish()

    def _pause_after(self, came: int) -> float:
        """Return how long a fast writer takes to fill a sixteenth of its ring, as far as the last scan tells."""
        room = min((f.source.reader.header.chunks * 63 for f in self.followers.values()), default=65536)
        if self.hurry:
            return 0.0
        if came * 16 <= room:
            return LONGEST_PAUSE_S
        return max(SHORTEST_PAUSE_S, LONGEST_PAUSE_S * room / (came * 16))

    def tick(self) -> int:
        """Read every ring once; return how many records came."""
        now = time.monotonic()
        self._discover()
        self.clock.renew(self._read_clocks())
        came = 0
        for follower in list(self.followers.values()):
            # Our own ring's lock says nothing to us: a process may always take it again.
            came += follower.tick(now, None if self.own is None else not self.stop_requested, self.hurry)
            self._send(follower, now)
        self._send_roots(now)
        self._settle()
        # A ring once rung is heard by two scans: the second one takes what the first one saw.
        self.hurry, self._hurried = self.hurry and not self._hurried, self.hurry
        return came

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
        for path in self.serving.rings.glob("*.ring") if self.serving.rings.is_dir() else ():
            if path not in self.followers and path not in self.refused:
                self._adopt(path)

    def _adopt(self, path: Path) -> None:
        is_own = self.own is not None and path == self.own[0]
        if self.own is not None and not is_own:
            return
        cursor = Cursor.read(path.with_suffix(".cursor"))
        try:
            buffer = self.own[1] if self.own and is_own else None
            source = RingSource(path, cursor.taken, cursor.unfinished, buffer)
        except RingError as error:
            self.refused[path] = str(error)
            return
        if not self._is_ours(source):
            if source.names.home or self.serving.orphans_only:
                self.refused[path] = ""  # another drain's; the names of a new ring may still be on their way
            source.close()
            return
        unbound = Unbound(self._parent(source), source)
        self.followers[path] = Follower(source, cursor, unbound, self._make_member)

    def _is_ours(self, source: RingSource) -> bool:
        home = str(source.names.home.get("drain", ""))
        if self.serving.orphans_only:
            served = any(lock_is_held(self.serving.rings / f"{name}.lock") for name in (home, ALL_RINGS))
            return not served and not writer_is_alive(source.fd)
        return self.serving.home is None or home == self.serving.home

    def _parent(self, source: RingSource) -> Path:
        return self.serving.directory or Path(source.names.home.get("directory") or ".")

    def _make_member(self, source: RingSource, bind: Bind) -> Member:
        same_boot = source.reader.header.boot_id.hex() == self._boot
        resource = (*self.serving.resource, *(source.names.home.get("resource") or {}).items())
        process = source.process(bind, self.clock.anchor if same_boot else None, resource)
        root = run_root(self._parent(source), bind, source.nonce)
        writer = self.writers.get(root)
        if writer is None:
            writer = self.writers[root] = RunWriter(root, host_folder_name(process.host, process.boot_id))
        if not writer.is_open:
            writer.open()
        writer.name_run(bind)
        writer.know(process)
        member = Member(source, bind, process, writer, self.serving.window, self.serving.budget)
        self.roots.setdefault(member.run, Roots(bind))
        return member

    # -- OTLP -----------------------------------------------------------------------------------

    def _send(self, follower: Follower, now: float) -> None:
        for member in follower.members:
            decided = member.outgoing(now, follower.is_drained)
            if decided and self.outlet is not None:
                self.outlet.spill_to(member.writer.folder / "spill")
                self.outlet.send(member.batch(empty_rows(), self._anchor(member)), decided)
            for out in decided:
                if out.extent is not None and member.bind.role == "worker":
                    self.roots[member.run].add(member, out.step, out.shard, out.extent, now)

    def _anchor(self, member: Member) -> Any:
        """Return the host's offset of today, for a process of this boot."""
        return self.clock.anchor if member.process.boot_id == self._boot else None

    def _send_roots(self, now: float) -> None:
        final = all(f.is_drained for f in self.followers.values())
        workers = [m.run for f in self.followers.values() for m in f.members if m.bind.role == "worker"]
        for run, roots in self.roots.items():
            for root in roots.due(workers.count(run), now, final):
                if self.outlet is not None:
                    process = root.owner.batch(root.row, self._anchor(root.owner)).process
                    decided = [Outgoing(root.step, root.row, shard=root.shard)]
                    self.outlet.send(SpanBatch(root.row, _ROOT, process), decided)

    def _settle(self) -> None:
        """Save the cursors, and let go of the rings that are safe elsewhere."""
        unsettled = self.outlet.unsettled() if self.outlet is not None else set()
        for path, follower in list(self.followers.items()):
            mine = {step for nonce, step in unsettled if nonce == follower.source.nonce}
            undecided = [m.gate.undecided_from() for m in follower.members]
            loose = any(m.gate.has_loose for m in follower.members) or NO_STEP in mine
            follower.save(min([NO_STEP, *mine, *undecided]), loose)
            if follower.is_drained and not mine:
                self._let_go(path)
        # Only here: the cursors just saved no longer speak of the segments that go.
        for writer in self.writers.values():
            if writer.closed_segments >= COMPACT_SEGMENTS:
                self._compact(writer)
                writer.closed_segments = 0

    def _let_go(self, path: Path) -> None:
        """Remove a ring whose spans are all in the run directory, and delivered or spilled."""
        follower = self.followers.pop(path)
        self._count(follower)
        self._write_summaries(ended=False)
        follower.source.close(unlink=True)

    # -- the end --------------------------------------------------------------------------------

    def _count(self, follower: Follower) -> None:
        """Add a ring's figures to the totals of the run directories that it went to."""
        for member in follower.members:
            total = self.totals.setdefault(member.writer.root, {})
            lapped = follower.source.lapped()
            for name, value in (
                ("processes", 1),
                ("spans", member.written),
                ("truncated", member.truncated),
                ("late", member.gate.late + follower.source.late),
                ("not_in_otlp", member.left_out if self.outlet is not None else 0),
                *((f"lapped_{level}", count) for level, count in lapped.items()),
            ):
                total[name] = total.get(name, 0) + value

    def _write_summaries(self, ended: bool, delivery: dict[str, Any] | None = None) -> None:
        for root, writer in self.writers.items():
            total = self.totals.get(root, {})
            if delivery is not None:
                total["otlp"] = delivery
            writer.write_summary(total, ended)

    def finish(self) -> None:
        """Deliver or spill what is left, close the run directories."""
        self._remove_unborn()
        delivery = self.outlet.close(CLOSE_S) if self.outlet is not None else None
        for path in [path for path, follower in self.followers.items() if follower.is_drained]:
            self._let_go(path)
        for writer in self.writers.values():
            writer.close_segment()
            self._write_summaries(ended=False)
            self._compact(writer)
        self._write_summaries(True, delivery)
        for writer in self.writers.values():
            writer.close()

    def _compact(self, writer: RunWriter) -> None:
        """Turn closed segments into Parquet and keep the host within its quota."""
        if not writer.is_open:
            return
        compact(writer.folder, writer.number)
        dropped = keep_within(writer.folder, self.serving.quota)
        if dropped:
            total = self.totals.setdefault(writer.root, {})
            total["dropped_by_quota"] = total.get("dropped_by_quota", 0) + dropped

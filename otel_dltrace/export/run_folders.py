"""The run directories that one drain writes: the figures of each, and what is done with it when all is over."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from otel_dltrace.export.follower import Follower
from otel_dltrace.export.metrics.segments import metrics_bytes
from otel_dltrace.export.rings.source import RingSource
from otel_dltrace.export.rundir.compaction import COMPACT_SEGMENTS, compact, keep_within
from otel_dltrace.export.rundir.earlier_runs import bytes_in, earlier_folders, shrink
from otel_dltrace.export.rundir.host_folder import host_folder_name
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.semconv import Level
from otel_dltrace.model.spans import Process
from otel_dltrace.record import guard


class RunFolders:
    """Opens, counts, compacts and closes run directories.

    Args:
        quota: Bytes that a host may keep of a job, in all of its runs.
        delivered: Returns what became of a run's spans and metrics on their way out, for its summary.
        budget: Spans per trace over OTLP, which is written down; None: it is not known.

    Attributes:
        roots: The run directories that there were.
        writers: Of those that are not let go of, by the run directory.
        totals: Their figures so far, by the run directory.
        left: Those of which a ring is left that found no room: more may come, also when all else has ended.
    """

    def __init__(self, quota: int, delivered: Callable[[Path], dict[str, Any]], budget: int | None = None) -> None:
        self._quota, self._delivered, self._budget = quota, delivered, budget
        self.roots: dict[Path, None] = {}
        self.writers: dict[Path, RunWriter] = {}
        self.totals: dict[Path, dict[str, Any]] = {}
        self.left: set[Path] = set()
        self._at_end: dict[Path, dict[str, str]] = {}
        self._finished: set[Path] = set()
        self._earlier: dict[Path, list[Path]] = {}
        self._begun: dict[Path, Path] = {}

    def go_on(self, folders: Iterable[Path]) -> bool:
        """Have runs go on in *folders*, where spans of a ring are; return whether they do: each has one at a time."""
        begun = {folder.parents[1]: folder for folder in folders}
        if any(self._folder_of(root, folder) != folder for root, folder in begun.items()):
            return False
        self._begun |= begun
        return True

    def _folder_of(self, root: Path, otherwise: Path) -> Path:
        return self.writers[root].folder if root in self.writers else self._begun.get(root, otherwise)

    def open(self, root: Path, bind: Bind, process: Process, at_end: dict[str, str]) -> RunWriter:
        """Return the open writer of *root*, which knows *process*; *at_end* are the files that it wants at the end."""
        self.roots[root] = None
        self._finished.discard(root)
        writer = self.writers.get(root)
        if writer is None:
            writer = self.writers[root] = RunWriter(
                root, host_folder_name(process.host, process.boot_id), self._begun.get(root)
            )
            writer.span_budget = self._budget
        if writer.is_gone or not writer.is_open:
            writer.open()
        writer.name_run(bind)
        writer.know(process)
        writer.comm_steps = str(at_end.get("comm_steps") or writer.comm_steps)
        if path := at_end.get(bind.role):
            self._at_end.setdefault(root, {})[bind.role] = path
        return writer

    # -- figures --------------------------------------------------------------------------------

    def count(self, follower: Follower, goes_out: bool) -> None:
        """Add a ring's figures to those of the run directories that it went to."""
        # A process may have said several times that it is of one run: its ring is one all the same.
        for writer in {member.writer.root: member.writer for member in follower.members}.values():
            self._count_ring(writer, follower.source)
        for member in follower.members:
            if member.writer.is_gone:
                guard.guarded(member.writer.open)()  # the figures of a run that has just ended tell that it is
            member.writer.so_far -= min(member.written, member.writer.so_far)
            self.add(
                member.writer.root,
                spans=member.written,
                truncated=member.truncated,
                late=member.gate.late,
                not_in_otlp=member.left_out if goes_out else 0,
                **({"dropped_by_quota": member.dropped} if member.dropped else {}),
            )
        for note in follower.notes:
            self._complain(follower.members[-1].writer.root, note)

    def _count_ring(self, writer: RunWriter, source: RingSource) -> None:
        if writer.has_counted(source.nonce):
            return
        writer.count(source.nonce)
        lapped = source.lapped
        self.add(
            writer.root,
            processes=1,
            late=source.late,
            unrecorded=source.reader.unrecorded,
            **{f"lapped_{level.name.lower()}": lapped[level] for level in Level if lapped[level]},
        )

    def tell_so_far(self, followers: Iterable[Follower]) -> None:
        """Write down how many spans have been read of rings, those of *followers*, that are not counted yet."""
        read: Counter[Path] = Counter()
        for member in (member for follower in followers for member in follower.members):
            read[member.writer.root] += member.written
        for root, spans in read.items():
            self.writers[root].so_far = spans
        self.write_summaries(ended=False, roots=read)

    def add(self, root: Path, **figures: int) -> None:
        """Add *figures* to those of *root*."""
        total = self.totals.setdefault(root, {})
        for name, value in figures.items():
            total[name] = total.get(name, 0) + value

    def write_summaries(self, ended: bool, roots: Iterable[Path] | None = None) -> None:
        """Write down what is known of each run, or of *roots* alone; *ended*: it is all that there will be."""
        for root in self.writers if roots is None else roots:
            total = self.totals.setdefault(root, {})
            total |= self._delivered(root)
            try:
                self.writers[root].write_summary(total, ended and root not in self.left)
            except OSError as error:  # the others' can be
                guard.say(f"the figures of {root} cannot be written ({error}); they are tried again")

    def _complain(self, root: Path, note: str) -> None:
        """Say *note*, here and in the line that tells what became of a run."""
        guard.say(note)
        self.totals.setdefault(root, {}).setdefault("trouble", []).append(note)

    # -- compaction -----------------------------------------------------------------------------

    @property
    def is_compaction_due(self) -> bool:
        """Whether `compact_due` has something to do: cursors are saved first, which speak of segments that go."""
        return any(writer.closed_segments >= COMPACT_SEGMENTS for writer in self.writers.values())

    def compact_due(self) -> None:
        """Turn segments into Parquet where there are enough of them."""
        for writer in self.writers.values():
            if writer.closed_segments >= COMPACT_SEGMENTS:
                guard.guarded(self._compact)(writer)
                writer.closed_segments = 0

    def keep_quota(self, roots: Iterable[Path], save: Callable[[], object]) -> None:
        """Have *roots*, which no ring writes any more, within the quota now: their figures say that none is lost.

        Before it goes that segment is closed of which the last ring's cursor speaks, which *save* writes anew.
        """
        for root in roots:
            guard.guarded(self._keep_quota)(self.writers[root], save)

    def _keep_quota(self, writer: RunWriter, save: Callable[[], object]) -> None:
        if writer.is_gone or not writer.is_open:
            return
        if sum(map(bytes_in, [writer.folder, *self._before(writer)])) > self._quota:
            writer.close_segment()
            save()
            self._compact(writer)

    def _compact(self, writer: RunWriter) -> None:
        """Turn closed segments into Parquet and keep the host within its quota: earlier runs of the job go first."""
        if writer.is_gone or not writer.is_open:
            return
        compact(writer.folder, writer.number)
        earlier = self._before(writer)
        over = bytes_in(writer.folder) + sum(map(bytes_in, earlier)) - self._quota
        for folder in earlier:
            if over > 0:
                before = bytes_in(folder)
                self._shrink(folder, before - over)
                over -= before - bytes_in(folder)
        # What earlier ones cannot give, steps, stages and metrics, leaves the run that goes on some room all the same.
        self._drop_detail(writer, max(self._quota - sum(map(bytes_in, earlier)), self._quota // 4))

    def _before(self, writer: RunWriter) -> list[Path]:
        """Return the host's folders of earlier runs of the job, without those that are being written."""
        if writer.root not in self._earlier:
            self._earlier[writer.root] = earlier_folders(writer.folder, writer.job)
        busy = {other.folder for root, other in self.writers.items() if root not in self._finished}
        return [folder for folder in self._earlier[writer.root] if folder not in busy]

    def _shrink(self, folder: Path, size: int) -> None:
        # Never by a descriptor of its own where we have the lock: to close it would free that (POSIX).
        own = next((writer for writer in self.writers.values() if writer.folder == folder), None)
        if own is None:
            guard.guarded(shrink)(folder, size)
        else:
            self._drop_detail(own, size)

    def _drop_detail(self, writer: RunWriter, size: int) -> None:
        for dropped in keep_within(writer.folder, size - metrics_bytes(writer.folder)):
            if dropped:
                self.add(writer.root, dropped_by_quota=dropped)

    # -- the end --------------------------------------------------------------------------------

    def finish(self, roots: Iterable[Path]) -> None:
        """Take in what others wrote of *roots*, whose rings are gone, and compact them; once, unless they go on."""
        for root, writer in self._there(root for root in roots if root not in self._finished):
            guard.guarded(self._ingest)(root, writer)
            guard.guarded(self._close_segments)(writer)
            self._finished.add(root)

    def is_finished(self, root: Path) -> bool:
        """Return whether *root* has been finished, or is not there any more."""
        return root in self._finished or self.writers[root].is_gone

    def close(self, roots: Iterable[Path]) -> None:
        """Write the last summaries of *roots*, and the files that processes want to have when all is over."""
        roots = [*roots]
        guard.guarded(self.write_summaries)(ended=True, roots=roots)
        for root, writer in self._there(roots):
            guard.guarded(self._write_at_end)(root, writer)
        for root in roots:
            guard.guarded(self.writers[root].close)()

    def forget(self, root: Path) -> None:
        """Let go of *root*, which is closed: if rings come of it again, it is taken up as that of another drain is."""
        for known in (self.writers, self.totals, self._at_end, self._earlier, self._begun):
            known.pop(root, None)
        self._finished.discard(root)
        self.left.discard(root)

    def _there(self, roots: Iterable[Path]) -> list[tuple[Path, RunWriter]]:
        """Return those of *roots* whose folder is there: one that somebody removed after its end is not made again."""
        return [(root, writer) for root in roots if not (writer := self.writers[root]).is_gone]

    def _close_segments(self, writer: RunWriter) -> None:
        writer.close_segment()
        self.write_summaries(ended=False, roots=[writer.root])
        self._compact(writer)

    def _ingest(self, root: Path, writer: RunWriter) -> None:
        """Take in what BytePS has written of this host's workers."""
        traces = self._at_end.get(root, {}).get("worker")
        if traces:
            from otel_dltrace.export.foreign.byteps_ingest import ingest

            for note in ingest(writer, Path(traces)):
                self._complain(root, note)

    def _write_at_end(self, root: Path, writer: RunWriter) -> None:
        if root not in self._at_end:
            return
        from otel_dltrace.export.foreign.byteps_end import write_at_end

        try:
            notes = write_at_end(writer.folder, self._at_end[root], writer.comm_steps)
        except OSError as error:
            notes = [f"{error.filename} cannot be written ({error.strerror}); `otel-dltrace export` does it again"]
        for note in notes:
            self._complain(root, note)
        if notes:
            self.write_summaries(ended=True, roots=[root])

"""What stands beside the spans in the files of a Chrome trace: counters of their hosts, and notes."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from otel_dltrace.export.chrome.counters import HostTracks, Track, track_chunks
from otel_dltrace.export.chrome.drawn import Drawn, Processes
from otel_dltrace.export.chrome.notes import Note, bytes_of, note_lines
from otel_dltrace.export.chrome.trace_file import TraceFile
from otel_dltrace.model.metric_batch import HOST, MetricBatch

_SAMPLE_BYTES = 160
"""The text of a counter's event, about; counters are written after the spans, so room is kept for them."""


class Beside:
    """Counters and notes, of which each file gets those of its time.

    Args:
        processes: Those of the trace.
        metrics: Each batch of one host; asked for when they are needed, and not before.
        notes: Remarks on some of the processes.
        progress: Called with the number of counters' events done since its last call.
    """

    def __init__(
        self,
        processes: Processes,
        metrics: Iterable[MetricBatch],
        notes: Sequence[Note],
        progress: Callable[[int], None],
    ) -> None:
        self.processes = processes
        self._metrics = metrics
        of_process: dict[int, list[Note]] = {}
        for note in notes:
            of_process.setdefault(note.nonce, []).append(note)
        self._notes = {nonce: _Notes(mine) for nonce, mine in of_process.items()}
        self._progress = progress
        self._hosts: list[HostTracks] | None = None
        self._shown_until = 0

    def size(self, file: TraceFile, last: int) -> int:
        """Return how many bytes of these *file* will have, about, if it goes on to *last* (ns after zero)."""
        between = self._since(file), max(self._shown_until, file.last + 1, last + 1)
        samples = sum(host.samples(between, self._shift(host)) for host in self._sampled())
        return samples * _SAMPLE_BYTES + sum(notes.size(between[1] - drawn.shift) for drawn, notes in self._noted())

    def write(self, file: TraceFile, until: int) -> None:
        """Write to *file*, which is complete but for them, those *until* then (ns after zero)."""
        since, until = self._since(file), max(self._shown_until, until)
        for host in self._sampled():
            self._write_counters(file, host, (since, until))
        self._write_notes(file, until)
        self._shown_until = until

    def _since(self, file: TraceFile) -> int:
        """Return from when on the counters of *file* are, ns after zero: none is between two files."""
        return self._shown_until if file.first is None else min(self._shown_until, file.first)

    def _sampled(self) -> list[HostTracks]:
        if self._hosts is None:
            self._hosts = [HostTracks(batch) for batch in self._metrics if len(batch)]
        return self._hosts

    def _shift(self, host: HostTracks) -> int:
        """Return what to add to *host*'s times for those of the trace."""
        here = self.processes.on(_machine(host))
        if here:
            return here[0].shift
        return host.batch.wall - self.processes.base_from(int(host.batch.time.min()) + host.batch.wall)

    def _write_counters(self, file: TraceFile, host: HostTracks, between: tuple[int, int]) -> None:
        """Write one host's metrics as counters, on the clocks of the spans of that host."""
        ranks = {drawn.rank: drawn for drawn in self.processes.on(_machine(host)) if drawn.rank != HOST}
        for track in host.tracks:
            mine = ranks.get(track.rank)
            if mine:
                self._write_track(file, track, (mine.shift, mine.pid), between, mine.metadata)
            else:
                host.pid = host.pid or self.processes.free_pid()
                self._write_track(file, track, (self._shift(host), host.pid), between, list(host.metadata()))

    def _write_track(
        self, file: TraceFile, track: Track, at: tuple[int, int], between: tuple[int, int], metadata: Sequence[str]
    ) -> None:
        """Write a counter *at* that shift and pid, the process's name before it."""
        for chunk in track_chunks(track, *at, between):
            _name(file, at[1], metadata)
            file.write(chunk)
            self._progress(chunk.events)

    def _write_notes(self, file: TraceFile, until: int) -> None:
        """Write remarks that begin before *until*, below the lanes of the processes that they are about."""
        for drawn, notes in self._noted():
            if begun := notes.take(until - drawn.shift):
                _name(file, drawn.pid, drawn.metadata)
                file.write_lines(note_lines(begun, drawn.shift, drawn.pid))

    def _noted(self) -> Iterator[tuple[Drawn, "_Notes"]]:
        """Yield the processes of which there are remarks and that are drawn already."""
        for nonce, notes in self._notes.items():
            drawn = self.processes.by_nonce.get(nonce)
            if drawn is not None:
                yield drawn, notes


class _Notes:
    """The remarks on one process, in their order; times are its own."""

    def __init__(self, notes: Iterable[Note]) -> None:
        self._notes = sorted(notes, key=lambda note: note.start)
        self._starts = [note.start for note in self._notes]
        self._reached = [0, *accumulate(map(bytes_of, self._notes))]
        self._taken = 0

    def size(self, until: int) -> int:
        """Return how many bytes of those that begin before *until* are still to be written."""
        return self._reached[self._begun(until)] - self._reached[self._taken]

    def take(self, until: int) -> list[Note]:
        """Return those that begin before *until* and were not taken before."""
        begun = self._begun(until)
        taken, self._taken = self._notes[self._taken : begun], begun
        return taken

    def _begun(self, until: int) -> int:
        return max(self._taken, bisect_left(self._starts, until))


def _machine(host: HostTracks) -> tuple[str, str]:
    return host.batch.boot_id, host.batch.host


def _name(file: TraceFile, pid: int, metadata: Iterable[str]) -> None:
    """Write the lines that name a process, where *file* does not have them yet."""
    if (pid, 0) not in file.named:
        file.named.add((pid, 0))
        file.write_lines(metadata)

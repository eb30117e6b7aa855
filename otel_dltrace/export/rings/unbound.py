"""Where the spans of a process wait that does not know its job yet: a hidden partial run directory."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np

from otel_dltrace.export.rings.cursor import DOUBT_S
from otel_dltrace.export.rings.source import RingSource
from otel_dltrace.export.rundir import columns
from otel_dltrace.export.rundir.compaction import COMPACT_SEGMENTS, compact, keep_within
from otel_dltrace.export.rundir.drain_json import read_drain
from otel_dltrace.export.rundir.host_folder import host_folder_name, remove_tree, run_root
from otel_dltrace.export.rundir.span_files import newest_segment, replaced_segments, span_files
from otel_dltrace.export.rundir.span_tables import read_pieces, read_table, spans_in
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.model.arrays import Column
from otel_dltrace.record import guard

KEEP_ROWS, KEEP_S = 20_000, 5.0
"""How many rows, and for how long, are held in memory before they are written to the partial directory."""
_DAMAGED = ".damaged"


class Unbound:
    """The partial directory of one ring under *parent*, of at most *quota* bytes; there only when it is needed."""

    def __init__(self, parent: Path, source: RingSource, quota: int) -> None:
        self._source, self._quota = source, quota
        self.root = run_root(parent, None, source.nonce)
        self._writer: RunWriter | None = None
        self._dropped, self._taken = 0, self.root
        # A row is of a record at least: the ring shows none of those before the last so many, and few wait for long.
        self._written_before = self._written_last(2 * source.reader.records)
        self._doubt_ends = float("inf")

    @property
    def is_there(self) -> bool:
        """Whether it has been made."""
        return self.root.exists()

    def without_written(self, rows: Column, now: float) -> Column:
        """Return those of *rows*, new out of the ring, that a killed drain did not write there before its cursor."""
        if not len(self._written_before):
            return rows
        self._doubt_ends = min(self._doubt_ends, now + DOUBT_S)
        is_new = ~np.isin(rows["span_no"], self._written_before)
        if now >= self._doubt_ends:
            self._written_before = self._written_before[:0]
        return rows.compress(is_new)

    def _written_last(self, most: int) -> Column:
        """Return the numbers of the spans that were written there last, *most* of them at least."""
        parts = [np.zeros(0, np.uint32)]
        for path in reversed(self._files()):
            table = read_table(path, ["span_no"])
            if table is not None:
                parts.append(columns.numbers_of(table.column("span_no")))
            if sum(map(len, parts)) >= most:
                break
        return np.concatenate(parts)

    def write(self, rows: Column) -> None:
        """Write *rows* there; their ids come later, with the bind."""
        if self._writer is None:
            process = self._source.process(None, None)
            self._writer = RunWriter(self.root, host_folder_name(process.host, process.boot_id))
            self._writer.open()
            self._writer.know(process)
        self._writer.append(self._source.nonce, rows, self._source.descriptors, self._source.errors)
        if self._writer.closed_segments >= COMPACT_SEGMENTS:
            self._writer.closed_segments = 0
            guard.guarded(self._keep_quota)(self._writer)

    def _keep_quota(self, writer: RunWriter) -> None:
        compact(writer.folder, writer.number)
        for dropped in keep_within(writer.folder, self._quota):
            if dropped:
                self._dropped += dropped
                writer.write_summary({"dropped_by_quota": self._dropped})

    def _files(self) -> list[Path]:
        """Return the files of spans there, the oldest first."""
        folders = (self.root / "hosts").glob("*")
        return sorted((path for folder in folders for path in span_files(folder)), key=newest_segment)

    def take_back(self) -> Iterator[Column]:
        """Yield the spans of the oldest file, some at a time; it goes when the last of them are elsewhere.

        Raises:
            OSError: The file cannot be read, or removed, now.
        """
        self.close()
        for path in self._files()[:1]:
            if path != self._taken:
                yield from self._spans_in(path)
            self._taken = path
            for name in replaced_segments(path):
                path.with_name(name).unlink(missing_ok=True)  # left by a drain that was killed
            path.unlink(missing_ok=True)

    def _spans_in(self, path: Path) -> Iterator[Column]:
        """Yield the spans in *path*; one that is damaged is put aside."""
        left = promised = spans_in(path)
        for piece in read_pieces(path):
            rows, errors = columns.from_arrow(piece)
            self._source.renumber_errors(rows, errors)
            left -= len(rows)
            yield rows
        if promised < 0 or left > 0:
            aside = path.with_name(f"{path.name}{_DAMAGED}")
            path.rename(aside)
            guard.say(f"{aside} is damaged: spans in it are in no run directory")

    def close(self) -> None:
        """Write no more there."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def remove_empty(self) -> int | None:
        """Remove the directory if all spans have been taken back; return then how many the quota had taken."""
        if self._files():
            return None
        summaries = [read_drain(folder).get("summary", {}) for folder in (self.root / "hosts").glob("*")]
        dropped: int = sum(summary.get("dropped_by_quota", 0) for summary in summaries)
        if not any(self.root.rglob(f"*{_DAMAGED}")):
            with suppress(OSError):  # something of another's is there, or it is gone
                remove_tree(self.root)
        return dropped

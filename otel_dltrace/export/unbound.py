"""Where the spans of a process wait that does not know its job yet: a hidden partial run directory."""

from pathlib import Path

import numpy as np

from otel_dltrace.export.host_folder import host_folder_name, remove_tree, run_root
from otel_dltrace.export.ring_source import RingSource
from otel_dltrace.export.run_reader import read_batches
from otel_dltrace.export.rundir import RunWriter
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.spans import empty_rows, stack_rows

KEEP_ROWS, KEEP_S = 20_000, 5.0
"""How many rows, and for how long, are held in memory before they are written to the partial directory."""


class Unbound:
    """The partial directory of one ring under *parent*; there only when it is needed."""

    def __init__(self, parent: Path, source: RingSource) -> None:
        self._source = source
        self.root = run_root(parent, None, source.nonce)
        self._writer: RunWriter | None = None

    def write(self, rows: Column) -> None:
        """Write *rows* there; their ids come later, with the bind."""
        if self._writer is None:
            process = self._source.process(None, None)
            self._writer = RunWriter(self.root, host_folder_name(process.host, process.boot_id))
            self._writer.open()
            self._writer.know(process)
        self._writer.append(self._source.nonce, rows, self._source.descriptors, self._source.errors)

    def take_back(self) -> Column:
        """Return what an earlier drain or this one wrote there, each span once."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if not (self.root / "hosts").is_dir():
            return empty_rows()
        parts = [empty_rows()]
        for batch in read_batches(self.root):
            self._source.renumber_errors(batch.rows, batch.errors)
            parts.append(batch.rows)
        rows = stack_rows(parts)
        _, first = np.unique(rows["span_no"], return_index=True)
        return rows.take(np.sort(first))

    def remove(self) -> None:
        """Remove the directory: its spans are in the run's own now."""
        if self.root.exists():
            remove_tree(self.root)

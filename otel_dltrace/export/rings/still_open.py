"""What a process that lives has had open for long: a file of its own, for who asks about a run that hangs."""

from collections.abc import Sequence
from contextlib import suppress

import pyarrow as pa

from otel_dltrace.export.files import write_whole
from otel_dltrace.export.rundir import columns
from otel_dltrace.export.rundir.span_files import OPEN
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.operation import Descriptor

PAUSE_S = 10.0
"""Between two writes of the same: its age is right to so much."""


class StillOpen:
    """Keeps the file of the process *nonce*, as long as something stands in it."""

    def __init__(self, nonce: int) -> None:
        self._nonce = nonce
        self._name = OPEN.replace("*", f"{nonce:016x}")
        self._due = 0.0
        self._may_be_there = True  # an earlier drain may have left it

    def show(
        self,
        writer: RunWriter,
        rows: Column,
        descriptors: Sequence[Descriptor],
        errors: Sequence[tuple[str, str]],
        now: float,
    ) -> None:
        """Have the file in the folder of *writer* hold *rows*, and be gone where there are none; *now* is in s.

        Raises:
            OSError: There is no room, or the folder cannot be written.
        """
        if not len(rows):
            self._forget(writer)
        elif now >= self._due:
            writer.append(self._nonce, rows[:0], descriptors, errors)  # their names
            sink = pa.BufferOutputStream()
            with pa.ipc.new_stream(sink, columns.SPANS) as stream:
                stream.write_batch(columns.to_arrow(rows, errors, self._nonce))
            write_whole(writer.folder / self._name, sink.getvalue())
            self._due, self._may_be_there = now + PAUSE_S, True

    def _forget(self, writer: RunWriter) -> None:
        if self._may_be_there:
            with suppress(FileNotFoundError):
                (writer.folder / self._name).unlink()
            self._due, self._may_be_there = 0.0, False

"""Metrics in the run directory: Arrow streams that can be read when their writer was killed (contract 7)."""

import os
from contextlib import suppress
from pathlib import Path
from time import monotonic

import numpy as np
import pyarrow as pa

from otel_dltrace.export.rundir.span_files import segment_number
from otel_dltrace.model.arrays import Column
from otel_dltrace.model.metric_batch import MetricBatch

SEGMENT_BYTES = 8 << 20
RETRY_S = 30.0
"""How long nothing is written after it could not be: a disk that is full stays so for a while."""
METRICS = "metrics-*.arrows"
NO_ATTRIBUTES = "{}"
"""In place of the "" that says none elsewhere: every text of the column is JSON."""
_TEXT = pa.dictionary(pa.int32(), pa.string())
SCHEMA = pa.schema(
    [
        ("time", pa.int64()),
        ("metric", _TEXT),
        ("rank", pa.int32()),
        ("step", pa.int64()),
        ("attributes", _TEXT),
        ("value", pa.float64()),
    ]
)
_OPTIONS = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)


class MetricSegments:
    """Appends metrics to a host's folder.

    Args:
        folder: The host's folder in a run directory, which exists.
        quota: How many bytes they may fill; the oldest go.
    """

    def __init__(self, folder: Path, quota: int) -> None:
        self.folder, self._quota = folder, quota
        self._stream: pa.ipc.RecordBatchStreamWriter | None = None
        self._sink: pa.NativeFile | None = None
        self._path, self._whole = folder, 0
        self._again_at = 0.0
        # Both only grow while a file is written, so that each text goes into it once.
        self._metrics: dict[str, int] = {}
        self._attributes: dict[str, int] = {}

    def append(self, batch: MetricBatch) -> None:
        """Write *batch* through to the file system; nothing for a while after that was impossible.

        Raises:
            OSError: There is no room, or the folder cannot be written; *batch* is left out.
        """
        if not len(batch) or monotonic() < self._again_at:
            return
        try:
            self._append(batch)
        except OSError:
            self._again_at = monotonic() + RETRY_S
            self._cut_off()
            raise

    def _cut_off(self) -> None:
        """End the current file where its last whole batch does; one that has none goes."""
        is_open = self._sink is not None
        self.close()
        if not is_open:
            return
        with suppress(OSError):
            if self._whole:
                os.truncate(self._path, self._whole)
            else:
                self._path.unlink()

    def _append(self, batch: MetricBatch) -> None:
        if self._stream is not None and not self._path.exists():
            self.close()  # somebody removed it
        if self._stream is None:
            self._open()
        assert self._stream is not None
        assert self._sink is not None
        arrays = [
            pa.array(batch.time),
            _texts(batch.metric, batch.metrics, self._metrics),
            pa.array(batch.rank),
            pa.array(batch.step),
            _texts(batch.attribute, tuple(text or NO_ATTRIBUTES for text in batch.attributes), self._attributes),
            pa.array(batch.value),
        ]
        self._stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=SCHEMA))
        self._sink.flush()
        self._whole = self._sink.tell()
        if self._whole > min(SEGMENT_BYTES, self._quota // 2):
            self.close()
            keep_metrics_within(self.folder, self._quota)

    def _open(self) -> None:
        number = 1 + max((segment_number(path) for path in self.folder.glob(METRICS)), default=0)
        self._path, self._whole = self.folder / f"metrics-{number:05d}.arrows", 0
        self._sink = pa.OSFile(str(self._path), "wb")
        self._stream = pa.ipc.new_stream(self._sink, SCHEMA, options=_OPTIONS)

    def close(self) -> None:
        """End the current file; what comes next begins another."""
        stream, sink, self._stream, self._sink = self._stream, self._sink, None, None
        self._metrics, self._attributes = {}, {}
        for file in (stream, sink):
            if file is not None:
                with suppress(OSError):
                    file.close()


def _texts(codes: Column, texts: tuple[str, ...], known: dict[str, int]) -> pa.DictionaryArray:
    places = np.array([known.setdefault(text, len(known)) for text in texts], np.int32)
    return pa.DictionaryArray.from_arrays(pa.array(places[codes]), pa.array(list(known), pa.string()))


def keep_metrics_within(folder: Path, quota: int) -> None:
    """Remove the oldest files of metrics in *folder* until they are within *quota* bytes; the newest stays."""
    paths = sorted(folder.glob(METRICS), key=segment_number)
    sizes = [path.stat().st_size for path in paths]
    while len(paths) > 1 and sum(sizes) > quota:
        paths.pop(0).unlink()
        sizes.pop(0)


def metrics_bytes(folder: Path) -> int:
    """Return how many bytes the metrics in *folder* fill."""
    return sum(path.stat().st_size for path in folder.glob(METRICS))

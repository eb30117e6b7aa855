"""A SpanExporter that writes a Chrome trace, which Perfetto and chrome://tracing show; anybody's spans, as they end.

    OTEL_TRACES_EXPORTER=otlp,chrome_trace opentelemetry-instrument python program.py

Each process writes a file of its own. It is whole JSON at every instant, also when the process was just killed
(``live`` says how). Environment variables, read when the SDK makes the exporter by its name:

========================================  ============================  ==============================================
variable                                  default                       what it says
========================================  ============================  ==============================================
``OTEL_EXPORTER_CHROME_TRACE_FILE``       trace-{service}-{pid}.json    the file; in gzip if it ends in ``.gz``
``OTEL_EXPORTER_CHROME_TRACE_MAX_BYTES``  64M                           JSON in a file before the next begins; 0: all
``OTEL_EXPORTER_CHROME_TRACE_MAX_FILES``  0                             files of a process that stay; 0: all
========================================  ============================  ==============================================

After ``trace.json`` comes ``trace.1.json``, then ``trace.2.json``; each can be opened by itself.
"""

import logging
import os
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median_low

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_dltrace.export.chrome.arrows import Arrows, Line
from otel_dltrace.export.chrome.rotation import DEFAULT_FILE, DEFAULT_MAX_BYTES, Rotation, base_of
from otel_dltrace.export.chrome.spans import Drawing, Drawn, arrows_of
from otel_dltrace.model import semconv as s
from otel_dltrace.model.errors import ConfigError
from otel_dltrace.model.numbers import size
from otel_dltrace.record.guard import guarded

_logger = logging.getLogger(__name__)
_FILE, _MAX_BYTES, _MAX_FILES = (f"OTEL_EXPORTER_CHROME_TRACE_{name}" for name in ("FILE", "MAX_BYTES", "MAX_FILES"))


class ChromeTraceExporter(SpanExporter):
    """Writes spans to files of Chrome trace JSON.

    Args:
        file: The file; ``{service}`` and ``{pid}`` stand for ``service.name`` and the process. Where another process
            or exporter is writing it, the pid is put into the name.
        max_bytes: Bytes of JSON (before gzip) after which the next file begins; 0 for never.
        max_files: How many files of a process stay, 0 for all; the oldest is removed.

    Raises:
        ConfigError: One of the numbers is none, or below 0.
    """

    def __init__(self, file: str | Path = DEFAULT_FILE, max_bytes: int = DEFAULT_MAX_BYTES, max_files: int = 0) -> None:
        for name, value in (("max_bytes", max_bytes), ("max_files", max_files)):
            if not isinstance(value, int) or value < 0:
                raise ConfigError(f"{name}={value!r} is not a whole number; write 0 or more")
        self._arguments = (str(file), max_bytes, max_files)
        self._closed = False
        self._begin(forked=False)
        after_fork = weakref.WeakMethod(self._after_fork)  # weak, since a hook is never taken back

        def in_child() -> None:
            method = after_fork()
            if method is not None:
                method()

        os.register_at_fork(after_in_child=in_child)

    def _begin(self, forked: bool) -> None:
        self._lock = threading.Lock()
        self._files = Rotation(*self._arguments, forked)
        self._drawing: Drawing | None = None
        self._arrows = Arrows(secrets.randbits(31) << 32)
        self._missing = 0

    def _after_fork(self) -> None:
        """Leave the file to the parent; the child writes one of its own."""
        self._files.abandon()
        self._begin(forked=True)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write *spans*; never raise. What could not be written (a full disk) is told once, and lost."""
        with self._lock:
            return self._export(spans) or SpanExportResult.FAILURE

    @guarded
    def _export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._closed:
            _logger.warning("The Chrome trace exporter is shut down; %d spans are lost", len(spans))
            return SpanExportResult.FAILURE
        if not spans:
            return SpanExportResult.SUCCESS
        try:
            self._write(spans)
        except OSError as error:
            if not self._missing:
                why = error.strerror or error
                _logger.error("%s cannot be written: %s; spans are lost until it can", self._files.name, why)  # noqa: TRY400
            self._missing += len(spans)
            self._arrows.forget()  # they would point at slices that are not there
            return SpanExportResult.FAILURE
        if self._missing:
            _logger.warning("%s is written again; %d spans are missing", self._files.name, self._missing)
            self._missing = 0
        return SpanExportResult.SUCCESS

    def _write(self, spans: Sequence[ReadableSpan]) -> None:
        if self._drawing is None:
            starts = [span.start_time for span in spans if isinstance(span.start_time, int)]
            # Not the earliest: a single span without a sensible time would move all others far from 0.
            self._drawing = Drawing(base_of(median_low(starts or [0])))
            self._files.begin(self._drawing.base, _service(spans[0]))
        drawn = self._drawing.draw(spans)
        if self._files.make_room(sum(len(line.text) for line in drawn.lines)):
            self._arrows.forget()
        self._files.append(self._with_metadata(drawn, self._drawing))

    def _with_metadata(self, drawn: Drawn, drawing: Drawing) -> list[Line]:
        """Return the lines of a batch, after what names their processes and lanes where the file does not yet."""
        out: list[Line] = []
        new: set[tuple[int, int]] = set()
        for pid, tid, _ in drawn.lines:
            if self._files.lacks(pid, 0) and (pid, 0) not in new:
                new.add((pid, 0))
                out += drawing.by_pid[pid].metadata
            if self._files.lacks(pid, tid) and (pid, tid) not in new:
                new.add((pid, tid))
                out += drawing.by_pid[pid].lane_metadata(tid)
        return [*out, *drawn.lines, *arrows_of(drawn, self._arrows)]

    def force_flush(self, timeout_millis: int = 30000) -> bool:  # noqa: ARG002
        """Return True: what was exported is in the file."""
        return True

    def shutdown(self) -> None:
        """Close the file."""
        with self._lock:
            self._closed = True
            self._files.close()


class ChromeTraceExporterFromEnvironment(ChromeTraceExporter):
    """The exporter as ``OTEL_TRACES_EXPORTER=chrome_trace`` makes it: without arguments."""

    def __init__(self) -> None:
        super().__init__(
            os.environ.get(_FILE, "").strip() or DEFAULT_FILE,
            _number(os.environ, _MAX_BYTES, DEFAULT_MAX_BYTES),
            _number(os.environ, _MAX_FILES, 0),
        )


def _number(env: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number, with K, M or G after it if you like; what is none is told and ignored."""
    try:
        return size(env, name, default)
    except ConfigError as error:
        _logger.warning("%s; %d is used", error, default)
        return default


def _service(span: ReadableSpan) -> str:
    return str(span.resource.attributes.get(s.SERVICE_NAME, "") if span.resource is not None else "")

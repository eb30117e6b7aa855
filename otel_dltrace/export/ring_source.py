"""One ring as the drain sees it: finished spans come out once, each when nothing more can change it."""

import mmap
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from otel_dltrace.export.records import ErrorAmend, decode
from otel_dltrace.model import semconv
from otel_dltrace.model.errors import RingError
from otel_dltrace.model.identity import Bind, h64
from otel_dltrace.model.semconv import Flag, Level
from otel_dltrace.model.spans import Column, Process, stack_rows
from otel_dltrace.model.time import Anchor
from otel_dltrace.record.names import Names
from otel_dltrace.record.ring import RingReader, Taken, writer_is_alive

MAX_OPEN = 10_000
"""Open spans, and errors without their span, that are held: where the ring was lapped their ends never come."""
MAX_ERRORS = 4096
"""Different errors that are told apart; of further ones only the type is kept."""


@dataclass
class Unfinished:
    """What was read but may still change: open spans, and stages of steps that are not over (with the step itself)."""

    begun: dict[int, Any] = field(default_factory=dict)
    stages: dict[int, Any] = field(default_factory=dict)

    def rows(self) -> Column:
        """Return the open spans and then the stages as one array."""
        return stack_rows([*self.begun.values(), *self.stages.values()])


class RingSource:
    """Reads one ring and its names file.

    Args:
        path: The ring file.
        taken: What an earlier drain read of it.
        unfinished: Rows that it still held.
        buffer: The ring's bytes, in the process that writes it: opening it there a second time and
            closing it would free the writer's lock.

    Raises:
        RingError: The file is no ring, or is gone.
    """

    def __init__(
        self,
        path: Path,
        taken: dict[int, Taken] | None = None,
        unfinished: Column | None = None,
        buffer: mmap.mmap | None = None,
    ) -> None:
        self.path = path
        self.names = Names()
        self.ended = False
        self.recorded = 0
        self.late = 0
        self._last = 0
        self.fd = -1
        self._map: mmap.mmap | None = None
        if buffer is None:
            try:
                self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                self._map = buffer = mmap.mmap(self.fd, 0, prot=mmap.PROT_READ)
            except (OSError, ValueError) as error:
                raise RingError(f"{path} cannot be read: {error}") from None
        self.reader = RingReader(buffer, taken)
        self._read_names()
        self.held = Unfinished()
        self._finished = np.zeros(0, np.uint32)
        self._closing: set[int] = set()
        self._closed_steps: set[int] = set()
        self._kinds = (-1, np.zeros(0))
        self._error_numbers: dict[tuple[str, str], int] = {}
        self._pending_errors: dict[int, ErrorAmend] = {}
        self.errors: list[tuple[str, str]] = [("", "")]
        if unfinished is not None:
            self._hold_again(unfinished)

    @property
    def nonce(self) -> int:
        """The process's nonce as the number that its span ids are made of."""
        return int.from_bytes(self.reader.header.nonce, "little")

    def poll(self, alive: bool | None = None) -> Column:
        """Return the rows finished since the last call, without ids.

        Once the writer is gone everything comes: what was open is closed as truncated, where its
        last record was. *alive* tells it, where the caller knows better than the ring's lock.
        """
        final = not (writer_is_alive(self.fd) if alive is None else alive)
        decoded = decode(self.reader.read(final))
        self._read_names()  # after the scan: a descriptor is in the file before it is used
        self.recorded += len(decoded.spans)
        for times in (decoded.spans["end"], decoded.begun["start"]):
            self._last = max(self._last, int(times.max(initial=0)))
        self._pending_errors.update((error.span_no, error) for error in decoded.errors)
        self.late += _keep_newest(self._pending_errors, MAX_OPEN)
        self._hold_begun(decoded.begun, decoded.spans["span_no"])
        finished = self._finish(decoded.spans)
        if final and not self.ended:
            self.ended = True
            finished = stack_rows([finished, self._truncate()])
        return finished

    def _hold_begun(self, begun: Column, finished: Column) -> None:
        """Hold the spans that are still open.

        A scan reads chunk after chunk, so a BEGIN in one may come a scan later than its SPAN in the next.
        """
        over, self._finished = np.concatenate([self._finished, finished]), finished
        for row in begun[~np.isin(begun["span_no"], over)] if len(begun) else ():
            self.held.begun[int(row["span_no"])] = row
        _keep_newest(self.held.begun, MAX_OPEN)

    def _finish(self, spans: Column) -> Column:
        """Return the spans that are final; a step and its stages wait one scan longer than the step's end.

        For the same reason: a stage that ended just before its step may come a scan later.
        """
        closed, self._closing = self._closing, set()
        if not len(spans) and not closed:
            return spans
        kind = self._kind_of(spans)
        is_stage, is_step = kind == semconv.STAGE, kind == semconv.STEP
        for number in spans["span_no"][(spans["level"] <= Level.COLLECTIVE) & ~is_stage].tolist():
            self.held.begun.pop(number, None)
        released = []
        for row in spans[is_stage | is_step]:
            if int(row["step"]) in self._closed_steps:
                self.late += 1
            else:
                self.held.stages[int(row["span_no"])] = row
        self._closing.update(spans["step"][is_step].tolist())
        if closed:
            last = max(closed)
            self._closed_steps = {s for s in self._closed_steps | closed if s > last - 64}
            released = [row for row in self.held.stages.values() if int(row["step"]) <= last]
            for row in released:
                del self.held.stages[int(row["span_no"])]
        rows = stack_rows([spans[~is_stage & ~is_step], *released])
        self._apply_errors(rows)
        return rows

    def _kind_of(self, rows: Column) -> Column:
        """Return each row's kind; the table is made anew only when there are new names, of which there may be 64k."""
        if self._kinds[0] != self.names.position:
            self._kinds = (self.names.position, np.array([d.kind for d in self.names.descriptors]))
        kinds = self._kinds[1]
        found: Column = kinds[np.minimum(rows["descriptor"], len(kinds) - 1)]
        return found

    def _apply_errors(self, rows: Column) -> None:
        if not self._pending_errors:
            return
        for i in np.flatnonzero(np.isin(rows["span_no"], list(self._pending_errors))):
            amend = self._pending_errors.pop(int(rows["span_no"][i]))
            rows["error"][i] = self.error_number(self.names.strings.get(amend.type_string, "Exception"), amend.message)
            rows["flags"][i] |= np.uint16(Flag.ERROR)

    def error_number(self, kind: str, message: str) -> int:
        """Return the number of an error in `errors`, which stays short however often a program fails."""
        if len(self.errors) >= MAX_ERRORS:
            message = ""
        number = self._error_numbers.setdefault((kind, message), len(self.errors))
        if number == len(self.errors):
            self.errors.append((kind, message))
        return number

    def renumber_errors(self, rows: Column, errors: Sequence[tuple[str, str]]) -> None:
        """Have *rows*, whose errors are numbers in *errors*, speak of this source's `errors`; in place."""
        if len(errors) > 1:
            numbers = np.array([0, *(self.error_number(*error) for error in errors[1:])], np.uint32)
            rows["error"] = numbers[rows["error"]]

    def _truncate(self) -> Column:
        """Return what is still open, closed where the process's last record was."""
        stages = stack_rows(list(self.held.stages.values()))
        begun = stack_rows(list(self.held.begun.values()))
        begun["end"] = np.maximum(begun["start"], self._last)
        begun["flags"] |= np.uint16(Flag.TRUNCATED)
        self._apply_errors(stages)
        self._apply_errors(begun)
        self.held = Unfinished()
        return stack_rows([stages, begun])

    def _hold_again(self, rows: Column) -> None:
        for row in rows:
            where = self.held.begun if row["end"] == 0 else self.held.stages
            where[int(row["span_no"])] = row
        finished = rows[rows["end"] > 0]
        self._closing.update(finished["step"][self._kind_of(finished) == semconv.STEP].tolist())

    def _read_names(self) -> None:
        try:
            with self.path.with_suffix(".names").open("rb") as file:
                file.seek(self.names.position)
                self.names.read(file.read())
        except FileNotFoundError:
            pass  # the ring gets its name first; the names follow at once

    @property
    def names_torn(self) -> bool:
        """Whether the names file has something after the last name that could be read."""
        try:
            return self.path.with_suffix(".names").stat().st_size > self.names.position
        except FileNotFoundError:
            return True

    def environment_bind(self) -> Bind:
        """Return who the writer's environment says it was, for one that ended before it was bound."""
        fields = dict(self.names.home.get("bind") or {})
        nonce = self.reader.header.nonce.hex()
        fields["generation"] = fields.get("generation") or f"1.{h64(nonce):016x}"
        fields["job"] = fields.get("job") or nonce
        return Bind.read(fields)

    def process(self, bind: Bind | None, anchor: Anchor | None, resource: Iterable[tuple[str, Any]] = ()) -> Process:
        """Return who wrote this ring, with the host's *anchor* or, of another boot, the writer's own."""
        header = self.reader.header
        own = self.names.anchor or Anchor(header.monotonic, header.wall, 1_000_000)
        host = str(self.names.home.get("host") or socket.gethostname())
        boot = header.boot_id.hex()
        return Process(self.nonce, bind, host, boot, header.pid, anchor or own, tuple(resource))

    def lapped(self) -> dict[str, int]:
        """Return how many records of each level were overwritten before they were read."""
        return {level.name.lower(): self.reader.lapped[level] for level in Level if self.reader.lapped[level]}

    def close(self, unlink: bool = False) -> None:
        """Let go of the ring; *unlink* it with its companions once all of it is safe elsewhere."""
        self.reader.close()
        if self._map is not None:
            self._map.close()
            os.close(self.fd)
        if unlink:
            for left in self.path.parent.glob(f".{self.path.stem}.cursor.*"):  # by a drain killed as it wrote
                left.unlink(missing_ok=True)
            for suffix in (".cursor", ".names", ".ring"):  # the ring last: its absence says all is done
                self.path.with_suffix(suffix).unlink(missing_ok=True)


def _keep_newest(table: dict[int, Any], most: int) -> int:
    """Drop the older half of *table* if it holds more than *most*; return how many went."""
    if len(table) <= most:
        return 0
    oldest = list(table)[: len(table) - most // 2]
    for key in oldest:
        del table[key]
    return len(oldest)

"""Arrows between the slices of one collective on several processes, in bounded memory."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from typing import IO

import numpy as np

from otel_dltrace.export.chrome.text import choice, digits, hexadecimal, join, literal, zero_padded
from otel_dltrace.model.arrays import Column

FLOW_DTYPE = np.dtype([("id", "<u8"), ("ns", "<i8"), ("pid", "<u4"), ("tid", "<u4")])
CHUNK = 1 << 14
_IN_MEMORY = 1 << 20
_PARTS = 256


class Flows:
    """Where collectives are drawn; the ends of one arrow may come hours apart, in batches of different ranks.

    What is more than *room* is put aside in temporary files, by the last byte of the collective's id, which is a
    hash: so all ends of an arrow are in one file, and a file holds a 256th.
    """

    def __init__(self, files: ExitStack, room: int = _IN_MEMORY) -> None:
        self._files, self._room = files, room
        self._held: list[Column] = []
        self._count = 0
        self._parts: list[IO[bytes]] = []

    def add(self, flows: Column) -> None:
        """Take in *flows*, of ``FLOW_DTYPE``."""
        self._held.append(flows)
        self._count += len(flows)
        if self._count > self._room:
            self._put_aside()

    def _put_aside(self) -> None:
        if not self._parts:
            for _ in range(_PARTS):
                self._parts.append(self._files.enter_context(tempfile.TemporaryFile()))  # noqa: SIM115
        flows = np.concatenate([np.zeros(0, FLOW_DTYPE), *self._held])
        part = (flows["id"] % np.uint64(_PARTS)).astype(np.intp)
        order = np.argsort(part, kind="stable")
        ends = np.cumsum(np.bincount(part, minlength=_PARTS))[:-1]
        for file, rows in zip(self._parts, np.split(order, ends), strict=True):
            file.write(flows[rows].tobytes())
        self._held, self._count = [], 0

    def lines(self) -> Iterator[tuple[bytes, int]]:
        """Yield the text of the arrows, and how many events it is; each event begins with a comma."""
        if not self._parts:
            yield from _arrows(np.concatenate([np.zeros(0, FLOW_DTYPE), *self._held]))
            return
        self._put_aside()
        for file in self._parts:
            file.seek(0)
            yield from _arrows(np.frombuffer(file.read(), FLOW_DTYPE))


def _arrows(flows: Column) -> Iterator[tuple[bytes, int]]:
    """Yield the arrows that join the same id on two or more processes, from the first to the last to begin."""
    flows = flows[np.lexsort((flows["ns"], flows["pid"], flows["id"]))]
    again = (flows["id"][1:] == flows["id"][:-1]) & (flows["pid"][1:] == flows["pid"][:-1])
    flows = flows[np.concatenate([[True], ~again])[: len(flows)]]
    flows = flows[np.lexsort((flows["ns"], flows["id"]))]
    same = flows["id"][1:] == flows["id"][:-1]
    after = np.concatenate([[False], same])[: len(flows)]
    before = np.concatenate([same, [False]])[: len(flows)]
    joined = np.flatnonzero(after | before)
    for first in range(0, len(joined), CHUNK):
        rows = joined[first : first + CHUNK]
        # 0 begins an arrow, 1 ends it, 2 is a station between.
        yield _text(flows[rows], after[rows] * (1 + before[rows])), len(rows)


def _text(flows: Column, phase: Column) -> bytes:
    # Half a ns inside the slice: at its very start rounding can put the arrow's end before it.
    blocks = (
        choice([b',\n{"ph":"s","id":"0x', b',\n{"ph":"f","id":"0x', b',\n{"ph":"t","id":"0x'], phase),
        hexadecimal(flows["id"]),
        literal(b'","pid":'),
        digits(flows["pid"].astype(np.int64)),
        literal(b',"tid":'),
        digits(flows["tid"].astype(np.int64)),
        literal(b',"ts":'),
        digits(flows["ns"] // 1000),
        literal(b"."),
        zero_padded(flows["ns"] % 1000 * 10 + 5, 4),
        literal(b',"bp":"e","name":"collective","cat":"collective"}'),
    )
    return join(len(flows), [(block, None) for block in blocks])

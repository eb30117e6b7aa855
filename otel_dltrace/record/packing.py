"""How the fields of a record become its 64 bytes (contract 2)."""

import struct
import sys
from collections.abc import Callable
from operator import index
from typing import Any

from otel_dltrace.model.semconv import Flag, Level
from otel_dltrace.record import guard
from otel_dltrace.record.ring_file import AMEND, BEGIN, RECORD, SPAN

# The whole sequence (lane, chunk, slot, pack, else `Lanes.spoil`) stands flat, since a call can be seen, in
# `Recorder.span`, `Recorder.begin`, `phase.__exit__`, `_mpi.usual.wrapper` (twice), `_Pushed.stage_finished` and
# `Server.answered` (twice); `Recorder._write` is the way of all others. A change of the protocol changes each.
BEGINS, SPANS = (tuple(kind | level << 12 for level in range(16)) for kind in (BEGIN, SPAN))
"""Kind and level as the one field that they are with the flags, by the level: reading them costs less than a shift."""
PARENTS = tuple(AMEND | level << 12 | Flag.REMOTE << 16 for level in range(16))
"""The same of what tells a parent in another process."""
PHASE_SPAN = SPAN | Level.PHASE << 12
"""Kind and level of a phase that is over, as the one field that they are to `pack_phase`."""
CALL_BEGIN, CALL_SPAN = BEGIN | Level.COLLECTIVE << 12, SPAN | Level.COLLECTIVE << 12
"""Likewise of a call that communicates, to `pack_call_begin` and `pack_call`."""
_M16, _M32, _M64, _SIGN = 0xFFFF, 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF, 0x8000_0000


def _packer(layout: str) -> Callable[..., None]:
    """Return what packs a record of *layout* into a buffer at an offset.

    Where C's long has 64 bits and this order it stands in for ``Q``, which makes packing a fifth faster.
    """
    native = "@" + layout.replace("Q", "L")
    is_same = sys.byteorder == "little" and struct.calcsize(native) == RECORD
    return struct.Struct(native if is_same else "<" + layout).pack_into


# RECORD_FORMAT with its spare field as padding, which costs nothing to pack, and kind, level and flags as one field.
pack_span = _packer("IIIIQQQIIiiH2xI")
# A BEGIN has no end and no partition yet.
pack_begin = _packer("IIIIQ8xQIIii4xI")
# The same bytes for a phase, whose flags, source, a, b and partition are 0; parent and, above it, seq are one field.
pack_phase = _packer("IIIIQQQQ12xI")
# And for a call that communicates and blocks, whose flags, source and partition are 0, as is seq until it is over.
pack_call_begin = _packer("IIIIQ8xQI4xii4xI")
pack_call = _packer("IIIIQQQIIii4xI")
MESSAGE = 36
"""Bytes of an error's message."""
pack_amend_error = struct.Struct(f"<IIIBBHI{MESSAGE}sII").pack_into
pack_amend_device = struct.Struct("<IIIBBHQQIQ12xII").pack_into
pack_amend_parent = _packer("IIII16s8sII8xII")


def whole(value: Any, default: int = 0) -> int:
    """Return the number *value*, which a program gave, without what is behind its point; else *default*, told once."""
    try:
        return index(value)
    except TypeError:
        pass
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        guard.say(f"a number was expected, and a {type(value).__name__} that is none is left out")
        return default


def masked(
    head: tuple[int, int, int, int, int, int],
    start: int,
    end: int,
    size: int,
    parent: int,
    seq: int,
    a: int,
    b: int,
    partition: int,
) -> tuple[int, ...]:
    """Return a record's fields, each cut to its width; those that a program gave may be of any kind."""
    number, step, descriptor, kind, level, flags = head
    return (
        index(number) & _M32,
        index(step) & _M32,
        index(descriptor) & _M32,
        kind | (level & 0xFF) << 8 | (flags & _M16) << 16,
        index(start) & _M64,
        index(end) & _M64,
        whole(size) & _M64,
        index(parent) & _M32,
        index(seq) & _M32,
        ((whole(a) + _SIGN) & _M32) - _SIGN,
        ((whole(b) + _SIGN) & _M32) - _SIGN,
        index(partition) & _M16,
    )

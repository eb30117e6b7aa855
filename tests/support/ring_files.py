"""What the tests of the ring share: a ring read to its end, and records that can be checked by themselves."""

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from otel_dltrace.export.rings.reader import RingReader
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.record.names import Names
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.ring_file import BEGIN, CHUNK, RECORD_FORMAT, SPAN
from tests.support.paths import ROOT

UNPACK = struct.Struct(RECORD_FORMAT).unpack
FIELDS = ("number step descriptor kind level_source flags start end size parent seq a b partition spare commit").split()
SMALLEST = 17 * CHUNK  # 16 chunks


def fields(record: bytes) -> dict[str, int]:
    """Return a record's fields by name, without its commit, which is another in every chunk."""
    named = dict(zip(FIELDS, UNPACK(record), strict=True))
    return {name: value for name, value in named.items() if name != "commit"}


@dataclass(frozen=True)
class Read:
    """A ring read to its end."""

    records: list[dict[str, int]]
    lapped: int
    unrecorded: int
    leases: int
    names: Names


def records_of(reader: RingReader, final: bool = False, again: bool = False) -> list[bytes]:
    """Return the new records of *reader*, 64 bytes each."""
    return [record.tobytes() for record in reader.read(final, again)]


def read_buffer(buffer: mmap.mmap, names: Path) -> Read:
    """Read a ring from its bytes, also that of this process: opening its file again would free its lock."""
    reader = RingReader(buffer)
    records = [fields(record) for record in records_of(reader, final=True)]
    known = Names()
    known.read(names.read_bytes())
    leases = sum(int.from_bytes(buffer[at : at + 4], "little") > 0 for at in range(4096, len(buffer), 4096))
    read = Read(records, sum(reader.lapped), reader.unrecorded, leases, known)
    reader.close()
    return read


def read_own(recorder: Recorder) -> Read:
    """Read the ring that *recorder*, of this process, writes."""
    assert recorder.ring is not None
    return read_buffer(recorder.ring.buffer, recorder.ring.path.with_suffix(".names"))


def read_file(path: Path) -> Read:
    """Read the ring of another process."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as buffer:
        return read_buffer(buffer, path.with_suffix(".names"))


# -- records that carry their own check ----------------------------------------------------------


def write_checked(recorder: Recorder, descriptor: int, lane: int, seq: int) -> None:
    """Write the record *seq* of *lane*: a third each of BEGIN, SPAN and (some out of range) phase."""
    size = mixed(lane, seq)
    if seq % 3 == 0:
        recorder.begin(descriptor, 2, seq, size, lane, seq, -seq, lane, step=seq)
    elif seq % 3 == 1:
        recorder.span(descriptor, 2, seq, 2 * seq, size, lane, seq, lane, -seq, lane, step=seq)
    else:
        recorder.span(descriptor, 3, seq, 2 * seq, size - (1 << 64), lane, seq, lane + (1 << 16), step=seq)


def mixed(lane: int, seq: int) -> int:
    """Return a number that half a record of another slot would not have."""
    return (seq * 0x9E37_79B9_7F4A_7C15 ^ lane << 56) & 0xFFFF_FFFF_FFFF_FFFF


def checked(record: dict[str, int], names: Names) -> tuple[int, int]:
    """Return lane and seq of a record that `write_checked` made, and that is right to the last field."""
    lane, seq = record["parent"], record["seq"]
    begun, phase = seq % 3 == 0, seq % 3 == 2
    assert record == {
        "number": record["number"],
        "step": seq,
        "descriptor": record["descriptor"],
        "kind": BEGIN if begun else SPAN,
        "level_source": (3 if phase else 2) << 4,
        "flags": 0,
        "start": seq,
        "end": 0 if begun else 2 * seq,
        "size": mixed(lane, seq),
        "parent": lane,
        "seq": seq,
        "a": 0 if phase else -seq,
        "b": 0 if phase else lane,
        "partition": 0 if begun else lane,
        "spare": 0,
    }
    assert record["number"] > 0
    assert names.descriptors[record["descriptor"]] == lane_descriptor(lane)
    return lane, seq


def lane_descriptor(lane: int) -> Descriptor:
    """Return the descriptor of the records of *lane*."""
    return Descriptor("phase", f"lane {lane}")


def by_lane(read: Read) -> dict[int, list[int]]:
    """Return the sequence numbers of each lane's records, sorted, after checking every one."""
    lanes: dict[int, list[int]] = {}
    for record in read.records:
        lane, seq = checked(record, read.names)
        lanes.setdefault(lane, []).append(seq)
    return {lane: sorted(seqs) for lane, seqs in sorted(lanes.items())}


def environment() -> dict[str, str]:
    """Return the environment for a program that imports this checkout."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


class Interrupting:
    """Slots whose next one is drawn just before somebody else's *records* are written on the same thread."""

    def __init__(self, slots: Iterator[int], records: int, write: Callable[[], None]) -> None:
        self.slots, self.records, self.write = slots, records, write

    def __next__(self) -> int:
        """Draw a slot, then be interrupted."""
        offset = next(self.slots, 0)
        records, self.records = self.records, 0
        for _ in range(records):
            self.write()
        return offset

    def __iter__(self) -> Iterator[int]:
        """Be an iterator."""
        return self

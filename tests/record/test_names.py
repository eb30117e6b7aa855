"""The names file: nothing is used before it is in it, and what is in it survives anything but its file."""

import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from otel_dltrace.model.errors import RingError
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.operation import MAX_DESCRIPTORS, OTHER, Descriptor
from otel_dltrace.model.time import Anchor
from otel_dltrace.record import guard
from otel_dltrace.record import names as names_module
from otel_dltrace.record.names import BIND, DESCRIPTOR, Followed, Names, NamesWriter
from tests.support.ring_files import environment

ANCHOR = Anchor(1, 2, 3)
HOME = {"drain": "abc", "directory": "/runs"}
ALL_REDUCE = Descriptor("collective", "all_reduce", group="0", group_size=8, backend="nccl", dtype="float32")
ROLLOUT = Descriptor("phase", "rollout")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the names file goes."""
    return tmp_path / "0.names"


@pytest.fixture
def writer(path: Path) -> NamesWriter:
    """A writer with an open file."""
    writer = NamesWriter()
    writer.open(path, 0o600, ANCHOR, HOME)
    return writer


def read(data: bytes) -> Names:
    """Return what *data* says."""
    names = Names()
    names.read(data)
    return names


def test_what_was_written_is_read(writer: NamesWriter, path: Path) -> None:
    """Descriptors, strings, binds, timelines, the anchor and what `start` gave, before and after the file is open."""
    timeline = Followed("/runs/timeline.json", Anchor(4, 5, 6))
    bind = Bind("job", "1.ab", job_name="tr\u00e4ning", rank=3, world_size=8)
    numbers = [writer.descriptor(ALL_REDUCE), writer.descriptor(ROLLOUT), writer.descriptor(ALL_REDUCE)]
    strings = [writer.string("ValueError"), writer.string("\udcff"), writer.string("ValueError")]
    writer.bind(bind)
    writer.follow(timeline)
    data = path.read_bytes()
    names = Names([OTHER, ALL_REDUCE, ROLLOUT], {1: "ValueError", 2: "?"}, [bind], ANCHOR, HOME, len(data), [timeline])
    later = path.with_name("1.names")
    writer.open(later, 0o600, ANCHOR, HOME)

    assert (numbers, strings) == ([1, 2, 1], [1, 2, 1])
    assert read(data) == names
    assert read(later.read_bytes()) == names


def test_a_reader_takes_up_where_it_stopped_at_any_byte(writer: NamesWriter, path: Path) -> None:
    """Half a record waits for its other half."""
    for number in range(5):
        writer.descriptor(Descriptor("phase", f"phase {number}"))
    data = path.read_bytes()
    names = Names()
    for end in range(len(data) + 1):
        names.read(data[names.position : end])

    assert names == read(data)


@pytest.mark.parametrize("at", range(0, 400, 7))
def test_a_damaged_byte_ends_the_reading_and_no_more(writer: NamesWriter, path: Path, at: int) -> None:
    """What comes before it is right; nothing wrong comes after it."""
    for number in range(9):
        writer.descriptor(Descriptor("phase", f"phase {number}"))
    data = bytearray(path.read_bytes())
    whole = read(bytes(data)).descriptors
    data[at] ^= 0x55
    names = read(bytes(data))

    assert names.descriptors == whole[: len(names.descriptors)]
    assert names.position <= at


def test_the_numbers_of_a_forked_child_are_its_parent_s(writer: NamesWriter, path: Path) -> None:
    """The child's own file begins with all that the parent knew; the parent's is not touched."""
    writer.descriptor(ALL_REDUCE)
    writer.string("ValueError")
    before = path.read_bytes()
    writer.after_fork()
    writer.descriptor(ROLLOUT)  # between the fork and the child's first record
    child = path.with_name("1.names")
    writer.open(child, 0o600, ANCHOR, HOME)
    writer.descriptor(Descriptor("phase", "child's"))

    assert path.read_bytes() == before
    assert read(child.read_bytes()).descriptors == [OTHER, ALL_REDUCE, ROLLOUT, Descriptor("phase", "child's")]
    assert read(child.read_bytes()).strings == {1: "ValueError"}


def test_names_without_end_are_folded_and_the_table_is_bounded(
    writer: NamesWriter, path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Horovod numbers its unnamed tensors; a program that makes names up gets 'other', and is told so once."""
    monkeypatch.setattr(guard, "_said", set())
    unnamed = [Descriptor("collective", "allreduce", backend="horovod", tensor=f"g.noname.{i}") for i in range(50)]
    noname = set(map(writer.descriptor, unnamed))
    monkeypatch.setattr(names_module, "MAX_DESCRIPTORS", 10)
    many = [writer.descriptor(Descriptor("phase", f"phase {number}")) for number in range(20)]
    strings = [writer.string(f"string {number}") for number in range(20)]

    assert (noname, many) == ({1}, [*range(2, 10), *[0] * 12])
    assert strings == [*range(1, 10), *[0] * 11]
    assert [d.tensor for d in read(path.read_bytes()).descriptors[:2]] == ["", "g.noname.N"]
    assert MAX_DESCRIPTORS == 1 << 16
    assert capsys.readouterr().err == (
        "otel_dltrace: a process has 65,535 names of tensors, phases and calls at most "
        "(leave out of them what counts up): what is new is called 'other'\n"
    )


def test_a_name_that_is_no_text_is_written_as_one(writer: NamesWriter, path: Path) -> None:
    """`phase(5)` is a slip of the user's, and takes nothing from what else was recorded."""
    slip: Any = 5
    assert writer.descriptor(Descriptor("phase", slip)) == writer.descriptor(Descriptor("phase", "5"))

    assert read(path.read_bytes()).descriptors[-1] == Descriptor("phase", "5")


def test_threads_that_intern_at_once_agree(writer: NamesWriter, path: Path) -> None:
    """One number for one descriptor, whoever comes first, and the file says the same."""
    wanted = [Descriptor("phase", f"phase {number}") for number in range(200)]
    got: list[list[int]] = []
    threads = [threading.Thread(target=lambda: got.append([*map(writer.descriptor, wanted)])) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    known = read(path.read_bytes()).descriptors

    assert got == [got[0]] * 6
    assert [known[number] for number in got[0]] == wanted


def test_a_name_interrupted_by_a_handler_that_interns_keeps_its_number(
    writer: NamesWriter, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The handler's name is in the file first, with the higher number: both are read right."""
    append = NamesWriter._append_descriptor
    other: list[int] = []

    def interrupted(self: NamesWriter, number: int, descriptor: Descriptor) -> bool:
        if not other:
            other.append(0)
            other[0] = self.descriptor(ROLLOUT)
        return append(self, number, descriptor)

    monkeypatch.setattr(NamesWriter, "_append_descriptor", interrupted)

    assert (writer.descriptor(ALL_REDUCE), *other) == (1, 2)
    assert read(path.read_bytes()).descriptors == [OTHER, ALL_REDUCE, ROLLOUT]


def test_a_name_interned_while_another_is_looked_up_has_a_number_of_its_own(
    writer: NamesWriter, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection, which interns `gc`, may come wherever Python runs, as a descriptor's hash does."""
    plain = Descriptor.__hash__
    others: list[int] = []

    def interrupted(descriptor: Descriptor) -> int:
        if descriptor == ALL_REDUCE:
            others.append(0)
            others[-1] = writer.descriptor(Descriptor("phase", f"gc {len(others)}"))
        return plain(descriptor)

    monkeypatch.setattr(Descriptor, "__hash__", interrupted)
    number = writer.descriptor(ALL_REDUCE)
    monkeypatch.undo()
    known = read(path.read_bytes()).descriptors

    assert len({number, *others}) == len(others) + 1 > 2
    assert known[number] == ALL_REDUCE
    assert [known[other].name for other in others] == [f"gc {n + 1}" for n in range(len(others))]
    assert writer.descriptor(ALL_REDUCE) == number


def test_a_newer_writer_s_records_are_passed_over(writer: NamesWriter, path: Path) -> None:
    """Unknown kinds, unknown fields and fields of another type hide nothing that follows."""
    for kind, payload in ((9, b"\xff\x00"), (DESCRIPTOR, b"[1]"), (DESCRIPTOR, b'{"id": -5}'), (BIND, b'{"x": 1}')):
        writer._append(kind, payload)
    writer._append(DESCRIPTOR, b'{"id": 1, "kind": "phase", "name": "rollout", "colour": "red"}')
    data = path.read_bytes()

    assert read(data) == Names([OTHER, ROLLOUT], {}, [], ANCHOR, HOME, len(data))


FULL = """
import resource, sys
from pathlib import Path
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.time import Anchor
from otel_dltrace.record.names import NamesWriter
writer = NamesWriter()
writer.open(Path(sys.argv[1]), 0o600, Anchor(1, 2, 3), {})
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # the 1001st byte does not fit: a short write, then none
full = [writer.descriptor(Descriptor("phase", f"phase {n:20}")) for n in range(30)]
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
print(full.index(0), set(full[full.index(0):]), writer.descriptor(Descriptor("phase", "again")) > 0)
"""


def test_a_full_tmpfs_makes_other_of_new_names_and_tears_none(path: Path) -> None:
    """It is said once. A short write is taken back, so that what is written once there is room again can be read."""
    command = [sys.executable, "-c", FULL, str(path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    names = read(path.read_bytes())
    count = int(done.stdout.split()[0])

    assert done.stdout.split(" ", 1)[1] == "{0} True\n"
    assert done.stderr == (
        "otel_dltrace: the names file cannot grow (is the ring folder full?): what is new is called 'other'\n"
    )
    assert [d.name for d in names.descriptors if d != OTHER] == [*(f"phase {n:20}" for n in range(count)), "again"]
    assert names.position == path.stat().st_size


def test_a_names_file_that_cannot_be_begun_raises(path: Path, tmp_path: Path) -> None:
    """Without an anchor and an identity a ring is of no use: the recorder turns tracing off."""
    with pytest.raises(RingError, match="cannot be made: No such file or directory"):
        NamesWriter().open(tmp_path / "gone" / "0.names", 0o600, ANCHOR, HOME)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        with pytest.raises(RingError, match=f"no room for {path}"):
            NamesWriter().open(path, 0o600, ANCHOR, HOME)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

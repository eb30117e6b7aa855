"""The recorder: kills, forks, interruptions and odd values; every record is right, or not there and counted."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from otel_dltrace.export.rings.reader import RingReader
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.record.lanes import BLOCK
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.ring_file import AMEND, AMEND_ERROR, BEGIN, COUNTER, SPAN
from tests.support.paths import PROGRAMS
from tests.support.ring_files import (
    SMALLEST,
    Interrupting,
    Read,
    by_lane,
    environment,
    lane_descriptor,
    read_file,
    read_own,
    records_of,
    write_checked,
)

WRITER = PROGRAMS / "ring_writer.py"


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    """A recorder with the smallest ring, 16 chunks of 63 records."""
    return Recorder(tmp_path, SMALLEST)


def run_writer(*arguments: object) -> str:
    """Run a program of ``ring_writer.py`` to its end; return what it printed."""
    command = [sys.executable, str(WRITER), *map(str, arguments)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("count", "size"),
    [pytest.param(100, 4 << 20, id="room for all"), pytest.param(90, 1 << 17, id="a ring that laps")],
)
def test_a_kill_loses_at_most_the_record_that_each_thread_was_writing(tmp_path: Path, count: int, size: int) -> None:
    """Writers of 1 to 8 threads, killed at random instants; the program checks what each kill left."""
    seen = json.loads(run_writer("kills", tmp_path, count, size))

    assert (seen["kills"], seen["records"] > 0, seen["lapped"] > 0 or size > 1 << 17) == (count, True, True)
    assert list(tmp_path.iterdir()) == []


def test_every_process_of_a_fork_writes_its_own_ring(tmp_path: Path) -> None:
    """Forked while a thread records, and inside a signal handler: the parent's ring has the parent's records alone."""
    parent = Path(run_writer("fork", tmp_path).strip())
    lanes = {path: by_lane(read_file(path)) for path in tmp_path.glob("*.ring")}
    own = lanes.pop(parent)

    assert own[0] == list(range(100))
    assert own[1] == list(range(len(own[1])))
    assert list(lanes.values()) == [{0: list(range(100)), 2: [0]}] * 3


def test_a_record_holds_what_was_said(recorder: Recorder) -> None:
    """Each kind, field by field."""
    recorder.step = 4
    phase, metric = recorder.intern(Descriptor("phase", "rollout")), recorder.intern(Descriptor("metric", "loss"))
    number = recorder.begin(phase, 2, 10, 100, 7, 3, -1, -2, 1)
    recorder.error(number, 2, ValueError("no such tensor"))
    recorder.span(phase, 2, 10, 30, 100, 7, 3, 5, -1, -2, 3, 4, number)
    recorder.span(phase, 3, 11, 12, step=9)
    recorder.counter(metric, 1, 40, 17)
    recorder.span(phase, 4, 1, 2)  # finer than what is recorded
    read = read_own(recorder)
    nothing = dict.fromkeys(read.records[0], 0)
    message = int.from_bytes(b"no s", "little"), int.from_bytes(b"uch tens", "little")
    begun = {"number": 1, "step": 4, "descriptor": 1, "start": 10, "size": 100, "parent": 7, "seq": 3, "a": -1, "b": -2}

    assert recorder.number() == number + 2
    assert [record for record in read.records if record["kind"] != AMEND] == [
        {**nothing, **begun, "kind": BEGIN, "level_source": 0x20, "flags": 1},
        {**nothing, **begun, "kind": SPAN, "level_source": 0x24, "flags": 3, "end": 30, "partition": 5},
        {
            **nothing,
            "number": 2,
            "step": 9,
            "descriptor": 1,
            "kind": SPAN,
            "level_source": 0x30,
            "start": 11,
            "end": 12,
        },
        {**nothing, "step": 4, "descriptor": 2, "kind": COUNTER, "level_source": 0x10, "start": 40, "size": 17},
    ]
    (amend,) = [record for record in read.records if record["kind"] == AMEND]
    assert read.names.strings[amend["start"] & 0xFFFF_FFFF] == "ValueError"
    assert (amend["start"] >> 32, amend["end"], amend["number"]) == (*message, number)


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        pytest.param("x" * 36, b"x" * 36, id="short"),
        pytest.param("x" * 37, b"x" * 33 + b"...", id="long"),
        pytest.param(
            "[/gloo/transport/tcp/pair.cc:547] Connection closed", b"Connection closed".ljust(36, b"\0"), id="gloo"
        ),
    ],
)
def test_an_amend_has_its_type_and_message_where_the_contract_says(
    recorder: Recorder, message: str, kept: bytes
) -> None:
    """The payload is 40 bytes after the 16 of the head; then the type, then the commit."""
    recorder.error(9, 1, RuntimeError(message))
    assert recorder.ring is not None
    (record,) = records_of(RingReader(recorder.ring.buffer), final=True)

    assert (record[16:20], record[20:56]) == ((1).to_bytes(4, "little"), kept)
    assert (record[56], record[12]) == (AMEND_ERROR, AMEND)


BIG = 1 << 70


def test_values_out_of_range_are_cut_to_their_width_and_zero_no_record(recorder: Recorder) -> None:
    """A negative size, a rank of 2^40: the record stays, its neighbours untouched."""
    recorder.span(1, 3, 1, 2)
    recorder.span(-1, 3, -1, BIG + 5, -2, BIG + 6, -3, -4, BIG + 7, -(1 << 31) - 1, BIG + 1, 0, BIG + 8, BIG + 9)
    assert recorder.begin(1, 2, -1, BIG + 2, -1, -1, BIG - 1, 1 << 31, -1, 3, BIG + 4) == BIG + 4
    recorder.counter(-1, 1, -1, -1)
    recorder.span(1, 3, 3, 4)
    first, wide, begun, counter, last = read_own(recorder).records
    ones = {32: (1 << 32) - 1, 64: (1 << 64) - 1}

    assert [first["end"], last["end"]] == [2, 4]
    assert wide == {
        "number": 8,
        "step": 9,
        "descriptor": ones[32],
        "kind": SPAN,
        "level_source": 0x30,
        "flags": 1,
        "start": ones[64],
        "end": 5,
        "size": ones[64] - 1,
        "parent": 6,
        "seq": ones[32] - 2,
        "a": 7,
        "b": (1 << 31) - 1,
        "partition": 0xFFFF - 3,
        "spare": 0,
    }
    assert (begun["number"], begun["a"], begun["b"], begun["flags"]) == (4, -1, -(1 << 31), 0xFFFF)
    assert (counter["start"], counter["size"]) == (ones[64], ones[64])


def test_a_number_may_be_of_any_kind_also_in_the_first_record_of_a_chunk(recorder: Recorder) -> None:
    """Sizes, tags and ranks that a program gives are often numpy's, which overflow where Python's do not."""
    for tag in range(200):
        recorder.span(1, 3, np.int64(1), np.int64(2), np.int64(3), np.int32(4), np.int32(5), 0, 6, np.int16(tag - 9))

    assert [record["b"] for record in read_own(recorder).records] == [*range(-9, 191)]


def test_a_time_that_is_no_number_raises_and_leaves_a_hole(recorder: Recorder) -> None:
    """The caller's guard tells it; laps are still counted exactly, for the hole was never a record."""
    recorder.span(1, 3, 1, 2)
    with pytest.raises(TypeError):
        recorder.span(1, 3, "one", 2)  # type: ignore[arg-type]
    for _ in range(16 * 63):
        recorder.span(1, 3, 1, 2)
    read = read_own(recorder)

    assert (len(read.records) + read.lapped, read.lapped > 0) == (16 * 63 + 1, True)


@pytest.mark.parametrize("records", [1, 62, 63, 200, 16 * 63, 40 * 63])
@pytest.mark.parametrize("kind", ["span", "begin", "counter", "error"])
def test_a_record_interrupted_by_a_handler_that_records_is_not_written_over(
    tmp_path: Path, kind: str, records: int
) -> None:
    """Between drawing a slot and packing it, a handler may fill the chunk, even lap the whole ring."""
    recorder = Recorder(tmp_path, SMALLEST)

    def plain() -> None:
        recorder.span(0, 3, 1, 2, parent=2)

    plain()
    lane = recorder.local.lane
    slots, lease, buffer, index = lane.chunk
    lane.chunk = (Interrupting(slots, records, plain), lease, buffer, index)
    write = {
        "span": lambda: recorder.span(0, 3, 1, 2, parent=1),
        "begin": lambda: recorder.begin(0, 2, 1, parent=1),
        "counter": lambda: recorder.counter(0, 3, 1, 1),
        "error": lambda: recorder.error(1, 3, ValueError()),
    }
    write[kind]()
    plain()
    read = read_own(recorder)

    assert len(read.records) + read.lapped == records + 3
    assert [record["parent"] for record in read.records].count(2) == len(read.records) - 1


@pytest.fixture(params=[True, False])
def has_gil(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Return whether recorders made from now on take this Python for one with a GIL."""
    monkeypatch.setattr(sys, "abiflags", "" if request.param else "t")
    return bool(request.param)


def test_more_threads_than_chunks_lose_records_only_where_each_has_its_own(has_gil: bool, recorder: Recorder) -> None:
    """Under the GIL they share one. Else a living thread's is never given to another; who finds none is counted."""
    together = threading.Barrier(20)

    def work(lane: int) -> None:
        descriptor = recorder.intern(lane_descriptor(lane))
        write_checked(recorder, descriptor, lane, 0)
        together.wait()
        write_checked(recorder, descriptor, lane, 1)
        together.wait()

    threads = [threading.Thread(target=work, args=(lane,)) for lane in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = read_own(recorder)

    assert list(by_lane(read).values()) == [[0, 1]] * (20 if has_gil else 16)
    assert (read.unrecorded, read.lapped) == (0 if has_gil else 8, 0)


@pytest.mark.usefixtures("has_gil")
def test_threads_that_come_and_go_share_chunks_and_span_numbers(recorder: Recorder) -> None:
    """A thread for each batch, or a C library's callback, must not use up a chunk each time."""
    for seq in range(300):
        thread = threading.Thread(target=write_checked, args=(recorder, recorder.intern(lane_descriptor(3)), 3, seq))
        thread.start()
        thread.join()
    read = read_own(recorder)

    assert by_lane(read) == {3: list(range(300))}
    assert (read.leases < 16, recorder.number() <= 16 * BLOCK) == (True, True)  # `join` may be early by a few


def test_span_numbers_go_round_without_a_zero(recorder: Recorder) -> None:
    """Number 0 means 'no parent'; the step beside a number keeps ids apart when they come again."""
    recorder._next_block = (1 << 32) - 2 * BLOCK + 1
    numbers = [recorder.number() for _ in range(3 * BLOCK)]

    assert (min(numbers), max(numbers) < 1 << 32, len(set(numbers))) == (1, True, 3 * BLOCK)


def test_what_is_not_recorded_makes_no_ring(tmp_path: Path) -> None:
    """Level 0, and levels finer than the one asked for, touch no file."""
    recorder = Recorder(tmp_path / "rings", SMALLEST, level=1)
    recorder.span(0, 2, 1, 2)
    recorder.counter(0, 2, 1, 2)
    recorder.error(1, 2, ValueError())

    assert (recorder.begin(0, 2, 1), (tmp_path / "rings").exists()) == (0, False)


def test_the_first_record_calls_back_once_and_its_failure_is_told_not_raised(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The callback starts the drain; without one the ring still holds everything."""

    def start_drain() -> None:
        raise OSError("no more processes")

    recorder = Recorder(tmp_path, SMALLEST, need_drain=start_drain)
    for _ in range(3):
        recorder.span(0, 3, 1, 2)

    assert len(read_own(recorder).records) == 3
    assert capfd.readouterr().err.count("no more processes") == 1


class Silent(Exception):
    """An error that cannot even be printed."""

    def __str__(self) -> str:
        """Fail."""
        raise RuntimeError("no text")


def test_an_error_that_cannot_be_printed_is_recorded_by_its_type(recorder: Recorder) -> None:
    """A user's exception class must not break the record of it."""
    recorder.error(1, 3, Silent())
    read = read_own(recorder)

    assert [read.names.strings[record["start"] & 0xFFFF_FFFF] for record in read.records] == ["test_recorder.Silent"]


def test_a_closed_recorder_records_no_more_and_can_be_closed_again(recorder: Recorder) -> None:
    """What is written before `close` is there; after it nothing is, and nothing fails."""
    recorder.span(0, 3, 1, 2)
    assert recorder.ring is not None
    path = recorder.ring.path
    recorder.close()
    recorder.span(0, 3, 1, 2)
    recorder.close()
    recorder.after_fork()

    assert [record["end"] for record in read_file(path).records] == [2]


DAEMON = """
import os, sys
from pathlib import Path
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.model.operation import Descriptor
recorder = Recorder(Path(sys.argv[1]), 1 << 20)
recorder.span(0, 3, 1, 2)
path = recorder.ring.path
os.closerange(3, 100)  # as programs that become daemons do
mine = [os.open(sys.argv[2], os.O_RDWR | os.O_CREAT) for _ in range(8)]
os.write(mine[0], b"a checkpoint")
print(recorder.intern(Descriptor("phase", "new")))
recorder.span(0, 3, 1, 4)
recorder.close()
os.fstat(mine[-1])
print(path, [os.fstat(fd).st_size for fd in mine])
"""


def test_a_program_that_closes_all_its_files_keeps_its_own_afterwards(tmp_path: Path) -> None:
    """Our descriptors' numbers are its files' now, as may be that of standard error: nothing is written to them."""
    command = [sys.executable, "-c", DAEMON, str(tmp_path / "rings"), str(tmp_path / "checkpoint")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    number, rest = done.stdout.splitlines()

    assert (number, rest.split(" ", 1)[1], done.stderr) == ("0", str([12] * 8), "")
    assert (tmp_path / "checkpoint").read_bytes() == b"a checkpoint"
    assert [record["end"] for record in read_file(Path(rest.split(" ")[0])).records] == [2, 4]


def test_a_bind_holds_from_the_first_step_and_a_later_one_from_its_own(recorder: Recorder) -> None:
    """Who learns late who it is was it all along; who changes is another from now on."""
    first, second = Bind("job", "1.ab", rank=1), Bind("job", "2.cd", rank=0)
    recorder.step = 3
    recorder.bind(first)
    recorder.step = 7
    recorder.bind(second)
    recorder.span(0, 3, 1, 2)
    names = read_own(recorder).names

    assert recorder.bound == second.from_now(7)
    assert names.binds == [first, second.from_now(7)]


def test_a_ring_of_no_records_reads_as_nothing(tmp_path: Path) -> None:
    """Killed before the first record: an empty ring is a ring."""
    recorder = Recorder(tmp_path, SMALLEST)
    recorder.span(0, 3, 1, 2)
    assert recorder.ring is not None
    recorder.ring.buffer[4096:] = bytes(len(recorder.ring.buffer) - 4096)

    assert read_own(recorder) == Read([], 0, 0, 0, read_own(recorder).names)
    assert recorder.ring.path.exists()

"""The ring: what a kill, a full tmpfs, a lap or a damaged file leaves of it."""

import itertools
import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from otel_dltrace.export.rings.reader import RingReader
from otel_dltrace.model.errors import RingError
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.ring import RingWriter
from otel_dltrace.record.ring_file import CHUNK, HEADER, PAGE, RECORDS, writer_is_alive
from tests.support.paths import PROGRAMS
from tests.support.ring_files import Read, by_lane, environment, fields, read_file, records_of

SMALLEST = 17 * CHUNK  # 16 chunks


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    """A recorder with the smallest ring, 16 chunks of 63 records."""
    return Recorder(tmp_path, SMALLEST, level=4)


def write(recorder: Recorder, seqs: range, level: int = 3) -> None:
    """Write one phase for each of *seqs*."""
    for seq in seqs:
        recorder.span(0, level, 1, 2, seq=seq)


def scanned(reader: RingReader, final: bool = False, again: bool = False) -> list[int]:
    """Return the seqs of a scan's records."""
    return [int.from_bytes(record[44:48], "little") for record in records_of(reader, final, again)]


def ring(recorder: Recorder) -> RingWriter:
    """Return the ring of *recorder*, which has recorded."""
    assert recorder.ring is not None
    return recorder.ring


def test_a_live_reader_takes_a_record_on_the_scan_after_the_one_that_saw_it(recorder: Recorder) -> None:
    """So its bytes have arrived on machines that reorder stores, too; and each comes once."""
    write(recorder, range(3))
    reader = RingReader(ring(recorder).buffer)
    first = scanned(reader)
    write(recorder, range(3, 5))

    assert [first, scanned(reader), scanned(reader), scanned(reader)] == [[], [0, 1, 2], [3, 4], []]


def test_a_reader_that_comes_late_counts_what_was_lapped_per_level(recorder: Recorder) -> None:
    """Chunks remember what they held: the count is exact without having been there."""
    for seq in range(5000):
        recorder.span(0, 1 + seq % 4, 1, 2, seq=seq)
    reader = RingReader(ring(recorder).buffer)
    read = [record[13] >> 4 for record in records_of(reader, final=True)]

    assert [read.count(level) + reader.lapped[level] for level in (1, 2, 3, 4)] == [1250] * 4
    assert len(read) == 15 * 63 + 5000 % 63


def test_laps_are_counted_exactly_also_while_reading_and_by_the_next_reader(recorder: Recorder) -> None:
    """Two readers, the second with the first one's state: every record is read once or counted once."""
    write(recorder, range(1))
    chance = random.Random(5)
    reader = RingReader(ring(recorder).buffer)
    seen: list[int] = []
    lapped, written = 0, 1
    for _ in range(60):
        more = chance.randrange(900)
        write(recorder, range(written, written + more))
        written += more
        seen += scanned(reader)
        if chance.random() < 0.2:
            lapped += reader.lapped[3]
            reader = RingReader(ring(recorder).buffer, reader.taken)
    seen += scanned(reader, final=True)

    assert len(seen) == len(set(seen))
    assert len(seen) + lapped + reader.lapped[3] == written


@pytest.mark.parametrize("keepers", [1, 40])
def test_chunks_that_threads_keep_hide_nothing_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keepers: int
) -> None:
    """The writer leases around them, lap after lap; the reader, who looks where the writer was last, follows."""
    monkeypatch.setattr(sys, "abiflags", "t")  # else no thread has one of its own
    recorder = Recorder(tmp_path, 65 * CHUNK, level=4)
    all_keep, go = threading.Barrier(keepers + 1), threading.Event()

    def keep() -> None:
        write(recorder, range(1_000_000, 1_000_063))  # exactly full: the next record would give it back
        all_keep.wait()
        go.wait()

    write(recorder, range(100))
    threads = [threading.Thread(target=keep) for _ in range(keepers)]
    for thread in threads:
        thread.start()
    all_keep.wait()
    reader = RingReader(ring(recorder).buffer)
    seen: list[int] = []
    for begin in range(100, 5100, 100):
        write(recorder, range(begin, begin + 100))
        seen += scanned(reader) + scanned(reader, again=True) + scanned(reader, again=True)
    before_the_end = len(seen)
    go.set()
    for thread in threads:
        thread.join()
    seen += scanned(reader, final=True)

    assert sorted(seen) == sorted([*range(5100), *[*range(1_000_000, 1_000_063)] * keepers])
    assert before_the_end > len(seen) - 200
    assert reader.lapped == [0, 0, 0, 0, 0]


@pytest.mark.parametrize(("burst", "more"), [(824, 520), (1010, 60)])
def test_a_burst_that_goes_round_hides_nothing_behind_it(tmp_path: Path, burst: int, more: int) -> None:
    """Most of the ring at once, from its middle: the reader goes on where the writer is, and not a lap ahead of it."""
    recorder = Recorder(tmp_path, 4 << 20, level=4)
    write(recorder, range(300 * RECORDS))
    reader = RingReader(ring(recorder).buffer)
    seen: list[int] = []
    written = 300
    for chunks in (0, burst, more, 10):
        write(recorder, range(written * RECORDS, (written + chunks) * RECORDS))
        written += chunks
        seen += scanned(reader) + scanned(reader, again=True) + scanned(reader, again=True)

    assert sorted(seen) == [*range(written * RECORDS)]
    assert reader.lapped == [0, 0, 0, 0, 0]


def test_after_a_lap_the_reader_goes_on_where_the_writer_is(tmp_path: Path) -> None:
    """Not where it was a lap ago: what lies before that would come when what was written after it had come."""
    recorder = Recorder(tmp_path, 1 << 18, level=4)
    write(recorder, range(40 * RECORDS))
    reader = RingReader(ring(recorder).buffer)
    scanned(reader)
    write(recorder, range(40 * RECORDS, 140 * RECORDS))
    scanned(reader)
    scanned(reader, again=True)
    write(recorder, range(140 * RECORDS, 180 * RECORDS))
    scanned(reader)
    last = scanned(reader, again=True)

    assert set(range(140 * RECORDS, 180 * RECORDS)) <= set(last)


def test_a_reader_given_what_was_taken_delivers_no_record_twice(recorder: Recorder) -> None:
    """A drain that is killed and replaced goes on where the stored state ends."""
    write(recorder, range(100))
    first = RingReader(ring(recorder).buffer)
    before = scanned(first, final=True)
    write(recorder, range(100, 130))

    assert scanned(RingReader(ring(recorder).buffer, first.taken), final=True) == list(range(100, 130))
    assert before == list(range(100))


def test_a_reader_given_what_was_taken_sees_open_chunks_together_with_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a BEGIN in the one could come long after its SPAN in the other."""
    monkeypatch.setattr(sys, "abiflags", "t")  # else there is one open chunk
    recorder = Recorder(tmp_path, SMALLEST, level=4)
    write(recorder, range(30))
    first = RingReader(ring(recorder).buffer)
    assert scanned(first) + scanned(first, again=True) == list(range(30))
    in_another_chunk = threading.Thread(target=write, args=(recorder, range(1000, 1063)))
    in_another_chunk.start()
    in_another_chunk.join()
    write(recorder, range(30, 40))
    second = RingReader(ring(recorder).buffer, first.taken)

    assert scanned(second) == []
    assert sorted(scanned(second, again=True)) == [*range(30, 40), *range(1000, 1063)]


def test_records_come_as_they_were_written_where_the_ring_goes_round(recorder: Recorder) -> None:
    """A stage is written with every piece of it: the last one counts, also if it is in the ring's first chunk."""
    write(recorder, range(1))
    reader = RingReader(ring(recorder).buffer)
    before = reader.records - 3 * RECORDS
    write(recorder, range(1, before))
    scanned(reader)
    scanned(reader)
    write(recorder, range(before, before + 6 * RECORDS))
    scanned(reader)

    assert scanned(reader) == list(range(before, before + 6 * RECORDS))


def test_the_lease_goes_round_at_32_bits(recorder: Recorder) -> None:
    """Lease 0 means 'never leased', so the counter skips it; nothing is lost or comes twice."""
    write(recorder, range(1))
    ring(recorder)._leases = itertools.count((1 << 32) - 2)
    write(recorder, range(1, 400))

    assert sorted(scanned(RingReader(ring(recorder).buffer), final=True)) == list(range(400))
    leases = [
        int.from_bytes(ring(recorder).buffer[at : at + 4], "little") for at in range(PAGE, PAGE + 7 * CHUNK, CHUNK)
    ]
    assert leases == [1, (1 << 32) - 2, (1 << 32) - 1, 1, 2, 3, 4]


def test_a_count_of_laps_goes_round_at_32_bits(recorder: Recorder) -> None:
    """Four billion records in one chunk later the difference is still right."""
    write(recorder, range(16 * 63))
    buffer = ring(recorder).buffer
    buffer[PAGE + 24 : PAGE + 28] = b"\xff" * 4  # chunk 0, level 3: as if so many had been there before
    first = RingReader(buffer)
    records_of(first, final=True)
    write(recorder, range(16 * 63, 3 * 16 * 63))
    second = RingReader(buffer, first.taken)
    records_of(second, final=True)

    assert second.lapped == [0, 0, 0, 16 * 63, 0]


def test_a_hole_is_not_the_end(recorder: Recorder) -> None:
    """A slot that was never finished, as a kill leaves it, hides nothing that follows."""
    write(recorder, range(10))
    ring(recorder).buffer[PAGE + 64 * 4 + 60 : PAGE + 64 * 4 + 64] = bytes(4)

    assert scanned(RingReader(ring(recorder).buffer), final=True) == [0, 1, 2, 4, 5, 6, 7, 8, 9]


def test_a_writer_killed_while_it_leases_leaves_the_rest_readable_and_the_lost_counted(recorder: Recorder) -> None:
    """Between the two writes of the lease the chunk belongs to nobody."""
    write(recorder, range(16 * 63 + 1))  # chunk 0 is leased for the second time
    ring(recorder).buffer[PAGE : PAGE + 4] = bytes(4)
    reader = RingReader(ring(recorder).buffer)

    assert scanned(reader, final=True) == list(range(63, 16 * 63))
    assert reader.lapped == [0, 0, 0, 63, 0]


def test_the_ring_is_alive_while_its_writer_is_and_no_longer(tmp_path: Path) -> None:
    """The lock goes with the process, however it ends."""
    program = f"""
from collections.abc import Callable
from pathlib import Path
from otel_dltrace.record.ring import RingWriter
ring = RingWriter(Path({str(tmp_path)!r}))
print(ring.path, flush=True)
input()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program], env=environment(), stdin=pipe, stdout=pipe) as writer:
        assert writer.stdout is not None
        fd = os.open(writer.stdout.readline().decode().strip(), os.O_RDONLY)
        alive = writer_is_alive(fd), writer_is_alive(fd)
        writer.kill()
        writer.wait()
        assert (*alive, writer_is_alive(fd)) == (True, True, False)
        os.close(fd)


def test_page_0_is_the_contract_to_the_byte(recorder: Recorder) -> None:
    """Other readers, other versions: the first page is what they go by."""
    write(recorder, range(1))
    header = RingReader(ring(recorder).buffer).header
    raw = bytes(ring(recorder).buffer[:PAGE])

    assert raw[:20] == b"DLTRING1" + bytes([1, 0, 64, 0]) + (4096).to_bytes(4, "little") + (16).to_bytes(4, "little")
    assert (raw[20:28].hex(), header.pid) == (ring(recorder).path.stem, os.getpid())
    assert raw[HEADER.size :] == bytes(PAGE - HEADER.size)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda _ring: b"", "0 bytes are too short", id="empty"),
        pytest.param(lambda ring: ring[:100], "100 bytes are too short", id="cut in page 0"),
        pytest.param(
            lambda ring: ring[:-1], "69631 bytes are not those of 16 chunks, which take 69632", id="cut in a chunk"
        ),
        pytest.param(lambda ring: b"PARQUET1" + ring[8:], "magic b'PARQUET1' is not that of a ring", id="foreign"),
        pytest.param(lambda ring: ring[:8] + b"\2" + ring[9:], "version 2, 64-byte", id="newer version"),
        pytest.param(lambda ring: ring[:16] + b"\xff" * 4 + ring[20:], "4294967295 chunks", id="too many chunks"),
        pytest.param(lambda ring: ring[:16] + bytes(4) + ring[20:], " 0 chunks", id="no chunk"),
    ],
)
def test_what_is_no_ring_is_told(recorder: Recorder, damage: Callable[[bytes], bytes], message: str) -> None:
    """A reader says which file is wrong and how; its bytes are let go of."""
    write(recorder, range(100))
    data = bytearray(damage(bytes(ring(recorder).buffer)))
    with pytest.raises(RingError, match=message):
        RingReader(memoryview(data))
    data.clear()  # raises BufferError while anybody holds on to them


def test_random_bytes_after_the_header_are_holes_or_records_but_never_a_crash(recorder: Recorder) -> None:
    """Whatever is in the chunks, the reader goes through all of it."""
    write(recorder, range(500))
    good = bytes(ring(recorder).buffer)
    chance = random.Random(11)
    for _ in range(50):
        data = bytearray(good)
        for _ in range(chance.randrange(1, 200)):
            at = chance.randrange(PAGE, len(data) - 64)
            data[at : at + 64] = chance.randbytes(64)
        data.extend(chance.randbytes(chance.randrange(3)))
        reader = RingReader(memoryview(data))
        records = records_of(reader) + records_of(reader) + records_of(reader, final=True)
        assert len(records) <= 16 * 63
        reader.close()


def test_a_full_or_unwritable_folder_turns_tracing_off_with_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A file where the folder should be: nothing is recorded, nothing raised, one line told."""
    (tmp_path / "rings").write_text("not a folder")
    recorder = Recorder(tmp_path / "rings", SMALLEST)
    write(recorder, range(1000))

    assert recorder.level == 0
    cure = "set OTEL_DLTRACE_RING_DIR to a folder on a tmpfs; tracing is off"
    said = f"otel_dltrace: no folder for rings at {tmp_path / 'rings'}: File exists; {cure}\n"
    assert capfd.readouterr().err == said


LIMITED = """
import resource, sys
from collections.abc import Callable
from pathlib import Path
from otel_dltrace.record.recorder import Recorder
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), -1))
recorder = Recorder(Path(sys.argv[1]), 4 << 20)
recorder.span(0, 3, 1, 2)
print(recorder.level, [path.suffix for path in Path(sys.argv[1]).iterdir()])
"""


def test_a_ring_that_cannot_be_allocated_is_not_left_behind(tmp_path: Path) -> None:
    """`posix_fallocate` fails at once, where a sparse file would be a SIGBUS in the middle of training."""
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, tmp_path, "100000"],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == f"otel_dltrace: no ring in {tmp_path}: File too large; tracing is off\n"
    assert done.stdout == "0 []\n"


def in_tmpfs(folder: Path, size: str, program: str) -> str:
    """Run *program* where *folder* is a tmpfs of *size*; return what it printed on either stream."""
    script = f'mount -t tmpfs -o size={size} none "$0" && exec "$1" -c "$2" "$0"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script]
    done = subprocess.run(
        [*command, folder, sys.executable, program], env=environment(), capture_output=True, text=True, check=False
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    return done.stdout + done.stderr


ON_TMPFS = """
import sys
from collections.abc import Callable
from pathlib import Path
from otel_dltrace.record.recorder import Recorder
folder = Path(sys.argv[1])
rings = []
for _ in range(int({count})):
    recorder = Recorder(folder, 4 << 20)
    recorder.span(0, 3, 1, 2)
    rings.append(recorder)
print([recorder.ring.path.stat().st_size >> 10 if recorder.ring else 0 for recorder in rings])
"""


@pytest.mark.skipif(not shutil.which("unshare"), reason="unshare is not installed")
@pytest.mark.parametrize(
    ("size", "count", "printed"),
    [
        pytest.param("64m", 3, "[3276, 3112, 2956]\n", id="64 MB as in a container: 5 % of what is free, each"),
        pytest.param(
            "1m",
            1,
            "[0]\notel_dltrace: no room for a ring in {folder}: 1048576 bytes are free, of which a ring takes 5%, "
            "and it needs 69632; give that tmpfs more, or set OTEL_DLTRACE_RING_DIR to a folder on another; "
            "tracing is off\n",
            id="too small",
        ),
    ],
)
def test_a_small_tmpfs_gets_a_small_ring_or_none(tmp_path: Path, size: str, count: int, printed: str) -> None:
    """Eight ranks in a container with 64 MB of /dev/shm must not fill it for the training."""
    assert in_tmpfs(tmp_path, size, ON_TMPFS.format(count=count)) == printed.format(folder=tmp_path)


@pytest.mark.skipif(not shutil.which("unshare"), reason="unshare is not installed")
@pytest.mark.parametrize("asked", ["9999999 << 30", "10**20 - 1"])
def test_a_tmpfs_without_a_limit_gives_a_ring_its_share_of_the_memory(tmp_path: Path, asked: str) -> None:
    """Whatever is asked for: to fill it until there is no room would take the memory that the training needs."""
    of_64_mb = "import os\nos.sysconf = {'SC_PHYS_PAGES': 1 << 14, 'SC_PAGE_SIZE': 1 << 12}.__getitem__\n"
    program = of_64_mb + ON_TMPFS.format(count=1).replace("4 << 20", asked)
    assert in_tmpfs(tmp_path, "0", program) == "[3276]\n"


def test_files_are_private_or_the_group_s_in_a_setgid_folder(tmp_path: Path) -> None:
    """A sidecar of another user reads through the group of a setgid folder, and nobody else does."""
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2770)
    for folder, mode in ((tmp_path / "own", 0o600), (shared, 0o640)):
        recorder = Recorder(folder, SMALLEST)
        write(recorder, range(1))
        assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {mode}
        assert sorted(path.suffix for path in folder.iterdir()) == [".names", ".ring"]
    assert (tmp_path / "own").stat().st_mode & 0o777 == 0o700


def test_a_slot_that_could_not_be_packed_is_cleared_unless_it_is_another_s_by_now(tmp_path: Path) -> None:
    """The ring may have lapped in between, and the slot hold a record of another thread."""
    ring = RingWriter(tmp_path, SMALLEST)
    slots, lease, index = ring.lease(1)
    offset = next(slots)
    slot, half = slice(offset, offset + 64), bytes(range(64))
    ring.buffer[slot] = half
    assert ring.spoil(offset, lease)
    assert ring.buffer[slot] == bytes(64)

    for _ in range(ring.chunks):
        ring.release(index)
        _, _, index = ring.lease(1)
    ring.buffer[slot] = half
    assert not ring.spoil(offset, lease)
    assert ring.buffer[slot] == half
    ring.close()


def test_a_live_reader_beside_a_busy_writer_sees_every_record_right_and_once(tmp_path: Path) -> None:
    """Threads, dying threads, a signal handler and garbage collections write; the ring laps; the sum is exact."""
    program = PROGRAMS / "ring_writer.py"
    command = [sys.executable, str(program), "busy", str(tmp_path), "1.5", str(1 << 18)]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        path = Path(writer.stdout.readline().strip())
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as buffer:
            reader = RingReader(buffer)
            records: list[bytes] = []
            while writer_is_alive(file.fileno()):
                records += records_of(reader)
            records += records_of(reader, final=True)
            lapped = sum(reader.lapped)
            reader.close()
        written = json.loads(writer.stdout.readline())
    read = Read([fields(record) for record in records], lapped, 0, 0, read_file(path).names)

    assert [(lane, len(seqs) - len(set(seqs)), seqs[-1] < written[lane]) for lane, seqs in by_lane(read).items()] == [
        (lane, 0, True) for lane in range(7)
    ]
    assert len(records) + lapped == sum(written)

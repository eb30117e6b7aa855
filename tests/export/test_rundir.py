"""The run directory: readable whatever state its writers left it in, each span once, within its quota."""

import errno
import json
import os
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from otel_dltrace.export import follower, member
from otel_dltrace.export.drain import Drain
from otel_dltrace.export.follower import Follower
from otel_dltrace.export.rings.source import RingSource
from otel_dltrace.export.run_folders import RunFolders
from otel_dltrace.export.rundir import columns, span_tables
from otel_dltrace.export.rundir import writer as rundir
from otel_dltrace.export.rundir.compaction import compact, keep_within
from otel_dltrace.export.rundir.drain_json import read_drain
from otel_dltrace.export.rundir.earlier_runs import bytes_in
from otel_dltrace.export.rundir.host_folder import run_root
from otel_dltrace.export.rundir.reader import read_batches, read_run, read_summaries
from otel_dltrace.export.rundir.span_files import last_step, span_files
from otel_dltrace.export.rundir.stream import pieces_of
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.export.serving import Serving
from otel_dltrace.model.errors import RunNotFoundError, TraceFormatError
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.operation import OTHER, RANK_STEP, Descriptor
from otel_dltrace.model.semconv import PHASE, Level
from otel_dltrace.model.spans import Process, empty_rows
from tests.support import servers
from tests.support.processes import Place, abandon
from tests.support.run_files import DESCRIPTORS, ERRORS, a_process, a_writer, comparable, read_back, rows_of


def write_segments(writer: RunWriter, process: Process, segments: int, steps: int = 10) -> np.ndarray:
    """Write *segments* segments of *steps* steps, each in two batches; return all rows."""
    written = []
    for n in range(segments):
        for half in (range(n * steps, n * steps + steps // 2), range(n * steps + steps // 2, (n + 1) * steps)):
            written.append(rows_of(process, half))
            writer.append(process.nonce, written[-1], DESCRIPTORS, ERRORS)
        writer.close_segment()
    return np.concatenate(written)


def test_what_is_written_is_read(tmp_path):
    """Rows, errors, descriptors and who wrote them."""
    process = a_process()
    writer = a_writer(tmp_path / "run", process)
    rows = write_segments(writer, process, 2)
    writer.close()

    (batch,) = read_run(tmp_path / "run")
    assert comparable(batch.rows, batch.errors) == comparable(rows, ERRORS)
    assert list(batch.descriptors) == DESCRIPTORS
    assert batch.process == process


def test_a_segment_torn_at_any_byte_is_read_as_far_as_it_goes(tmp_path):
    """Whole batches only, in order, never an error."""
    process = a_process()
    writer = a_writer(tmp_path / "run", process)
    ends, batches = [], []
    for step in range(3):
        batches.append(rows_of(process, range(step, step + 1)))
        writer.append(process.nonce, batches[-1], DESCRIPTORS, ERRORS)
        ends.append(next(writer.folder.glob("spans-*")).stat().st_size)
    writer.close()
    (segment,) = writer.folder.glob("spans-*")
    data = segment.read_bytes()

    for length in range(len(data) + 1):
        segment.write_bytes(data[:length])
        table = span_tables.read_table(segment)
        whole = sum(length >= end for end in ends)
        assert (0 if table is None else table.num_rows) == 4 * whole, length


def test_a_torn_descriptor_table_costs_names_not_spans(tmp_path):
    """The next drain copies the good part and goes on; the spans are all there."""
    process = a_process()
    writer = a_writer(tmp_path / "run", process)
    rows = write_segments(writer, process, 1)
    table = writer.folder / "descriptors.arrows"
    data = table.read_bytes()
    for length in range(0, len(data), 7):
        table.write_bytes(data[:length])
        assert read_back(tmp_path / "run") == comparable(rows, ERRORS)

    later = a_writer(tmp_path / "run", process)
    later.append(process.nonce, empty_rows(), DESCRIPTORS, ERRORS)
    later.close()
    (batch,) = read_run(tmp_path / "run")
    assert list(batch.descriptors) == DESCRIPTORS


# -- compaction --------------------------------------------------------------------------------


def test_parquet_replaces_segments_and_other_programs_can_read_it(tmp_path):
    """Who, what and when, without our tables."""
    process = a_process(rank=1)
    writer = a_writer(tmp_path / "run", process)
    rows = write_segments(writer, process, 2)

    assert compact(writer.folder, writer.number) == 2

    (parquet,) = span_files(writer.folder)
    assert parquet.name == "steps-00000000-00000019.parquet"
    assert read_back(tmp_path / "run") == comparable(rows, ERRORS)
    table = pq.read_table(parquet).sort_by("span_no")
    assert table.column("rank").to_pylist() == [1] * 80
    assert table.column("role").to_pylist() == ["worker"] * 80
    assert table.column("name").to_pylist() == ["rank.step", "all_reduce", "PUSH", "PUSH"] * 20
    assert table.column("tensor").to_pylist() == ["", "bucket 0", "w", "w"] * 20
    assert table.column("group_size").to_pylist() == [0, 2, 0, 0] * 20
    assert table.column("key").to_pylist() == [-1, -1, 3, 3] * 20
    assert table.column("start_unix_ns").to_pylist() == (rows["start"] + process.anchor.offset).tolist()


def test_pandas_reads_a_compacted_run(tmp_path):
    """A group by name needs no table of ours."""
    pandas = pytest.importorskip("pandas")
    process = a_process()
    writer = a_writer(tmp_path / "run", process)
    write_segments(writer, process, 2)
    compact(writer.folder, writer.number)

    frame = pandas.read_parquet(span_files(writer.folder)[0])
    assert frame.groupby("name", observed=True).size().to_dict() == {"PUSH": 40, "all_reduce": 20, "rank.step": 20}


def test_several_processes_keep_their_own_names_when_compacted(tmp_path):
    """A descriptor's number means another thing in each process; one that nobody knows is `other`."""
    one, other = a_process(0), a_process(1)
    writer = a_writer(tmp_path / "run", one, other)
    for process, table in ((one, DESCRIPTORS), (other, [OTHER, RANK_STEP, Descriptor(PHASE, "mine")])):
        writer.append(process.nonce, rows_of(process, range(1)), table, ERRORS)
    stranger = Process(99, None)
    writer.append(99, rows_of(stranger, range(1)), [OTHER], ERRORS)
    writer.close_segment()
    compact(writer.folder, writer.number)

    table = pq.read_table(span_files(writer.folder)[0]).sort_by([("process", "ascending"), ("span_no", "ascending")])
    assert table.column("name").to_pylist() == [
        *("rank.step", "all_reduce", "PUSH", "PUSH"),
        *("rank.step", "mine", "other", "other"),
        *["other"] * 4,
    ]
    assert table.column("rank").to_pylist() == [0] * 4 + [1] * 4 + [None] * 4


@pytest.mark.parametrize("when", ["half written", "written", "half removed"])
def test_a_drain_killed_while_it_compacts_shows_nothing_twice(tmp_path, when):
    """A Parquet file names the segments that it replaces; the next compaction finishes the work."""
    process = a_process()
    writer = a_writer(tmp_path / "run", process)
    rows = write_segments(writer, process, 3)
    kept = tmp_path / "kept"
    shutil.copytree(writer.folder, kept)
    compact(writer.folder, writer.number)
    (parquet,) = writer.folder.glob("*.parquet")
    if when == "half written":
        (writer.folder / f".{parquet.name}.4711").write_bytes(parquet.read_bytes()[:1000])
        parquet.unlink()
    for segment in sorted(kept.glob("spans-*"))[0 if when != "half removed" else 2 :]:
        shutil.copy(segment, writer.folder)

    assert read_back(tmp_path / "run") == comparable(rows, ERRORS)
    compact(writer.folder, writer.number)
    assert read_back(tmp_path / "run") == comparable(rows, ERRORS)
    assert not list(writer.folder.glob("spans-*"))
    assert not list(writer.folder.glob(".steps-*"))


@pytest.mark.parametrize("unsure", [stat.S_ISREG, stat.S_ISDIR], ids=["the file", "its name"])
def test_segments_stay_until_no_crash_of_the_host_can_take_what_replaces_them(tmp_path, monkeypatch, unsure):
    """Here the disk fails to say so; the next compaction does the work, and meanwhile each span is shown once."""
    process, fsync = a_process(), os.fsync
    writer = a_writer(tmp_path / "run", process)
    rows = write_segments(writer, process, 2)

    def fail(descriptor: int) -> None:
        if unsure(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    with monkeypatch.context() as now:
        now.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match="Input/output error"):
            compact(writer.folder, writer.number)
    left = sorted(path.name for path in writer.folder.glob("spans-*"))
    assert (left, read_back(tmp_path / "run")) == (
        ["spans-00001.arrows", "spans-00002.arrows"],
        comparable(rows, ERRORS),
    )
    compact(writer.folder, writer.number)
    assert read_back(tmp_path / "run") == comparable(rows, ERRORS)
    assert not list(writer.folder.glob("spans-*"))


@pytest.mark.parametrize("read", [read_batches, lambda run: (b for one in pieces_of([run], None) for b in one)])
def test_who_reads_while_a_drain_compacts_sees_each_span_once(tmp_path, read):
    """The segments that were there when it began are, until it is done."""
    process = a_process()
    writer = a_writer(tmp_path / "run", process)
    rows = write_segments(writer, process, 3)

    reading = read(tmp_path / "run")
    first = next(reading)
    assert compact(writer.folder, writer.number) == 3
    assert sorted(np.concatenate([b["span_no"] for b in (first, *reading)])) == rows["span_no"].tolist()


def test_late_spans_of_compacted_steps_get_a_file_of_their_own(tmp_path):
    """Also those outside any step, which no file name speaks of."""
    process = a_process()
    writer = a_writer(tmp_path / "run", process)
    write_segments(writer, process, 1)
    compact(writer.folder, writer.number)
    late = rows_of(process, range(100, 110))
    late["step"] = np.repeat([0, 9, NO_STEP, NO_STEP, 3], 8)
    writer.append(process.nonce, late, DESCRIPTORS, ERRORS)
    writer.close_segment()
    compact(writer.folder, writer.number)

    names = [path.name for path in span_files(writer.folder)]
    assert names == ["steps-00000000-00000009.1.parquet", "steps-00000000-00000009.parquet"]
    assert [last_step(path) for path in span_files(writer.folder)] == [9, 9]
    assert len(read_back(tmp_path / "run")) == 80


def test_the_quota_takes_the_oldest_phases_first_then_operations(tmp_path, monkeypatch):
    """Steps and stages stay whatever it says; a file that has nothing more to give is not read again."""
    process = a_process()
    writer = a_writer(tmp_path / "run", process)
    for n in range(3):
        writer.append(process.nonce, rows_of(process, range(n * 2000, (n + 1) * 2000)), DESCRIPTORS, ERRORS)
        writer.close_segment()
        compact(writer.folder, writer.number)
    size = sum(path.stat().st_size for path in span_files(writer.folder))

    def left() -> list[int]:
        (batch,) = read_run(tmp_path / "run")
        return [int((batch["level"] == level).sum()) for level in (Level.STEP, Level.COLLECTIVE, Level.PHASE)]

    assert [*keep_within(writer.folder, size)] == []
    assert sum(keep_within(writer.folder, size - 1)) == 4000
    (batch,) = read_run(tmp_path / "run")
    assert batch["step"][batch["level"] == Level.PHASE].min() == 2000
    assert left() == [6000, 6000, 8000]
    assert sum(keep_within(writer.folder, 0)) == 8000 + 6000
    assert left() == [6000, 0, 0]
    monkeypatch.setattr(pq.ParquetFile, "read", None)
    assert sum(keep_within(writer.folder, 0)) == 0


def test_a_restarted_job_has_one_quota(tmp_path):
    """Its earlier runs give their detail first, and count it; another job's run beside them gives nothing."""

    def run(folders: RunFolders, job: str, generation: str) -> RunWriter:
        process = replace(a_process(), bind=Bind(job, generation, "demo"))
        root = run_root(tmp_path, process.bind, process.nonce)
        writer = folders.open(root, process.bind, process, {})
        writer.append(process.nonce, rows_of(process, range(4000)), DESCRIPTORS, ERRORS)
        folders.finish([root])
        folders.close([root])
        folders.forget(root)
        return writer

    other = run(RunFolders(5 << 30, lambda _root: {}), "other", "1.00")
    folders = RunFolders(5 * bytes_in(other.folder) // 2, lambda _root: {})  # two, and what steps and stages take
    runs = [run(folders, "job", f"{n}.00") for n in range(1, 4)]
    counted = [read_drain(one.folder)["summary"].get("dropped_by_quota", 0) for one in (other, *runs)]
    phases = [int((read_run(one.root)[0]["level"] == Level.PHASE).sum()) for one in (other, *runs)]
    assert (counted, phases) == ([0, 12_000, 0, 0], [8000, 0, 8000, 8000])


# -- who writes, who reads ---------------------------------------------------------------------


def test_a_newer_schema_is_refused_with_a_sentence(tmp_path):
    """Nobody guesses what it means."""
    writer = a_writer(tmp_path / "run", a_process())
    writer.close()
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["schema"] == columns.SCHEMA_VERSION
    (tmp_path / "run" / "run.json").write_text(json.dumps({**info, "schema": columns.SCHEMA_VERSION + 1}))

    with pytest.raises(TraceFormatError, match="newer than this version reads; upgrade otel-dltrace"):
        read_run(tmp_path / "run")


def test_what_is_no_run_directory_is_said_so(tmp_path):
    """The name, and what was expected."""
    with pytest.raises(RunNotFoundError, match="is not a run directory"):
        read_run(tmp_path)


def test_each_host_has_a_folder_and_all_are_read(tmp_path):
    """A host that joins late changes nothing of what is there."""
    root = tmp_path / "run"
    first = a_writer(root, a_process(0))
    write_segments(first, a_process(0), 1)
    first.write_summary({"spans": 40}, ended=True)
    first.close()
    said = (root / "run.json").read_bytes()
    late = a_writer(root, a_process(1, "node-1"))
    write_segments(late, a_process(1, "node-1"), 1)
    late.close()

    assert [(b.rank, b.process.host, len(b)) for b in read_run(root)] == [(0, "node-0", 40), (1, "node-1", 40)]
    assert (root / "run.json").read_bytes() == said
    assert [summary["ended"] for summary in read_summaries(root)] == [True, False]


LOCK = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_folder_that_cannot_be_made_is_made_later(tmp_path):
    """The host's own is another drain's: no descriptor of it is kept, and the next one keeps its name."""
    process = a_process()
    writer = RunWriter(tmp_path / "run", "node-0")
    next_folder = writer.folder.with_name("node-0-2")
    writer.folder.mkdir(parents=True)
    next_folder.write_text("no folder")
    command, pipe = [sys.executable, "-c", LOCK, str(writer.folder / ".lock")], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe) as other:
        other.stdout.readline()
        with pytest.raises(FileExistsError):
            writer.append(process.nonce, rows_of(process, range(5)), DESCRIPTORS, ERRORS)
        somebodys = os.open(tmp_path, os.O_RDONLY)
        next_folder.unlink()
        for _ in range(2):
            writer.append(process.nonce, rows_of(process, range(5)), DESCRIPTORS, ERRORS)
            written = sorted(path.parent.name for path in writer.root.glob("hosts/*/spans-*"))
            shutil.rmtree(writer.folder)
            assert (written, writer.folder) == (["node-0-2"], next_folder)
        writer.close()
        other.stdin.close()

    os.close(somebodys)  # which fails if it was closed instead


def test_the_next_drain_of_a_host_adds_to_its_summary(tmp_path):
    """Counts add up, also of what was sent; what waits is what waits now; processes are all named."""
    root = tmp_path / "run"
    for rank in range(2):
        writer = a_writer(root, a_process(rank))
        otlp = {"accepted": 5, "spilled": 5 - 5 * rank, "dropped": {"refused": 1}, "url": f"http://{rank}"}
        writer.write_summary({"spans": 10, "otlp": otlp}, ended=True)
        writer.close()

    (summary,) = read_summaries(root)
    otlp = {"accepted": 10, "spilled": 0, "dropped": {"refused": 2}, "url": "http://1"}
    assert summary["summary"] == {"spans": 20, "otlp": otlp}
    assert [process["bind"]["rank"] for process in summary["processes"]] == [0, 1]


def test_rows_that_found_no_room_do_not_hide_what_comes_later(tmp_path, monkeypatch):
    """A batch that was cut off ends its segment; the next one goes to another."""
    process = a_process()
    writer = a_writer(tmp_path / "run", process)
    rows = rows_of(process, range(10))
    writer.append(process.nonce, rows[:20], DESCRIPTORS, ERRORS)

    def half(*_: object) -> None:
        writer._sink.write(b"half a batch")
        with Path("/dev/full").open("wb", 0) as full:
            full.write(b"x")

    with monkeypatch.context() as now:
        now.setattr(columns, "to_arrow", half)
        with pytest.raises(OSError, match="No space"):
            writer.append(process.nonce, rows[20:], DESCRIPTORS, ERRORS)
    writer.append(process.nonce, rows[20:], DESCRIPTORS, ERRORS)
    writer.close()

    assert read_back(tmp_path / "run") == comparable(rows, ERRORS)


def test_a_writer_that_found_no_room_counts_itself_once(tmp_path, monkeypatch):
    """It opens its folder anew, and its own summary there is no earlier drain's."""
    process = a_process()
    writer = a_writer(tmp_path / "run", process)
    writer.write_summary({"spans": 20})
    with monkeypatch.context() as now:
        now.setattr(columns, "to_arrow", lambda *_: Path("/dev/full").write_bytes(b"x"))
        with pytest.raises(OSError, match="No space"):
            writer.append(process.nonce, rows_of(process, range(5)), DESCRIPTORS, ERRORS)
    writer.append(process.nonce, rows_of(process, range(5)), DESCRIPTORS, ERRORS)
    writer.write_summary({"spans": 40}, ended=True)
    writer.close()

    (summary,) = read_summaries(tmp_path / "run")
    assert summary["summary"] == {"spans": 40}


def test_a_ring_that_ends_has_its_own_runs_figures_written_alone(tmp_path):
    """Else a sweep of a thousand runs on one drain writes a million files."""
    folders, process = RunFolders(0, lambda _: {}), a_process()
    roots = [tmp_path / "first", tmp_path / "second"]
    for root in roots:
        folders.open(root, process.bind, process, {})
        folders.add(root, spans=4)
    folders.write_summaries(ended=False, roots=roots[1:])
    told = [summary["summary"] for root in roots for summary in read_summaries(root)]
    folders.close(roots)

    assert told == [{}, {"spans": 4}]


# -- before the bind, and after another ----------------------------------------------------------

LATE = """
    import os, sys, time
    import otel_dltrace as d
    from otel_dltrace.model.identity import Bind
    from otel_dltrace.record.tracer import live

    def wait_for(name):
        while not os.path.exists(name):
            time.sleep(0.005)

    def spans(first, last):
        for i in range(first, last):
            with d.step(i):
                with d.phase("work", size=i):
                    pass

    d.start()
    spans(0, 10)
    print("ready", flush=True)
    wait_for("bind")
    live.tracer.recorder.bind(Bind("job", "1.00", "demo", rank=0, world_size=2))
    spans(10, 20)
    print("bound", flush=True)
    wait_for("again")
    live.tracer.recorder.bind(Bind("job", "2.00", "demo", rank=0, world_size=2))
    spans(20, 30)
"""
LATE_ENV = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "OTEL_DLTRACE_DRAIN": "off"}


def ticks(drain: Drain, count: int = 4) -> None:
    """Let *drain* look as often as it takes to see, take, and let go of everything."""
    for _ in range(count):
        drain.hurry = True  # else rows are made every few seconds
        drain.tick()


def sizes(run: Path) -> list[int]:
    """Return the numbers that the spans called work carry, sorted."""
    (batch,) = read_run(run)
    return sorted(batch["size"][batch.lookup(lambda d: d.name == "work", bool)].tolist())


def test_who_asks_for_everything_has_unbound_rows_written_too(place):
    """A program that has no name before its end would else be told that nothing is read, whenever it flushes."""
    process = place.start(LATE, **LATE_ENV)
    assert process.stdout.readline() == "ready\n"
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    ticks(drain, 1)
    (partial,) = place.folder.glob(".dltrace-*.partial")
    cursors = [*place.rings.glob("*.cursor")]
    abandon(drain)

    assert sizes(partial) == list(range(10))
    assert len(cursors) == 1


@pytest.mark.parametrize("killed", [False, True], ids=["one drain", "killed in between"])
def test_unbound_rows_wait_in_a_partial_directory_and_come_back_once(place, monkeypatch, killed):
    """Bound again, as after an elastic restart in the same process, the rows that follow go to another directory."""
    monkeypatch.setattr(follower, "KEEP_S", 0.0)
    process = place.start(LATE, **LATE_ENV)
    assert process.stdout.readline() == "ready\n"
    serving = Serving(place.rings, place.folder, linger=0.0)
    drain = Drain(serving)
    ticks(drain)
    (partial,) = place.folder.glob(".dltrace-*.partial")
    assert sizes(partial) == list(range(10))
    assert place.runs() == []
    if killed:  # after the rows were written, before the cursor was
        for cursor in place.rings.glob("*.cursor"):
            cursor.unlink()
        abandon(drain)
        drain = Drain(serving)

    (place.folder / "bind").touch()
    assert process.stdout.readline() == "bound\n"
    ticks(drain)
    assert list(place.folder.glob(".dltrace-*")) == []
    if killed:
        abandon(drain)
        drain = Drain(serving)
    (place.folder / "again").touch()
    process.communicate(timeout=240)
    drain.run()

    first, second = sorted(place.runs(), key=lambda run: read_run(run)[0].process.bind.generation)
    # The second bind holds from the step that is current then; what was there of it has been written.
    assert (sizes(first), sizes(second)) == (list(range(20)), list(range(20, 30)))
    for run in (first, second):
        (batch,) = read_run(run)
        assert len(np.unique(batch["span_id"])) == len(batch)
    assert list(place.rings.glob("*.ring")) == []
    assert sum(summary["summary"]["spans"] for run in place.runs() for summary in read_summaries(run)) == 60


NAMELESS = """
    import sys
    import otel_dltrace as d
    d.start()
    for turn, _ in enumerate(sys.stdin):
        for i in range(2000):
            with d.phase("work", size=2000 * turn + i):
                pass
        print("written", flush=True)
"""


def nameless(place: Place, drain: Drain, turns: int) -> Path:
    """Have a process write 2,000 spans before each of *turns* of *drain*, and end; return where they wait."""
    pipe, env = subprocess.PIPE, place.env(**LATE_ENV)
    command = [sys.executable, str(place.write(NAMELESS))]
    process = subprocess.Popen(command, cwd=place.folder, env=env, stdin=pipe, stdout=pipe, text=True)
    place.children.append(process)
    for _ in range(turns):
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "written\n"
        ticks(drain, 1)
    process.communicate(timeout=240)
    (partial,) = place.folder.glob(".dltrace-*.partial")
    return partial


def test_what_waits_for_a_name_is_within_the_quota(place, monkeypatch):
    """The oldest went, and are counted: a process may have its name at its end alone, after days."""
    monkeypatch.setattr(rundir, "SEGMENT_BYTES", 1)  # one for each turn
    drain = Drain(Serving(place.rings, place.folder, linger=0.0, quota=200_000))
    partial = nameless(place, drain, 20)
    size = sum(path.stat().st_size for path in partial.glob("hosts/*/s*"))
    drain.run()

    (run,) = place.runs()
    (told,) = read_summaries(run)
    kept = sizes(run)
    assert size <= 200_000  # of four million
    assert (len(kept) + told["summary"]["dropped_by_quota"], kept[-1]) == (40_000, 39_999)
    assert kept == list(range(kept[0], 40_000))


@pytest.mark.parametrize("killed", ["", "behind the cursor", "before the cursor"])
def test_what_waited_for_a_name_comes_back_file_by_file(place, monkeypatch, killed):
    """All of it may be more than there is memory; a drain that is killed meanwhile doubles and loses nothing."""
    monkeypatch.setattr(rundir, "SEGMENT_BYTES", 1)
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    partial = nameless(place, drain, 8)
    left = []
    for _ in range(2):
        before = {path: path.read_bytes() for path in place.rings.glob("*.cursor")}
        drain.tick()
        left.append(len(span_files(next(partial.glob("hosts/*")))))
        if killed:
            abandon(drain)
            for path, cursor in before.items() if killed == "before the cursor" else ():
                path.write_bytes(cursor)
            drain = Drain(drain.serving)
    drain.run()

    (run,) = place.runs()
    assert left == [3, 2]
    assert sizes(run) == list(range(16_000))
    assert [summary["summary"]["spans"] for summary in read_summaries(run)] == [16_000]
    assert list(place.folder.glob(".dltrace-*")) + list(place.rings.glob("*.ring")) == []


def test_a_file_that_waited_for_a_name_and_is_damaged_is_put_aside(place, monkeypatch, capfd):
    """What else waited comes back, and nobody removes what might be mended."""
    monkeypatch.setattr(rundir, "SEGMENT_BYTES", 1)
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    partial = nameless(place, drain, 8)
    damaged = min(partial.glob("hosts/*/*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    drain.run()

    (aside,) = partial.glob("hosts/*/*.damaged")
    assert (aside.stem, f"{aside} is damaged" in capfd.readouterr().err) == (damaged.name, True)
    (run,) = place.runs()
    lost = sorted({*range(16_000)} - {*(kept := sizes(run))})
    assert (len(kept), lost) == (12_000, list(range(lost[0], lost[0] + 4000)))  # a file is of two segments


def test_a_drain_ends_where_what_waited_for_a_name_finds_no_room(place, monkeypatch, capfd):
    """The writer is gone, and the disk is full for good: ring and spans stay where they are, for `recover`."""
    drain = Drain(Serving(place.rings, place.folder, linger=0.0))
    partial = nameless(place, drain, 3)
    with monkeypatch.context() as now:
        now.setattr(RunWriter, "_append", no_room)
        drain.run()
    assert "cannot be emptied into its run directory" in capfd.readouterr().err
    assert (partial.exists(), len([*place.rings.glob("*.ring")])) == (True, 1)

    Drain(Serving(place.rings, place.folder, linger=0.0)).run()
    assert sizes(*place.runs()) == list(range(6000))


def no_room(*_: object) -> None:
    """Be a disk that is full."""
    raise OSError(errno.ENOSPC, "No space left on device")


class Taker:
    """A way out that has everything at once."""

    def __init__(self) -> None:
        self.sent: set[int] = set()
        self.times: list[int] = []

    def send(self, _batch, outgoing) -> None:
        """Note the steps."""
        self.times += [out.step for out in outgoing]
        self.sent.update(self.times)

    def unsettled(self) -> set:
        """Return nothing."""
        return set()

    def figures(self, _run: Path) -> dict:
        """Return nothing."""
        return {}

    def spill_to(self, *_: Path) -> None:
        """Do nothing."""

    flush = close = spill_to


def test_what_was_sent_of_an_earlier_generation_is_not_sent_again(place, monkeypatch):
    """The drain is killed when all has left, but for the ring: the next one has nothing to send, of no generation."""
    process = place.start(LATE, **LATE_ENV)
    for name in ("bind", "again"):
        (place.folder / name).touch()
    process.communicate(timeout=240)
    first, second = (Drain(Serving(place.rings, place.folder, linger=0.0), Taker()) for _ in range(2))
    monkeypatch.setattr(first, "_let_go", lambda _path: None)
    first.tick()
    abandon(first)
    second.run()

    told = [summary["summary"]["spans"] for run in place.runs() for summary in read_summaries(run)]
    assert (first.outlet.sent, second.outlet.sent) == (set(range(30)), set())
    assert (len(told), sum(told)) == (2, 60)


def test_what_a_drain_had_that_was_killed_while_it_kept_the_quota_is_counted_once(place, monkeypatch):
    """All is Parquet by then, in which rows are sorted, and the ring is still there."""
    process = place.start(LATE.replace("2.00", "1.00"), **LATE_ENV)
    for name in ("bind", "again"):
        (place.folder / name).touch()
    process.communicate(timeout=240)
    first, second = (Drain(Serving(place.rings, place.folder, linger=0.0, quota=1)) for _ in range(2))

    def killed(follower: Follower, **_: object) -> None:
        follower.source.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(first.runs, "count", killed)
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second.run()

    (told,) = read_summaries(place.runs()[0])
    assert told["summary"]["spans"] == 60


def test_a_ring_that_a_killed_drain_had_counted_is_counted_once(place, monkeypatch):
    """It goes last: a program that waits for that reads the figures. Each run that the process was of has its own."""
    process = place.start(LATE, **LATE_ENV)
    for name in ("bind", "again"):
        (place.folder / name).touch()
    process.communicate(timeout=240)
    first, second = (Drain(Serving(place.rings, place.folder, linger=0.0)) for _ in range(2))
    with monkeypatch.context() as killed:
        killed.setattr(RingSource, "remove", interrupted)
        with pytest.raises(KeyboardInterrupt):
            first.run()
    second.run()

    told = [drain["summary"] for run in place.runs() for drain in read_summaries(run)]
    assert sorted((figures["processes"], figures["spans"]) for figures in told) == [(1, 22), (1, 38)]


def interrupted(source: RingSource) -> None:
    """End a drain as a kill does."""
    source.close()
    raise KeyboardInterrupt


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_run_has_is_counted_and_sent_once_where_its_process_says_again_who_it_is(place, killed):
    """As a program of MPI does when it makes torch's process group: its drain has written some spans by then."""
    process = place.start(LATE.replace("2.00", "1.00"), **LATE_ENV)
    drain = Drain(Serving(place.rings, place.folder, linger=0.0), Taker())
    (place.folder / "bind").touch()
    servers.wait_until(lambda: drain.tick() or place.runs(), what="the run directory")
    assert (process.stdout.readline(), process.stdout.readline()) == ("ready\n", "bound\n")
    (place.folder / "again").touch()
    process.communicate(timeout=240)
    if killed:
        abandon(drain)
        drain = Drain(drain.serving, drain.outlet)
    drain.run()

    (run,) = place.runs()
    told = [(summary["summary"]["spans"], summary["summary"]["processes"]) for summary in read_summaries(run)]
    each_and_its_root = sorted([*range(30)] * 2)
    assert (sizes(run), told, sorted(drain.outlet.times)) == (list(range(30)), [(60, 1)], each_and_its_root)


OUTSIDE = """
    import otel_dltrace as d
    from otel_dltrace.model.identity import Bind
    from otel_dltrace.record.tracer import live
    d.start()
    for number in (1, 2, 3):
        live.tracer.recorder.bind(Bind("job", f"{number}.00", "demo"))
        with d.phase("work", size=number):
            pass
"""


def test_what_is_in_no_step_is_of_the_generation_of_its_time(place):
    """Also where the drain reads of several generations at once."""
    result = place.run(OUTSIDE, OTEL_DLTRACE_DRAIN="off")
    assert result.returncode == 0, result.stderr
    assert place.command("recover").returncode == 0
    found = {read_run(run)[0].process.bind.generation: sizes(run) for run in place.runs()}
    assert found == {"1.00": [1], "2.00": [2], "3.00": [3]}


DRIFTING = """
    import os, sys
    import otel_dltrace as d
    from otel_dltrace.record.tracer import live
    d.start()
    extra = 0
    live.tracer.steps.group_seq = lambda: 5 * live.tracer.recorder.step + 1 + extra
    for i in range(10):
        extra = int(sys.argv[1]) if i in (4, 5, 6) else 0
        with d.step(i):
            pass
"""


def test_a_process_that_is_new_to_a_run_is_not_looked_for_in_it(place, monkeypatch):
    """A rank that comes again would else have the drain read all that its run has on this host, while rings wait."""
    read: list[Path] = []
    monkeypatch.setattr(member, "read_table", read.append)
    env = {**LATE_ENV, "OTEL_DLTRACE_RUN": "one", "WORLD_SIZE": "1"}
    for _ in range(2):
        assert place.run(DRIFTING, "0", **env).returncode == 0
        Drain(Serving(place.rings, place.folder, linger=0.0)).run()

    assert read == []
    assert [len(batch) for run in place.runs() for batch in read_run(run)] == [10, 10]


@pytest.mark.parametrize(("apart", "drifted"), [(0, 0), (2, 3)])
def test_the_drain_counts_steps_that_its_ranks_number_differently(place, apart, drifted):
    """A finding in the summary; nothing is merged or left out for it."""
    env = {"WORLD_SIZE": "2", "OTEL_DLTRACE_RUN": "one", "OTEL_DLTRACE_DRAIN": "off"}
    for rank, extra in enumerate((0, apart)):
        result = place.run(DRIFTING, str(extra), RANK=str(rank), LOCAL_RANK=str(rank), **env)
        assert result.returncode == 0, result.stderr
    assert place.command("recover").returncode == 0

    (run,) = place.runs()
    (summary,) = read_summaries(run)
    assert summary["summary"].get("drifted_steps", 0) == drifted
    assert [len(batch) for batch in read_run(run)] == [10, 10]
    servers.wait_until(lambda: not list(place.rings.glob("*.ring")), what="the rings' end")

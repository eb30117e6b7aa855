"""The run directory: readable whatever state its writers left it in, each span once."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from otel_dltrace.export.run_folders import RunFolders
from otel_dltrace.export.rundir import columns, span_tables
from otel_dltrace.export.rundir.reader import read_run, read_summaries
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.model.errors import RunNotFoundError, TraceFormatError
from otel_dltrace.model.spans import empty_rows
from tests.support.run_files import (
    DESCRIPTORS,
    ERRORS,
    a_process,
    a_writer,
    comparable,
    read_back,
    rows_of,
    write_segments,
)


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

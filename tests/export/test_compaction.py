"""Parquet in the place of segments, within the quota: each span once, whenever a drain is killed."""

import errno
import os
import shutil
import stat
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from otel_dltrace.export.run_folders import RunFolders
from otel_dltrace.export.rundir.compaction import compact, keep_within
from otel_dltrace.export.rundir.drain_json import read_drain
from otel_dltrace.export.rundir.earlier_runs import bytes_in
from otel_dltrace.export.rundir.host_folder import run_root
from otel_dltrace.export.rundir.reader import read_batches, read_run
from otel_dltrace.export.rundir.span_files import last_step, span_files
from otel_dltrace.export.rundir.stream import pieces_of
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.operation import OTHER, RANK_STEP, Descriptor
from otel_dltrace.model.semconv import PHASE, Level
from otel_dltrace.model.spans import Process
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

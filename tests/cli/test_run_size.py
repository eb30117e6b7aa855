"""Runs of which only a part is looked at: asked for, or what memory holds."""

import sys

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest

from otel_dltrace.cli import selection
from otel_dltrace.cli.selection import selected
from otel_dltrace.export.rundir import reader as run_reader
from otel_dltrace.export.rundir import size as run_size
from otel_dltrace.export.rundir.compaction import compact
from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.plan import Window
from tests.support.runs import ddp

STEPS = 10
"""Of a file; each rank has two, the first a Parquet."""


@pytest.fixture
def run(tmp_path):
    """Write a run of two ranks, each on a host of its own; return its folder."""
    for host, batch in zip("ab", ddp(2, steps=2 * STEPS), strict=True):
        writer = RunWriter(tmp_path / "run", host)
        writer.open()
        writer.name_run(batch.process.bind)
        writer.know(batch.process)
        for of_file in (batch["step"] < STEPS, batch["step"] >= STEPS):
            part = batch.take(of_file)
            writer.append(batch.process.nonce, part.rows, part.descriptors, part.errors)
            writer.close_segment()
            if part["step"][0] < STEPS:
                compact(writer.folder, writer.number)
        writer.write_summary({"spans": len(batch)}, ended=True)
        writer.close()
    return tmp_path / "run"


@pytest.mark.parametrize("ranks", [None, [1]], ids=["all ranks", "one rank"])
@pytest.mark.parametrize("steps", ["all steps", "3-4", "8-12", "15-15", "90-99"])
def test_what_is_read_is_what_is_asked_for(run, steps, ranks):
    """A rank without any of it is there, and empty."""
    window = None if steps == "all steps" else Window.parse(steps)
    read = [(batch.rank, batch.rows.tolist()) for batch in read_run(run, window, ranks)]

    cut = [batch if window is None else batch.in_steps(window) for batch in read_run(run)]
    whole = [(batch.rank, batch.rows.tolist()) for batch in cut]
    assert read == [(rank, rows if ranks is None or rank in ranks else []) for rank, rows in whole]


def test_a_file_of_other_steps_is_not_read(run, monkeypatch):
    """But for who wrote it: a long run has many."""
    read = {}

    def seen(path, names=run_reader.columns.SPANS.names):
        read[path.suffix or "segment"] = list(names)
        return read_table(path, names)

    read_table = run_reader.read_table
    monkeypatch.setattr(run_reader, "read_table", seen)
    assert [len(batch) > 0 for batch in read_run(run, Window.parse("15-15"))] == [True, True]
    assert read[".parquet"] == ["process"]


@pytest.mark.parametrize(
    ("room", "steps"),
    [
        pytest.param(1.0, range(20), id="all"),
        pytest.param(0.5, range(10, 20), id="half"),
        pytest.param(0, [19], id="0"),
    ],
)
def test_a_run_that_memory_does_not_hold_is_looked_at_from_its_end(run, monkeypatch, capsys, room, steps):
    """And a sentence says so, and how to see the rest."""
    monkeypatch.setattr(selection, "spans_that_fit", lambda: int(room * sum(map(len, read_run(run)))))
    batches = selected(run, None)

    assert [np.unique(batch["step"]).tolist() for batch in batches] == [[*steps]] * 2
    said = f"{run} holds more spans than fit into memory here: this covers its latest steps only, {steps[0]}-19"
    cure = "--steps A-B takes others"
    assert capsys.readouterr().err == (f"otel-dltrace: {said}; {cure}\n" if room < 1 else "")


def test_all_steps_are_there_for_who_asks_for_them(run, monkeypatch):
    """Whatever memory may hold; and of one rank there may be room for all."""
    monkeypatch.setattr(selection, "spans_that_fit", lambda: len(read_run(run)[1]))

    assert list(map(len, selected(run, Window.parse("all")))) == list(map(len, read_run(run)))
    assert list(map(len, selected(run, None, [1]))) == [len(read_run(run)[1])]


def test_steps_that_are_not_there_are_told_from_what_is(run):
    """All of it, though nothing of it was read."""
    with pytest.raises(RunNotFoundError, match="none of the steps asked for is in this run; it has steps 0-19"):
        selected(run, Window.parse("90-99"))


@pytest.mark.parametrize("rank", [None, 0], ids=["all", "one"])
def test_neither_are_steps_of_a_file_that_cannot_be_read(run, rank):
    """No report is made of what its other columns say."""
    for path in run.glob("hosts/*/*.parquet"):
        column = pq.read_metadata(path).row_group(0).column(run_reader.columns.SPANS.names.index("end"))
        with path.open("r+b") as file:
            file.seek(column.data_page_offset + column.total_compressed_size // 2)
            file.write(b"damaged")
    with pytest.raises(RunNotFoundError, match="it has steps 10-19, without what cannot be read"):
        selected(run, Window.parse("3-4"), None if rank is None else [rank])


def test_what_is_outside_any_step_counts_too(run):
    """Where it is what does not fit, the steps alone do."""
    (folder, _) = sorted((run / "hosts").iterdir())
    (batch, _) = read_run(run)
    writer = RunWriter(run, "a", folder)
    writer.open()
    rows = np.repeat(batch.rows[:1], 5000)
    rows["step"] = NO_STEP
    writer.append(batch.process.nonce, rows, batch.descriptors, batch.errors)
    writer.close_segment()
    writer.close()

    window = run_size.latest_steps(run, 1000)
    assert window == Window(((0, 19),))
    assert sum(map(len, read_run(run, window))) < 1000


def test_no_memory_is_asked_for_where_files_are_small(run, monkeypatch):
    """Most runs are."""
    monkeypatch.setattr(run_size, "read_table", None)
    assert run_size.latest_steps(run, run_size.spans_that_fit()) is None
    assert run_size.spans_that_fit() <= max(psutil.virtual_memory().total // run_size.SPAN_BYTES, run_size.LEAST)


def test_without_psutil_all_of_a_run_is_read(run, monkeypatch):
    """As a drain goes on without it."""
    monkeypatch.setitem(sys.modules, "psutil", None)

    assert list(map(len, selected(run, None))) == list(map(len, read_run(run)))

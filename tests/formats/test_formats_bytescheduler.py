"""ByteScheduler's timeline: read in whatever state, and nothing lost on the way to spans and back."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_dltrace.cli.main import main
from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.formats.bytescheduler import Bar, read_schedule, rows_of
from otel_dltrace.model import semconv as s
from otel_dltrace.model.spans import Process, SpanBatch
from tests.support.byteps_files import FILES

PATH = FILES / "bytescheduler_hand.json"
BARS = [Bar("weight_0", "PUSHQUEUE", 1201, 1302), Bar("weight_0", "PUSHCOMMUNICATION", 1303, 2044)]


def written(bars: list[Bar]) -> bytes:
    """Return the text of a timeline of *bars*, closed."""
    pids = {tensor: pid for pid, tensor in enumerate(dict.fromkeys(bar.tensor for bar in bars))}
    events = [{"name": "process_name", "ph": "M", "pid": pids[name], "args": {"name": name}} for name in pids]
    for bar in bars:
        for phase, at in (("B", bar.start), ("E", bar.end)):
            events.append({"name": bar.activity, "ph": phase, "ts": at, "pid": pids[bar.tensor]})
    return json.dumps(events).encode()


def bars_of(batch: SpanBatch) -> list[Bar]:
    """Return the bars that *batch* was made of."""
    start, end = ((batch[name] // 1000).tolist() for name in ("start", "end"))
    whose = [batch.descriptor_of(row) for row in range(len(batch))]
    return [Bar(d.tensor, d.activity, *times) for d, *times in zip(whose, start, end, strict=True)]


def test_a_timeline_is_read_though_a_comma_is_too_many():
    """The comma behind the last event is the format's; nothing is missing."""
    assert read_schedule(PATH.read_bytes()) == (BARS, ())


def test_a_timeline_cut_at_any_byte_keeps_what_is_before():
    """Whole bars stay, and a sentence tells of the rest."""
    data = PATH.read_bytes()
    for cut in range(len(data.rstrip())):
        bars, notes = read_schedule(data[:cut])
        assert (bars, bool(notes)) == (BARS[: len(bars)], True), cut
        assert len(bars) == len(re.findall(rb'"E"[^}]*}', data[:cut])), cut


@pytest.mark.parametrize(
    ("events", "note"),
    [
        ([7, {"ph": "B"}], "events left out because they are not ByteScheduler's: 2"),
        ([{"ph": "E", "pid": 0, "name": "x", "ts": 1}], "begins and ends left out because the other is missing: 1"),
        ([{"ph": "B", "pid": 0, "name": "x", "ts": 1}], "begins and ends left out because the other is missing: 1"),
    ],
)
def test_what_is_no_bar_is_told(events, note):
    """It is counted, and nothing is made of it."""
    assert read_schedule(json.dumps(events).encode()) == ([], (note,))


@pytest.mark.parametrize(
    "strange",
    [
        pytest.param({"ph": "X", "pid": 0, "name": "x", "ts": 2}, id="another phase"),
        pytest.param({"ph": "E", "pid": 0, "name": "x", "ts": 10**16}, id="a time that nanoseconds cannot hold"),
    ],
)
def test_what_is_no_end_ends_no_bar(strange):
    """It is left out, and the bar's own end comes behind it."""
    begin, end = ({"ph": phase, "pid": 0, "name": "x", "ts": at} for phase, at in (("B", 1), ("E", 3)))
    assert read_schedule(json.dumps([begin, strange, end]).encode()) == (
        [Bar("0", "x", 1, 3)],
        ("events left out because they are not ByteScheduler's: 1",),
    )


TEXT = st.text(max_size=9).map(lambda text: text.encode("utf-8", "replace").decode())
ONE = st.builds(Bar, TEXT, TEXT, st.integers(-(10**6), 10**15), st.integers(0, 10**15))


@settings(max_examples=100)
@given(st.lists(ONE, max_size=20))
def test_bars_written_are_read_again(bars):
    """Whatever the names: file and spans say the same."""
    rows = rows_of(bars)

    assert read_schedule(written(bars)) == (bars, ())
    assert bars_of(SpanBatch(rows.rows, rows.descriptors, Process(1, None))) == bars


def test_the_command_imports_a_timeline(tmp_path, capsys):
    """The bars are spans, and it is said that their times are not of the day."""
    assert main(["import", "bytescheduler", str(PATH), "-o", str(tmp_path / "RUN")]) == 0
    (batch,) = read_run(tmp_path / "RUN")

    assert bars_of(batch.take(batch.is_kind(s.PHASE))) == BARS
    assert "from the start of its profiler" in capsys.readouterr().out

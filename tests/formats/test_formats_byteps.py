"""BytePS's files: read in whatever state, written as BytePS does, and nothing lost on the way there and back."""

import json
import re
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_dltrace.formats import comm_layout, comm_spans, server_spans
from otel_dltrace.formats.byteps_kind import Kind, kind_of
from otel_dltrace.formats.comm_json import Comm, Series, read_comm, write_comm
from otel_dltrace.formats.json_events import EMPTY, read_events
from otel_dltrace.formats.server_profile import Profile, Request, read_profile, write_profile
from otel_dltrace.formats.van_profile import Message, VanProfile, read_van, van_lines
from otel_dltrace.formats.van_spans import van_rows_of
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.spans import Process, SpanBatch
from tests.support.byteps_files import COMM, FILES, REAL, SERVER, SMALL, START_STEP, real, truth
from tests.support.runs import Rank

TS = 1_574_685_984_662_375
PUSH = Series("byteps.gradient_0", 399 << 16, "PUSH")
TOTAL = Series("byteps.gradient_0")


def comm_of(*events: tuple[Series, int, int]) -> Comm:
    series = list(dict.fromkeys(one for one, _, _ in events))
    which, ts, dur = np.array([(series.index(one), ts, dur) for one, ts, dur in events], np.int64).reshape(-1, 3).T
    return Comm(series, which.astype(np.int32), ts, dur)


def text_of(comm: Comm) -> bytes:
    return b"".join(write_comm(comm))


def as_batch(rows: comm_spans.Rows, role: str = "worker", rank: int = 0, servers: int = 0) -> SpanBatch:
    bind = Bind("job", "1.00", role=role, rank=rank, servers=servers)
    return SpanBatch(rows.rows, rows.descriptors, Process(1, bind))


# -- comm.json ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REAL)
def test_a_real_file_is_written_again_byte_for_byte(name):
    """What BytePS wrote is read in whole, and our writer is BytePS's."""
    data = real(name)
    comm = read_comm(data)

    assert (comm.notes, text_of(comm) == data) == ((), True)


@pytest.mark.parametrize("name", ["bps_hand_comm_root.json", "bps_hand_comm_nonroot.json", "bps_hand_comm_empty.json"])
def test_a_small_file_is_written_again_byte_for_byte(name):
    """Also with two partitions, on a rank that is not root, and without any event."""
    data = (FILES / name).read_bytes()
    comm = read_comm(data)

    assert (comm.notes, text_of(comm) == data) == ((), True)


@pytest.mark.parametrize("name", REAL)
def test_the_quick_way_reads_what_json_reads(name):
    """The same events come out of the layout and out of the same file laid out otherwise."""
    data = real(name)
    other = json.dumps(json.loads(data)).encode()

    assert (comm_layout.read(data) is None, comm_layout.read(other) is None) == (False, True)
    assert read_comm(other).events() == read_comm(data).events()


@pytest.mark.parametrize(
    ("run", "rank", "name"),
    [
        ("byteps_w2_s1", 0, REAL[0]),
        ("byteps_w2_s1", 1, REAL[1]),
        ("byteps_w1_l2_nodist", 0, REAL[2]),
        ("byteps_w1_l2_nodist", 1, REAL[3]),
    ],
)
def test_totals_and_stages_are_as_the_truth_says(run, rank, name):
    """Eleven occurrences of each tensor, every stage as often, from the step in which recording began."""
    told, comm = truth(run, rank), read_comm(real(name))
    counts = Counter(comm.series[number] for number in comm.which.tolist())
    totals = {series.tensor.removeprefix("byteps."): n for series, n in counts.items() if not series.stage}
    env = told["meta"]["env"]
    recorded = int(env["BYTEPS_TRACE_END_STEP"]) - int(env["BYTEPS_TRACE_START_STEP"]) + 1
    rows, _, notes = comm_spans.rows_of(comm, START_STEP)
    steps = rows[rows["level"] == s.Level.STEP]
    begins = {ordinal: start for ordinal, start, *_ in told["steps"]} | {len(told["steps"]): 1 << 62}

    assert totals == dict.fromkeys(told["push_pull_counts"], recorded)
    assert set(counts.values()) == {recorded}
    assert notes == ()
    # Steps are our ordinals, from 0, as the truth has them: each begins within the step of the program.
    assert [
        begins[n] * 1000 <= start < begins[n + 1] * 1000
        for n, start in zip(steps["step"].tolist(), steps["start"].tolist(), strict=True)
    ] == [True] * recorded


STAGES_OF = {
    "byteps_w2_s1/worker0/0": ("REDUCE", "COPYD2H", "PUSH", "PULL", "COPYH2D", "BROADCAST"),
    "byteps_w2_s1/worker1/0": ("REDUCE", "COPYD2H", "PUSH", "PULL", "COPYH2D", "BROADCAST"),
    "byteps_w1_l2_nodist/worker0/0": ("COORDINATE_REDUCE", "REDUCE", "COORDINATE_BROADCAST", "BROADCAST"),
    "byteps_w1_l2_nodist/worker0/1": ("REDUCE", "BROADCAST"),
}


@pytest.mark.parametrize("name", REAL)
def test_every_partition_goes_through_its_stages_in_order(name):
    """Each operation has the stages of its rank, inside it, one after the other, with the wait before each."""
    batch = as_batch(comm_spans.rows_of(read_comm(real(name))))
    rows = batch.rows[batch.is_kind(s.PHASE)]
    parents = batch.rows[rows["parent_no"] - 1]
    stages: dict[tuple[int, int], list[tuple[int, str, int, int]]] = {}
    for row, stage in zip(rows, batch.lookup(lambda d: d.queue_type, object)[batch.is_kind(s.PHASE)], strict=True):
        stages.setdefault((int(row["parent_no"]), int(row["partition"])), []).append(
            (int(row["start"]), stage, int(row["end"]), int(row["a"]))
        )
    ordered = [sorted(chain, key=lambda one: (one[0], one[2])) for chain in stages.values()]

    assert {tuple(stage for _, stage, _, _ in chain) for chain in ordered} == {STAGES_OF[name]}
    assert bool(np.all(rows["start"] >= parents["start"]) and np.all(rows["end"] <= parents["end"]))
    assert all(
        max(0, start - end) == wait * 1000
        for chain in ordered
        for (_, _, end, _), (start, _, _, wait) in pairwise(chain)
    )


def test_spans_of_a_file_are_those_of_the_contract():
    """An operation with its stage: names, attributes, occurrence and step, queue wait, the step around them."""
    rows, descriptors, _ = comm_spans.rows_of(comm_of((TOTAL, TS, 100), (PUSH, TS + 30, 20)), first=10)
    columns = ("descriptor", "step", "seq", "parent_no", "partition", "level", "start", "end", "a")

    assert [tuple(row[name].item() for name in columns) for row in rows] == [
        (0, 9, 10, 0, 0, s.Level.COLLECTIVE, TS * 1000, (TS + 100) * 1000, 0),
        (1, 9, 10, 1, 0, s.Level.PARTITION, (TS + 30) * 1000, (TS + 50) * 1000, 30),
        (2, 9, 0, 0, 0, s.Level.STEP, TS * 1000, (TS + 100) * 1000, 0),
    ]
    assert [(d.kind, d.name, d.tensor, d.key, d.queue_type) for d in descriptors] == [
        ("collective", "push_pull", "byteps.gradient_0", 399, ""),
        ("phase", "PUSH", "byteps.gradient_0", 399, "PUSH"),
        ("step", "rank.step", "", -1, ""),
    ]


@pytest.mark.parametrize(
    ("old", "new", "series"),
    [
        pytest.param(
            "26148864",
            str((40000 << 16 | 3) - (1 << 32)),
            Series(PUSH.tensor, 40000 << 16 | 3, "PUSH"),
            id="negative key",
        ),
        pytest.param("0.PUSH", "0.CPU_COPY_PUSH", PUSH._replace(stage="CPU_COPY_PUSH"), id="stage of a branch"),
        pytest.param("0.PUSH", "0.COMPRESS", PUSH._replace(stage="COMPRESS"), id="stage since 0.2.5"),
        pytest.param('"tid": "26148864"', '"tid": 26148864', PUSH, id="key as a number"),
    ],
)
def test_what_varies_between_versions_is_read(old, new, series):
    """Keys beyond 31 bits, stages of other branches, and numbers where BytePS has strings."""
    data = text_of(comm_of((PUSH, TS, 5))).decode().replace(old, new)

    assert read_comm(data.encode()).events() == [(series, TS, 5)]


def test_a_key_below_0_is_written_as_it_was():
    """BytePS's own 32 bits, which export has to show as they are."""
    for key, text in ((1 << 31, "-2147483648"), (40000 << 16 | 3, "-1673527293"), ((1 << 31) - 1, "2147483647")):
        written = text_of(comm_of((PUSH._replace(key=key), TS, 5)))
        assert f'"tid": "{text}"'.encode() in written
        assert read_comm(written).events() == [(PUSH._replace(key=key), TS, 5)]


@pytest.mark.parametrize("tensor", ['a"b', 'a","b', 'a\\b"', 'a\\"b"', "a\nb", 'a", "pid": "x', "\x01"])
def test_names_that_byteps_did_not_escape_are_read(tensor):
    """BytePS escapes nothing: what breaks the JSON breaks no event, and the next ones are there too."""
    name = f"Comm.{tensor}"
    events = text_of(comm_of((TOTAL, TS, 7), (PUSH, TS, 5), (Series("b"), TS, 3))).decode()
    comm = read_comm(events.replace("Comm.byteps.gradient_0", name).encode())
    expected = [(Series(tensor), TS, 7), (PUSH._replace(tensor=tensor), TS, 5), (Series("b"), TS, 3)]
    is_json = tensor in ("a\nb", "\x01")  # control characters are let pass

    assert comm.events() == expected
    assert bool(comm.notes) is not is_json


BARE = "names in it lack BytePS's prefix Comm.; an export adds it"
NO_UTF8 = "names in it are not UTF-8: what cannot be read is shown as \ufffd; names that differ only there count as one"
ESCAPED = "names in it have control characters as JSON escapes; BytePS escapes nothing: were these backslashes?"


@pytest.mark.parametrize("suffix", [b"", b" "], ids=["as BytePS writes it", "as any JSON"])
@pytest.mark.parametrize(
    ("name", "tensor", "notes"),
    [
        pytest.param(b"a", "a", (BARE,), id="no prefix"),
        pytest.param(b"Comm.a\xff", "a\ufffd", (NO_UTF8,), id="no utf-8"),
        pytest.param("Comm.a\ufffd".encode(), "a\ufffd", (), id="a replacement of its own"),
        pytest.param(b"Comm.a\\b", "a\b", (ESCAPED,), id="a backslash"),
        pytest.param(b"Comm.a\tb", "a\tb", (), id="a control character as it is"),
    ],
)
def test_names_that_may_have_been_others_are_told(name, tensor, notes, suffix):
    """What is not known of a name is said, whichever way the file is read."""
    data = text_of(comm_of((Series("byteps.x"), TS, 7))).replace(b"Comm.byteps.x", name)
    comm = read_comm(data.replace(b'"ms"', b'"ms"' + suffix))

    assert (comm.events(), comm.notes) == ([(Series(tensor), TS, 7)], notes)


def test_events_of_others_beside_those_of_byteps_are_left_out():
    """A profiler's, in one file with them: what says that it is of another category is none of BytePS."""
    other = {"ph": "X", "pid": "FW", "name": "FW.conv", "ts": 1, "dur": 1, "tid": "0", "cat": "operator"}
    own = {"ph": "X", "pid": "Comm.a", "name": "Comm.a", "ts": 5, "dur": 2, "tid": "total"}
    comm = read_comm(json.dumps([other, own, own | {"cat": "Comm"}]).encode())

    assert (comm.events(), comm.notes) == (
        [(Series("a"), 5, 2)] * 2,
        ("events left out because they are not BytePS's: 1",),
    )


def test_an_event_that_byteps_did_not_write_is_left_out_and_told():
    """What is no complete event of a tensor is counted; those beside it are kept."""
    strange = [
        1,
        {},
        {"ph": "M", "pid": "a"},
        {"ph": "X", "pid": "Comm.a", "name": "Comm.a.PUSH", "ts": 1, "dur": 1, "tid": "none"},
        {"ph": "X", "pid": "Comm.a", "name": "Comm.a", "ts": float("inf"), "dur": 1, "tid": "total"},
        {"ph": "X", "pid": "Comm.a", "name": "Comm.a", "ts": 1 << 70, "dur": 1, "tid": "total"},
        {"ph": "X", "pid": "Comm.a", "name": "Comm.a", "ts": 9 * 10**15, "dur": 9 * 10**15, "tid": "total"},
        {"ph": "X", "pid": "Comm.a", "name": "Comm.a", "ts": 5, "dur": -2, "tid": "total"},
    ]
    comm = read_comm(json.dumps({"traceEvents": strange}).encode())

    assert (comm.events(), comm.notes) == (
        [(Series("a"), 5, -2)],
        ("events left out because they are not BytePS's: 7",),
    )


@pytest.mark.parametrize("ts", [-9 * 10**15, 9 * 10**15])
def test_a_time_that_nanoseconds_cannot_hold_is_left_out_and_told(ts):
    """Also in a file that is laid out as BytePS does it."""
    comm = read_comm(text_of(comm_of((TOTAL, TS, 7), (PUSH, ts, 5))))

    assert (comm.events(), comm.notes) == ([(TOTAL, TS, 7)], ("events left out because they are not BytePS's: 1",))


@pytest.mark.parametrize(
    ("data", "notes"),
    [
        (b"", (EMPTY,)),
        (b" \n", (EMPTY,)),
        (b"{", ("the file ends in its header; all of its events are missing",)),
        (b"[", ("the file ends before its first event; all of its events are missing",)),
        (b"hello", ("the file holds no complete trace event; it begins with 'hello'",)),
        (b"7", ("the file is JSON, but holds no trace events",)),
        (b"\xff\xfe\x00", ("the file holds no complete trace event; it begins with '\ufffd\ufffd\\x00'",)),
        (b"[" * 100_000, ("the file ends in the middle of event 1; it is missing, and anything after it",)),
    ],
)
def test_what_is_no_timeline_is_told_so(data, notes):
    """Nothing crashes the reader, and it never says nothing."""
    assert (read_comm(data).events(), read_comm(data).notes) == ([], notes)


def prefix_of(part: list, whole: list) -> bool:
    return part == whole[: len(part)]


@pytest.mark.parametrize("name", COMM)
def test_a_timeline_cut_at_any_byte_keeps_what_is_before_and_says_what_is_missing(name):
    """Every whole event before the cut is there, none is made up, and a sentence tells of the rest."""
    data = (FILES / name).read_bytes()
    whole = read_comm(data).events()
    end = b"\n}" if "fragment" in name else b"\n        }"
    for cut in range(len(data.rstrip()) if "fragment" in name else len(data)):
        part = read_comm(data[:cut])
        assert prefix_of(part.events(), whole), cut
        assert len(part.notes) == 1, cut
        assert len(part) == data[:cut].count(end), cut


@settings(max_examples=60)
@given(st.sampled_from(REAL), st.floats(0, 1, exclude_max=True))
def test_a_real_timeline_cut_anywhere_keeps_what_is_before(name, where):
    """Also in a large file, and what was cut still becomes spans with parents."""
    data = real(name)
    cut = int(where * len(data.rstrip()))
    part, whole = read_comm(data[:cut]), read_comm(data)

    assert prefix_of(part.events(), whole.events())
    assert len(part) == data[:cut].count(b"\n        }")
    assert len(part.notes) == 1
    assert len(comm_spans.rows_of(part).rows) >= len(part)


@settings(max_examples=100)
@given(st.binary(max_size=200), st.integers(0, 6000), st.integers(0, 200))
def test_a_damaged_timeline_never_crashes_the_reader(junk, at, length):
    """Bytes overwritten anywhere cost the events they hit, and are told of unless they changed none."""
    data = (FILES / "bps_hand_comm_root.json").read_bytes()
    damaged = data[:at] + junk + data[at + length :]
    comm = read_comm(damaged)

    assert comm.notes or len(comm)
    comm_spans.rows_of(comm)


def test_an_event_damaged_in_the_middle_costs_no_other():
    """The reader goes on with the next event."""
    data = (FILES / "bps_hand_comm_root.json").read_bytes()
    whole = read_comm(data).events()
    comm = read_comm(data.replace(b'"dur": 24026', b'"dur" 24026', 1))

    assert comm.events() == whole[1:]
    assert comm.notes == ("events that could not be read and are missing: 1, the first at character 31",)


def test_a_large_event_of_a_cut_file_is_read():
    """Between two others; of one that is cut as large nothing is left."""
    large = {"ph": "X", "args": {"name": "x" * 100_000, "more": {"a": 1}}}
    text = json.dumps([{"ph": "a"}, large, {"ph": "b"}, large])
    events, notes, _ = read_events(text[:-60_000])
    assert (events, notes) == (
        [{"ph": "a"}, large, {"ph": "b"}],
        ("the file ends in the middle of event 4; it is missing, and anything after it",),
    )


def cpu_of_cut_unescaped(count: int) -> float:
    """Return the seconds of CPU for reading *count* events that are no JSON, cut inside the last one."""
    text = text_of(comm_of(*[(PUSH, TS + n, 5) for n in range(count)])).replace(b"byteps.", b'byteps."')
    begin = time.thread_time()
    assert len(read_comm(text[: text.rindex(b'"cat"')])) == count - 1
    return time.thread_time() - begin


def test_what_cannot_be_read_at_once_takes_no_longer_where_the_file_is_long():
    """Each event that was no JSON took as long as the file is: 20 MB of them more than four minutes."""
    assert cpu_of_cut_unescaped(8000) < 24 * cpu_of_cut_unescaped(1000)


def test_several_timelines_in_one_file_are_told():
    """As of `cat worker*/0/comm.json`: what stands behind the first is not lost without a word."""
    data = (FILES / "bps_hand_comm_root.json").read_bytes()
    comm = read_comm(data + data)

    assert comm.events() == read_comm(data).events()
    told = "the file goes on after its end at character {:,}; only what comes before that was read"
    assert comm.notes == (told.format(data.index(b"],") + 1),)


TENSORS = st.text(max_size=12) | st.sampled_from(["byteps.Gradient.0.weight", 'q"', "b\\", "\ud800"])
SERIES = st.builds(
    Series, TENSORS, st.integers(0, (1 << 40) - 1), st.sampled_from(["PUSH", "PULL", "ALLGATHER_PULL_RESP"])
) | TENSORS.map(Series)
EVENTS = st.lists(st.tuples(SERIES, st.integers(-(10**15), 4 * 10**15), st.integers(-(10**9), 10**12)), max_size=30)


def utf8(events: list[tuple[Series, int, int]]) -> list[tuple[Series, int, int]]:
    return [(one._replace(tensor=one.tensor.encode("utf-8", "replace").decode()), ts, dur) for one, ts, dur in events]


@settings(max_examples=300)
@given(EVENTS)
@example([(Series("\ud800"), 0, 0), (Series("?", 0, "PUSH"), 0, 1), (Series("\ud800", 0, "PUSH"), 0, 0)])
def test_what_is_written_is_read_again(events):
    """Whatever names, keys, stages and times: the file is plain JSON, and nothing is lost or changed."""
    data = text_of(comm_of(*events))
    read = read_comm(data)

    assert sorted(read.events()) == sorted(utf8(events))
    assert set(read.notes) <= {ESCAPED}
    assert len(json.loads(data)["traceEvents"]) == len(events)
    names, written = ({one.tensor for one, _, _ in some} for some in (events, utf8(events)))
    assert text_of(read) == data or len(written) < len(names)  # those that cannot be written may become the same


@settings(max_examples=200)
@given(EVENTS, st.integers(1, 1000))
def test_spans_of_a_file_written_and_read_again_are_the_same(events, first):
    """From the file's spans to a file, and to spans: every row, column by column."""
    rows = comm_spans.rows_of(read_comm(text_of(comm_of(*events))), first)
    again = comm_spans.rows_of(read_comm(text_of(comm_spans.comm_of(as_batch(rows)))), first)

    assert again.rows.tobytes() == rows.rows.tobytes()
    assert again.descriptors == rows.descriptors


@pytest.mark.parametrize("flag", [s.Flag.ERROR, s.Flag.TRUNCATED])
def test_what_was_not_done_is_no_completion(flag):
    """Of three push_pulls the second failed, or was cut off; what is no push_pull is no tensor's."""
    rank = Rank()
    for seq in range(1, 4):
        flags = flag if seq == 2 else s.Flag.ASYNC
        rank.collective(0, 10 * seq, 10 * seq + 5, seq, "push_pull", backend="byteps", tensor="w", flags=flags)
    batch = rank.collective(0, 50, 60, 1, "broadcast", backend="byteps", tensor="w").batch()
    unfinished = comm_spans.unfinished_in(batch)

    assert unfinished.tolist() == [batch["span_id"][1]]
    assert comm_spans.completions_in(batch).tolist() == [1, 3]
    start = batch.wall // 1000
    assert comm_spans.comm_of(batch, unfinished).events() == [(Series("w"), start + n * 10_000, 5_000) for n in (1, 3)]


@pytest.mark.parametrize("name", REAL)
def test_a_timeline_that_lost_a_total_hangs_stages_by_time(name):
    """Where counts do not agree, a stage belongs to the last total that began before it."""
    comm = read_comm(real(name))
    rows = comm_spans.rows_of(comm).rows[: len(comm)]
    without_one = np.arange(len(comm)) != 3  # the fourth total of the first tensor
    cut = replace(comm, which=comm.which[without_one], ts=comm.ts[without_one], dur=comm.dur[without_one])
    found = comm_spans.rows_of(cut).rows[: len(cut)]
    whose = np.append(0, np.arange(len(comm))[without_one] + 1)  # the old number of each row
    of_others = rows["parent_no"][without_one] != 4

    assert np.array_equal(whose[found["parent_no"]][of_others], rows["parent_no"][without_one][of_others])
    assert set(whose[found["parent_no"]][~of_others].tolist()) == {3}


# -- server_profile.json ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stages", "parents", "occurrences"),
    [
        pytest.param((110, 210), (1, 2), (1, 2), id="each in its own"),
        pytest.param((10, 110), (0, 1), (1, 1), id="the first total is lost"),
        pytest.param((210, 310), (2, 2), (2, 2), id="the last total is lost"),
    ],
)
def test_of_as_many_stages_as_totals_each_is_in_one_that_it_lies_in(stages, parents, occurrences):
    """Else it is its time that tells, as it does where they are not as many."""
    totals = [(TOTAL, TS + at, 50) for at in (100, 200)]
    rows, _, notes = comm_spans.rows_of(comm_of(*totals, *[(PUSH, TS + at, 5) for at in stages]))

    assert (rows["parent_no"][2:4].tolist(), rows["seq"][2:4].tolist()) == ([*parents], [*occurrences])
    lone = "stages outside all totals of their tensor, so without an operation: 1"
    assert notes == (lone,) * parents.count(0)


def test_a_server_profile_is_read_as_requests():
    """Ends belong to the earliest open begin of the same key and name, though workers interleave."""
    profile = read_profile((FILES / "bps_hand_server_profile_unclosed.json").read_bytes())
    at = 1_569_331_999_234_742

    assert profile.requests == [
        Request("push", 9, 27000832, at, at + 36),
        Request("pull", 9, 27000832, at + 136, at + 301),
        Request("push", 11, 27000832, at + 156, at + 189),
        Request("pull", 11, 27000832, at + 260, at + 340),
    ]
    assert (profile.server, profile.servers) == (0, 1)
    assert profile.notes == (
        "the file is not closed after event 8; anything after it is missing",
        "BytePS's servers never close this file, so up to 8 KB at its end may be lost too",
    )


def test_what_is_no_request_is_left_out_and_told():
    """An event of another phase, key or name, or at a time that nanoseconds cannot hold."""
    begin = {"name": "push-9", "ph": "B", "pid": 65536, "tid": 65536, "ts": TS}
    strange = [begin | other for other in ({"ph": "X"}, {"pid": -1}, {"name": "sum-9"}, {"ts": 10**16}, {"ts": None})]
    profile = read_profile(json.dumps([begin, *strange, begin | {"ph": "E", "ts": TS + 5}]).encode())

    assert profile.requests == [Request("push", 9, 65536, TS, TS + 5)]
    assert profile.notes == ("events left out because they are neither push nor pull: 5",)


def test_a_pull_waits_for_the_push_that_ends_last():
    """Though another one came after it."""
    requests = [Request("push", 9, 65536, 0, 50), Request("push", 11, 65536, 5, 30), Request("pull", 11, 65536, 35, 60)]
    assert server_spans.rows_of(Profile(requests), {}).rows["a"].tolist() == [0, 0, 15]


def test_a_servers_share_of_the_keys_is_taken_off():
    """On server 1 of 2 a key is beyond 2**53; less the server's offset it is the workers' key."""
    profile = read_profile((FILES / "bps_hand_server1of2_profile_unclosed.json").read_bytes())

    assert (profile.server, profile.servers, [r.key for r in profile.requests]) == (1, 2, [7 << 16 | 3])
    assert profile.notes[-1] == "its keys are those of server 1 of 2, or a multiple of both; say it with --servers"
    assert read_profile((FILES / "bps_hand_server1of2_profile_unclosed.json").read_bytes(), servers=4).server == 2


def test_a_number_of_servers_that_the_keys_do_not_fit_is_named():
    """They fit two: it is the number that was given which is wrong."""
    profile = read_profile((FILES / "bps_hand_server1of2_profile_unclosed.json").read_bytes(), servers=3)

    assert (profile.server, profile.requests[0].key) == (0, 9223372036855234562)
    assert profile.notes[-1] == "the keys belong to none of 3 servers (--servers); they were read as they are"


@pytest.mark.parametrize("servers", range(1, 33))
def test_whose_a_profile_is_is_told_from_its_keys(servers):
    """Server 2 of 4 begins one key below server 1 of 2: by that its keys would be other tensors'."""
    keys = [5 << 16, 5 << 16 | 1, 7 << 16]
    for server in range(servers):
        profile = Profile([Request("push", 9, key, TS + key, TS + key + 1) for key in keys], server, servers)
        read = read_profile(text_of_server(profile))
        assert [request.key for request in read.requests] == keys
        assert text_of_server(read) == text_of_server(profile)


def test_a_fragment_s_first_event_is_read_behind_what_is_none():
    """As where somebody shows a part of a file, with dots for the rest."""
    event = '{"name": "push-9", "ph": "%s", "pid": 327680, "tid": 327680, "ts": %d}'
    profile = read_profile(f"......\n{event % ('B', TS)},\n{event % ('E', TS + 5)},\n......".encode())

    assert profile.requests == [Request("push", 9, 5 << 16, TS, TS + 5)]


@pytest.mark.parametrize(
    ("sender", "rank"), [(8, -1), (9, 5), (10, -1), (11, 11), (715_827_887, 2_147_483_639), (999_999_999, -1)]
)
def test_who_sent_a_request_is_a_worker_of_ps_lite(sender, rank):
    """They are numbered 9, 11, 13 ...; what is none, or more than there can be, is nobody."""
    profile = Profile([Request("push", sender, 1 << 16, TS, TS + 5)])
    assert server_spans.rows_of(profile, {}, local_size=6).rows["b"].tolist() == [rank]


def test_a_request_that_ends_before_it_begins_is_told():
    """As in a comm.json: somebody set the clock back."""
    profile = read_profile(text_of_server(Profile([Request("push", 9, 5 << 16, TS, TS - 5)])))

    assert profile.requests == [Request("push", 9, 5 << 16, TS, TS - 5)]
    assert profile.notes == ("pushes and pulls that end before they begin, because the clock was set back: 1",)


def test_a_killed_server_leaves_what_it_flushed():
    """8191 bytes, cut inside a token: the last begin has no end, and the note says so."""
    profile = read_profile((FILES / "bps_emul_server_profile_killed_8191B.json").read_bytes())
    whole = [request for request in profile.requests if request.end is not None]

    assert (len(profile.requests), len(whole)) == (45, 44)
    assert profile.notes[0].startswith("the file ends in the middle of event 90;")
    assert profile.notes[-1] == "pushes and pulls whose end is not in the file: 1"


@pytest.mark.parametrize("name", SERVER)
def test_a_server_profile_cut_at_any_byte_keeps_what_is_before(name):
    """Every whole event before the cut counts, and a sentence tells of the rest."""
    data = (FILES / name).read_bytes()
    whole = [request[:4] for request in read_profile(data).requests]
    for cut in range(len(data) + 1):
        part = read_profile(data[:cut])
        assert part.notes, cut
        assert prefix_of([request[:4] for request in part.requests], whole), cut
        assert len(part.requests) == len(re.findall(rb'\{"name[^}]*"B"[^}]*\}', data[:cut])), cut


def test_an_end_whose_begin_is_not_in_the_file_is_left_out_and_said():
    """As of a file whose first lines were cut off."""
    event = {"name": "push-9", "ph": "B", "pid": "65536", "tid": "0", "ts": str(TS)}
    events = [event | {"ph": "E"}, event | {"ts": str(TS + 1)}, event | {"ph": "E", "ts": str(TS + 5)}]
    profile = read_profile(json.dumps(events).encode())

    assert [request[3:] for request in profile.requests] == [(TS + 1, TS + 5)]
    assert "ends left out because they have no begin: 1" in profile.notes


def text_of_server(profile: Profile) -> bytes:
    """Return the file that is written of the spans that *profile* is read as."""
    batch = as_batch(server_spans.rows_of(profile, {5: "t"}), "server", profile.server, profile.servers)
    return b"".join(write_profile(server_spans.marks_of([batch])))


@pytest.mark.parametrize("name", SERVER)
def test_a_server_profile_is_written_as_it_was_and_closed(name):
    """The same lines, then the end that no server ever wrote; plain JSON."""
    data = (FILES / name).read_bytes()
    text = text_of_server(read_profile(data))
    events = json.loads(text)["traceEvents"]
    lines = data.rpartition(b"}")[0] + b"}"

    assert text == lines + b"\n\t]\n}\n"
    assert len(events) == lines.count(b'"ph"')
    assert (
        read_profile(text).notes in ((), ("pushes and pulls whose end is not in the file: 1",)) or "server1of2" in name
    )


REQUESTS = st.lists(
    st.tuples(st.sampled_from(["push", "pull"]), st.sampled_from([9, 11, 13]), st.integers(0, 3), st.integers(0, 50)),
    max_size=30,
)


@settings(max_examples=200)
@given(REQUESTS, st.integers(0, 3), st.booleans())
def test_requests_written_are_read_again(chosen, server, last_is_open):
    """One request of a worker and key at a time, as it is: profile, spans and file say the same."""
    now, requests = 0, []
    for operation, sender, key, length in chosen:
        requests.append(Request(operation, sender, 5 << 16 | key, TS + now, TS + now + length))
        now += length
    if requests and last_is_open:
        requests[-1] = requests[-1]._replace(end=None)
    profile = Profile(requests, server, 4)
    read = read_profile(text_of_server(profile), servers=4)

    assert sorted(read.requests, key=str) == sorted(requests, key=str)
    assert not requests or read.server == server


def test_a_pulls_wait_is_told_from_its_transfer():
    """A pull is answered when every worker's push is in: until then it waits."""
    requests = [
        Request("push", 9, 1 << 16, 0, 10),
        Request("pull", 9, 1 << 16, 20, 90),
        Request("push", 11, 1 << 16, 60, 70),
        Request("pull", 11, 1 << 16, 75, 95),
    ]
    rows, descriptors, _ = server_spans.rows_of(Profile(requests), {1: "weight"}, local_size=2)

    assert [
        (descriptors[r["descriptor"]].name, r["b"], r["seq"], r["step"], r["a"]) for r in rows.tolist() and rows
    ] == [
        ("push", 1, 1, 0, 0),
        ("pull", 1, 1, 0, 50),
        ("push", 3, 1, 0, 0),
        ("pull", 3, 1, 0, 0),
    ]
    assert {d.tensor for d in descriptors} == {"weight"}


# -- ps-lite, and which file is which -----------------------------------------------------------


def test_a_van_profile_is_read_and_written():
    """One line for each message: which partition, push or pull, when."""
    data = (FILES / "pslite_hand_van_server.txt").read_bytes()
    van = read_van(data)

    assert van.messages == [
        Message(0, "server", "push", 1569331999234742),
        Message(1, "server", "push", 1569331999234801),
        Message(0, "server", "pull", 1569331999235010),
    ]
    assert (van.notes, b"".join(van_lines(van.messages))) == ((), data)
    assert read_van(b"\xef\xbb\xbf" + data) == van


def test_a_van_profile_of_another_system_is_read():
    """Lines may end as those of Windows; only those are left out, and told, that no node writes: a key has 16 bits."""
    lines = ["65535\tworker_van_recv_pull\t7", "65536\tworker_van_recv_pull\t8", "0\tserver_van_recv_push\t9", ""]
    for end in ("\n", "\r\n"):
        assert read_van(end.join(lines).encode()) == VanProfile(
            [Message(65535, "worker", "pull", 7), Message(0, "server", "push", 9)],
            ("lines left out because they are not a van profile's: 1",),
        )


@pytest.mark.parametrize(("at", "told"), [(9_000_000_000_000_000, 0), (9_223_372_036_854_776, 1), (10**16 - 1, 1)])
def test_a_van_profile_has_no_time_that_nanoseconds_cannot_hold(at, told):
    """The message would be in another century; the line is left out, and told."""
    van = read_van(f"0\tserver_van_recv_push\t{at}\n".encode())
    assert len(van.notes) == told
    assert van_rows_of(van).rows["start"].tolist() == [at * 1000] * (1 - told)


def test_a_van_profile_cut_at_any_byte_keeps_its_whole_lines():
    """A number that was cut is not taken for one; only a cut between two lines leaves no trace."""
    data = (FILES / "pslite_hand_van_server.txt").read_bytes()
    whole = read_van(data).messages
    for cut in range(len(data)):
        part = read_van(data[:cut])
        assert part.messages == whole[: data[:cut].count(b"\n")]
        assert bool(part.notes) is not data[:cut].endswith(b"\n")
    assert read_van(b"x\n") == VanProfile([], ("lines left out because they are not a van profile's: 1",))


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [
        *((name, None, Kind.SERVER if "profile" in name else Kind.COMM) for name in SMALL),
        ("pslite_hand_van_server.txt", None, Kind.VAN),
        ("comm.json", b"", Kind.COMM),
        ("server_profile.json", b"{", Kind.SERVER),
        ("pslite_profile_van_worker_17", b"", Kind.VAN),
        ("what.txt", b"", Kind.COMM),
    ],
)
def test_a_file_tells_what_it_is(name, head, kind):
    """Content first, since files get renamed; the name of what is still empty."""
    head = (FILES / name).read_bytes() if head is None else head

    assert kind_of(name, head) is kind

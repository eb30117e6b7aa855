"""Horovod's timeline: read in whatever state, written as Horovod does, and nothing lost on the way there and back."""

import json
from collections import Counter
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from otel_dltrace.formats.horovod_events import events_of
from otel_dltrace.formats.horovod_json import BEGIN, MARK, OVER, START, TICK, Event, Reader, count_ranks
from otel_dltrace.formats.horovod_spans import Builder, fold, unfold
from otel_dltrace.formats.horovod_writer import write_events
from otel_dltrace.formats.json_events import EMPTY
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP, Bind
from otel_dltrace.model.spans import Process, SpanBatch, fill_ids, stack_rows
from tests.support.horovod_files import REAL, SMALL, WHOLE, timeline, truth

ORIGIN = 1_795_216_224_857_767


def read(data: bytes) -> tuple[list[Event], list[str]]:
    reader = Reader(data)
    return list(reader), reader.notes


def built(events: list[Event], first_step: int = 0) -> tuple[SpanBatch, list[str]]:
    """Return *events* as spans, and what is odd about them."""
    builder = Builder(first_step)
    parts = []
    for number, event in enumerate(events):
        builder.add(event)
        if number % 50 == 49:
            parts.append(builder.rows())
    rows = stack_rows([*parts, builder.finish()])
    process = Process(1, Bind("job", "1.00"))
    fill_ids(rows, builder.descriptors, process)
    return SpanBatch(rows, builder.descriptors, process), builder.notes()


def text_of(events: list[Event]) -> bytes:
    return b"".join(write_events(events))


# -- reading and writing ------------------------------------------------------------------------


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_file_is_written_again_byte_for_byte(name):
    """What Horovod wrote is read in whole, spans keep all of it, and our writer is Horovod's."""
    data = timeline(name)
    events, notes = read(data)
    batch, _ = built(events)

    assert notes == []
    assert list(events_of([batch])) == events
    assert text_of(events) == data


@pytest.mark.parametrize("name", WHOLE)
def test_every_event_is_read(name):
    """As many of each phase, at the same times, as any JSON parser finds."""
    document = json.loads(timeline(name))
    wanted = [(e["ph"], e["ts"], e.get("name", "")) for e in document if e["ph"] != "M"]

    assert [(e.phase, e.ts, e.name) for e in read(timeline(name))[0] if e.phase != START] == wanted


@pytest.mark.parametrize(
    "dump",
    [
        pytest.param(json.dumps, id="dumped"),
        pytest.param(lambda events: json.dumps(events, indent=1), id="indented"),
        pytest.param(lambda events: json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), id="wrapped"),
        pytest.param(lambda events: json.dumps([dict(reversed(e.items())) for e in events]), id="reversed"),
        pytest.param(lambda events: json.dumps(events)[:-1] + ",]\n", id="trailing comma"),
        pytest.param(lambda events: "\ufeff" + json.dumps(events), id="behind a mark"),
        pytest.param(lambda events: "\ufeff" + json.dumps({"traceEvents": events}), id="wrapped behind a mark"),
    ],
)
def test_other_layouts_hold_the_same(dump):
    """Tools that rewrite the file lay it out as they like."""
    data = timeline("horovod_gloo_np2_ops")

    other = dump(json.loads(data)).encode()

    assert read(other) == read(data)
    assert count_ranks(other) == 2


def test_a_name_needs_no_place_in_the_order():
    """That is for viewers; who filters a file may drop it."""
    data = timeline("horovod_gloo_np2_ops")
    lines = [line for line in data.splitlines(keepends=True) if b"process_sort_index" not in line]

    assert len(lines) < len(data.splitlines())
    assert read(b"".join(lines)) == read(data)


@pytest.mark.parametrize(
    "name",
    [
        "hvd_real_HEAD_dynamic_seg2_cycles",
        "hvd_real_HEAD_procset02_badname_INVALIDJSON",
        "hvd_hand_le_v0.20.0_unclosed",
    ],
)
def test_a_file_cut_at_any_byte_keeps_what_was_whole(name):
    """The events before the cut are read, nothing wrong behind it, and a sentence says that there was more."""
    data = timeline(name)
    whole = [event._replace(tensor="") for event in read(data)[0]]
    for cut in range(len(data)):
        events, notes = read(data[:cut])
        batch, _ = built(events)

        assert [event._replace(tensor="") for event in events] == whole[: len(events)]
        assert list(events_of([batch])) == events
        assert [note for note in notes if "end" in note or "closed" in note or "fragment" in note]
        json.loads(text_of(events))


@pytest.mark.parametrize(
    ("data", "notes"),
    [
        pytest.param(b"", [EMPTY], id="0 bytes"),
        pytest.param(b" \n", [EMPTY], id="blank"),
        pytest.param(b"[\n", ["the file ends before its first event; all of its events are missing"], id="only ["),
        pytest.param(
            timeline("hvd_driver_HEAD_killed_after_first_event"),
            ["the file ends before the first event of its last tensor, after event 0; "
             "anything after it is missing"],
            id="killed",
        ),
    ],
)  # fmt: skip
def test_what_is_missing_is_said(data, notes):
    """A sentence for each defect; nothing is left out in silence."""
    events, said = read(data)

    assert ([event for event in events if event.phase != START], said) == ([], notes)


def test_records_of_others_are_left_out_and_counted():
    """An event without a time or with one beyond all, a phase or a length that Horovod has not, a number.

    A tensor without a name is kept.
    """
    data = (
        b'[{"ph": "B", "name": "X", "ts": 1, "pid": 1}, {"ph": "B", "ts": "soon"},'
        b' {"ph": "C", "name": "Y", "ts": 2, "pid": 1}, {"ph": "B", "name": "Y", "ts": 10000000000000000, "pid": 1},'
        b' {"ph": "X", "name": "Y", "ts": 3, "pid": 1, "dur": 7}, 5]'
    )
    events, notes = read(data)

    assert events == [Event(BEGIN, 1, "1", "X")]
    assert notes[:2] == [
        "records left out because they are not Horovod's: 5",
        "tensors that the file does not name, shown by their number: 1",
    ]


@settings(max_examples=150)
@given(st.data())
def test_no_damage_is_too_much(data):
    """Bytes that changed, went or came: what is read can be written, and is read the same."""
    text = bytearray(timeline("hvd_real_HEAD_dynamic_seg2_cycles"))
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
    events, _ = read(bytes(text))
    batch, _ = built(events)

    json.loads(text_of(events))
    assert len(list(events_of([batch]))) == len(events)
    assert events == read(text_of(events))[0]


def test_times_before_0_20_1_have_no_origin():
    """An unclosed file whose times count from the machine's boot: all events, and two sentences."""
    events, notes = read(timeline("hvd_hand_le_v0.20.0_unclosed"))

    assert [event.phase for event in events] == list("BXXEBBEBEBEBEEi")
    assert [note.split(",")[0].split(" (")[0] for note in notes] == [
        "the file is not closed after event 15",
        "no record says what its times count from",
    ]


def test_names_that_are_not_escaped_are_taken_as_they_stand():
    """A quote and a backslash in a name make the file no JSON; what we write of it is JSON."""
    events, notes = read(timeline("hvd_real_HEAD_procset02_badname_INVALIDJSON"))
    names = [e["args"]["name"] for e in json.loads(text_of(events)) if e["ph"] == "M" and "name" in e["args"]]

    assert names == ["allreduce.world", "allreduce.sub", 'allreduce.we"ird\\name']
    assert notes == ["names in it are not escaped, so it is not valid JSON; they were read as they are"]
    assert read(text_of(events)) == (events, [])


def test_where_one_name_is_not_escaped_none_was():
    """What looks like an escape in another name is none."""
    events = [Event(BEGIN, n, name, "ALLREDUCE") for n, name in enumerate(["a\\tb", 'say "x"'])]
    raw = text_of(events).replace(b"\\\\", b"\\").replace(b'\\"', b'"')

    assert read(raw)[0] == events


def test_a_damaged_event_costs_itself():
    """What cannot be read is left out and told; all around it is read."""
    data = timeline("horovod_mpi_np4_psets")
    at = data.index(b'"ts": 12489')
    events, notes = read(data[:at] + b'"t\xff": 12489' + data[at + 11 :])
    whole, _ = read(data)

    assert events == [event for event in whole if event.ts != 12489]
    assert len(notes) == 1
    assert "could not be read" in notes[0] or "not Horovod's" in notes[0]


def test_ready_ticks_tell_how_many_ranks_there_were():
    """The highest rank that was ready, of whatever process set."""
    assert [count_ranks(timeline(name)) for name in REAL] == [2, 2, 2, 4, 2]
    assert count_ranks(b"") == 1


TEXT = st.text(st.characters(codec="utf-8"), max_size=12).filter(lambda text: ".noname." not in text)
NAMES = st.sampled_from(["NEGOTIATE_ALLREDUCE", "ALLREDUCE", "GLOO_ALLREDUCE", "QUEUE", "ERROR", "NEGOTIATE_BARRIER"])
TENSORS = st.sampled_from(
    ["a", "b", "allreduce.noname.7", "allreduce.noname.0", "barrier.noname", "join.noname", 'q"\\']
)


@st.composite
def timelines(draw) -> list[Event]:
    """Draw any events at all, in the order of their times."""
    times = sorted(draw(st.lists(st.integers(0, 400), max_size=40)))
    events = [Event(START, ORIGIN)] if times and draw(st.booleans()) else []
    for ts in times:
        phase, tensor = draw(st.sampled_from([BEGIN, OVER, OVER, TICK, MARK])), draw(TENSORS)
        if phase == MARK:
            events.append(Event(MARK, ts, name=draw(st.sampled_from(["CYCLE_START", "other", "TIMELINE_START", ""]))))
        elif phase == TICK:
            events.append(Event(TICK, ts, tensor, draw(st.sampled_from(["0", "1", "12", "01", "x", "ready"]))))
        elif phase == BEGIN:
            events.append(Event(BEGIN, ts, tensor, draw(NAMES)))
        else:
            events.append(Event(OVER, ts, tensor, "", draw(st.sampled_from(["", "float32[64, 3]", "<unknown>[]"]))))
    return events


@settings(max_examples=120)
@given(timelines())
def test_whatever_a_timeline_holds_comes_back(events):
    """Through text and through spans: orphans, open bars, ticks without a negotiation, marks."""
    data = text_of(events)
    batch, _ = built(events)

    assert read(data)[0] == events
    assert list(events_of([batch])) == events
    json.loads(data)


@given(timelines(), st.lists(st.integers(0, 60), max_size=8), st.booleans())
def test_a_run_in_pieces_is_the_same_timeline(events, borders, is_compacted):
    """Wherever it is cut, and also where what is outside any step comes last, as in a compacted run."""
    batch, _ = built(events)
    if is_compacted:
        batch = batch.take(np.lexsort((batch["start"], batch["step"])))
    cuts = sorted({0, *borders})
    pieces = [batch.take(slice(*cut)) for cut in zip_longest(cuts, cuts[1:])]

    assert list(events_of(pieces)) == list(events_of([batch]))


@settings(max_examples=60)
@given(st.lists(TEXT, min_size=1, max_size=4, unique=True))
def test_any_name_is_written_as_json(names):
    """Control characters, quotes, what looks like an escape."""
    events = [Event(BEGIN, number, name, "ALLREDUCE") for number, name in enumerate(names)]

    assert read(text_of(events))[0] == events
    assert len(json.loads(text_of(events))) == 3 * len(names)


# -- spans --------------------------------------------------------------------------------------


def test_spans_of_an_operation_are_those_of_the_contract():
    """The operation from the first rank ready to its end; below it the negotiation, its ticks, the bar, activities."""
    events, _ = read(timeline("hvd_real_HEAD_reinit_gen0"))
    batch, notes = built(events)
    names = {int(row["span_id"]): batch.descriptor_of(i).name for i, row in enumerate(batch.rows)}
    origin = events[0].ts * 1000
    spans = [
        (
            batch.descriptor_of(i).kind,
            batch.descriptor_of(i).name,
            names.get(int(row["parent_id"]), ""),
            int(row["start"] - origin) // 1000,
            int(row["end"] - origin) // 1000,
            int(row["size"]) if row["level"] != s.Level.STEP else 0,
            int(row["a"]),
        )
        for i, row in enumerate(batch.rows)
    ]
    at = [event.ts for event in events]

    assert notes == []
    assert sorted(spans, key=lambda span: (span[3], -span[4], span[1])) == sorted(
        [
            ("tick", "TIMELINE_START", "", 0, 0, 0, -1),
            ("step", "rank.step", "", at[1], at[-1], 0, 0),
            ("collective", "allreduce", "rank.step", at[1], at[-1], 12, 0),
            ("phase", "NEGOTIATE_ALLREDUCE", "allreduce", at[1], at[4], 0, 0),
            ("tick", "ready", "NEGOTIATE_ALLREDUCE", at[2], at[2], 0, int(events[2].name)),
            ("tick", "ready", "NEGOTIATE_ALLREDUCE", at[3], at[3], 0, int(events[3].name)),
            ("phase", "ALLREDUCE", "allreduce", at[5], at[8], 12, 0),
            ("phase", "GLOO_ALLREDUCE", "ALLREDUCE", at[6], at[7], 0, 0),
        ],
        key=lambda span: (span[3], -span[4], span[1]),
    )


@pytest.mark.parametrize("name", ["horovod_mpi_np2", "horovod_mpi_np2_straggler_nocache"])
def test_operations_are_as_the_truth_says(name):
    """Each tensor as often as the program called for it, each step of the program one of ours."""
    told = [truth(name, rank) for rank in range(2)]
    batch, notes = built(read(timeline(name))[0])
    which = np.flatnonzero(batch.is_kind(s.COLLECTIVE))
    calls = Counter((batch.descriptor_of(i).name, batch.descriptor_of(i).tensor) for i in which.tolist())
    steps = batch.rows[batch.is_kind(s.STEP)]
    begins = np.array([[step[1] * 1000 for step in of_rank["steps"]] for of_rank in told])
    allreduces = batch.rows[batch.lookup(lambda d: d.name == "allreduce", bool)]
    # The first rank that is ready begins a negotiation, and ranks begin their steps one after the other.
    earliest, latest = begins.min(axis=0), np.append(begins.max(axis=0)[1:], 1 << 62)

    assert notes == []
    assert dict(calls) == {(op, f"{op}.{tensor}"): n for op, tensor, n in told[0]["counts_by_op_and_name"]}
    assert steps["step"].tolist() == list(range(20))
    assert len(allreduces) == 240
    assert bool(np.all(earliest[allreduces["step"]] <= allreduces["start"]))
    assert bool(np.all(allreduces["start"] < latest[allreduces["step"]]))


def test_every_collective_of_horovod_is_counted():
    """Grouped, unnamed, uneven, in error, barrier and join: as often as the program called."""
    told = truth("horovod_gloo_np2_ops", 0)["counts_by_op"]
    batch, _ = built(read(timeline("horovod_gloo_np2_ops"))[0])
    which = np.flatnonzero(batch.is_kind(s.COLLECTIVE)).tolist()
    calls = Counter(batch.descriptor_of(i).name for i in which)
    grouped = sum("grouped" in batch.descriptor_of(i).tensor for i in which)

    assert grouped == 3 * told["grouped_allreduce"]  # three tensors in each group
    assert calls == {
        **{name: told[name] for name in ("allgather", "broadcast", "alltoall", "reducescatter")},
        "allreduce": told["allreduce"] - 1 + grouped,
        "adasum": 1,  # an allreduce with another operator
        "barrier": 3,
        "join": 1,
    }


def test_an_operation_that_failed_is_an_error():
    """Horovod answers with ERROR where ranks do not agree; the operation is the one that was asked for."""
    batch, _ = built(read(timeline("hvd_real_HEAD_gloo2_allops"))[0])
    failed = np.flatnonzero(batch["flags"] & s.Flag.ERROR != 0).tolist()

    assert [(batch.descriptor_of(i).kind, batch.descriptor_of(i).name) for i in failed] == [("collective", "allreduce")]


def test_process_sets_share_the_timeline():
    """Operations of a set of which rank 0 is a member are there, those of others are not."""
    batch, _ = built(read(timeline("horovod_mpi_np4_psets"))[0])
    which = np.flatnonzero(batch.is_kind(s.COLLECTIVE)).tolist()

    assert Counter(batch.descriptor_of(i).tensor for i in which) == {"allreduce.global": 5, "allreduce.in.set": 5}
    assert [int(batch["seq"][i]) for i in which] == [n for n in range(1, 6) for _ in range(2)]


def test_unnamed_tensors_do_not_grow_the_table():
    """Horovod numbers them without end; the number is their operation's sequence number."""
    events = [
        Event(phase, 10 * n + k, f"allreduce.noname.{n}", name)
        for n in range(500)
        for k, (phase, name) in enumerate(
            [(BEGIN, "NEGOTIATE_ALLREDUCE"), (OVER, ""), (BEGIN, "ALLREDUCE"), (OVER, "")]
        )
    ]
    batch, _ = built(events)
    operations = batch.rows[batch.is_kind(s.COLLECTIVE)]

    assert len(batch.descriptors) == 4
    assert operations["seq"].tolist() == list(range(500))
    assert list(events_of([batch])) == events
    assert unfold(*fold("a.noname.17_2of3")) == "a.noname.17_2of3"
    assert unfold("a.noname.Net.weight", 1) == "a.noname.Net.weight"


def test_what_has_no_other_half_is_kept_and_told():
    """Bars that a kill left open are cut off, ends of what began before the file are moments."""
    (killed, said), (late, also) = (
        built(read(timeline(name))[0]) for name in ("horovod_mpi_np2_sigkill", "hvd_real_HEAD_dynamic_orphan_X_E")
    )
    open_bars = (killed["flags"] & s.Flag.TRUNCATED != 0) & killed.is_kind(s.PHASE)

    assert (int(open_bars.sum()), said) == (
        23,
        ["bars still open at the end of the file, marked as cut off: 23"],
    )
    assert also == ["ends without a begin in the file, shown without a duration: 1"]
    assert [d.name for d in late.descriptors if d.kind == s.TICK] == ["TIMELINE_START", "ready", "END"]


def test_a_clock_that_goes_back_is_told():
    """No event is lost; they come back in the order of their times."""
    events = [Event(BEGIN, 20, "a", "ALLREDUCE"), Event(BEGIN, 10, "b", "ALLREDUCE"), Event(OVER, 30, "a")]
    batch, notes = built(events)

    assert list(events_of([batch])) == [events[1], events[0], events[2]]
    assert "events with an earlier time than the one before them: 1" in notes


def test_cycle_marks_are_ticks_outside_any_step():
    """One for each round of rank 0's background thread."""
    batch, _ = built(read(timeline("hvd_real_HEAD_sigkill_rank0_cycles"))[0])
    marks = batch.rows[batch.lookup(lambda d: d.name == "CYCLE_START", bool)]

    assert len(marks) == timeline("hvd_real_HEAD_sigkill_rank0_cycles").count(b"CYCLE_START")
    assert set(marks["step"].tolist()) == {NO_STEP}


@pytest.mark.parametrize("name", SMALL)
def test_children_lie_in_their_parents(name):
    """As viewers nest them, down to the nanosecond: what the file tells in one microsecond is in its order."""
    batch, _ = built(read(timeline(name))[0])
    row_of = {int(number): i for i, number in enumerate(batch["span_id"].tolist())}
    for row in batch.rows[batch["parent_id"] != 0]:
        parent = batch.rows[row_of[int(row["parent_id"])]]
        assert parent["start"] <= row["start"] <= row["end"] <= parent["end"]

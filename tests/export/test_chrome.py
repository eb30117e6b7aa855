"""Chrome traces: what is drawn where, and that the viewers agree."""

import gzip
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from otel_dltrace.export.chrome.flows import FLOW_DTYPE, Flows
from otel_dltrace.export.chrome.writer import write_chrome
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import Process, SpanBatch, fill_ids
from tests.support.chrome_batches import (
    ALL_REDUCE,
    DESCRIPTORS,
    FORWARD,
    MS,
    PUSH,
    SEND,
    STEP,
    WALL,
    by_lane,
    make_batch,
    rank_spans,
    span,
    two_ranks,
    written,
)
from tests.support.chrome_rules import ns


def test_two_ranks_are_drawn_as_ever(tmp_path, assert_golden):
    """A step of two ranks gives the golden file."""
    path = tmp_path / "trace.json"
    write_chrome(two_ranks(), path)
    assert_golden("two_ranks.chrome.json", path.read_text())


def test_perfetto_draws_the_steps_of_each_rank_above_all(tmp_path):
    """It takes the thread that has its process's number for the main one, whatever its place."""
    events = written(tmp_path / "trace.json", two_ranks())["traceEvents"]
    main = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["tid"] == e["pid"]}

    assert main == {1: "steps", 2: "steps"}


def test_every_span_is_on_the_lane_where_it_belongs(tmp_path):
    """Steps, stages, operations with their phases; what overlaps goes to a further lane."""
    trace = written(tmp_path / "trace.json", two_ranks())
    lanes = {
        lane: [(name, (start - 86_400_000 * MS) / MS, (end - start) / MS) for start, end, name in slices]
        for (pid, lane), slices in by_lane(trace).items()
        if pid == 1
    }
    assert lanes == {
        "steps": [("rank.step", 0, 100)],
        "stages": [("dataloader_next", 0, 10), ("forward", 10, 50)],
        "stages 2": [("backward", 30, 70)],
        "operations": [
            ("all_reduce", 40, 30),
            ("NEGOTIATE_ALLREDUCE", 40, 5),
            ("PUSH", 45, 15),
            ("wait", 60, 10),
            ("all_reduce", 91, 1),
        ],
        "operations 2": [("all_reduce", 50, 40)],
        "phases": [("PUSH", 50, 15), ("NEGOTIATE_ALLREDUCE", 95, 2.000001)],
    }


def test_what_was_cut_says_by_how_much(tmp_path):
    """Only children that stick out of their parent are shortened, and their arguments name the ns."""
    trace = written(tmp_path / "trace.json", two_ranks())
    cut = [(e["name"], e["args"]["clamped_ns"]) for e in trace["traceEvents"] if "clamped_ns" in e.get("args", {})]
    assert cut == [("backward", 4 * MS), ("wait", 5 * MS)] * 2


def test_a_collective_is_joined_across_ranks(tmp_path):
    """An arrow goes from the rank that began a collective first to the one that began it last."""
    trace = written(tmp_path / "trace.json", two_ranks())
    flows = [e for e in trace["traceEvents"] if e["ph"] in "stf"]
    ids = {
        e["args"]["dl.comm.seq"]: e["args"]["dl.comm.collective_id"] for e in trace["traceEvents"] if "seq" in str(e)
    }
    first, second = (f"0x{ids[seq]}" for seq in (1, 2))
    assert sorted((e["id"], e["ph"], e["pid"], ns(e["ts"])) for e in flows) == sorted(
        (number, phase, pid, (86_400_000 + (40 if number == first else 50) + (3 if pid == 2 else 0)) * MS)
        for number in (first, second)
        for phase, pid in (("s", 1), ("f", 2))
    )


def test_many_ranks_share_one_arrow(tmp_path):
    """Between the first and the last rank an arrow has steps."""
    batches = [make_batch(rank, [span(ALL_REDUCE, 10 + rank, 50, seq=1)]) for rank in (2, 0, 3, 1)]
    trace = written(tmp_path / "trace.json", batches)
    assert [(e["ph"], e["pid"]) for e in trace["traceEvents"] if e["ph"] in "stf"] == [
        ("s", 1),
        ("t", 2),
        ("t", 3),
        ("f", 4),
    ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param('a "quoted\\" name', id="quotes"),
        pytest.param("nul \0 and \x1f and\nnewline", id="control characters"),
        pytest.param("100 %d %s %% {}", id="format signs"),
        pytest.param("gradient 🚀 ü 勾配 \u2028", id="emoji"),
        pytest.param("</script>", id="markup"),
    ],
)
def test_any_name_is_kept(tmp_path, name):
    """Names of tensors, errors and spans come back as they were."""
    descriptors = (Descriptor(s.COLLECTIVE, name, tensor=name, group=name),)
    batch = make_batch(0, [span(0, 1, 2, error=1, seq=1)], descriptors, (("", ""), (name, name)))
    [event] = [e for e in written(tmp_path / "t.json", [batch])["traceEvents"] if e["ph"] == "X"]
    args = event["args"]
    assert [event["name"], args["dl.tensor.name"], args["dl.comm.group.id"], args["error.type"]] == [name] * 4


def test_a_lone_surrogate_becomes_a_question_mark(tmp_path):
    """No viewer that reads UTF-8 takes a lone surrogate."""
    batch = make_batch(0, [span(0, 1, 2)], (Descriptor(s.PHASE, "file \udcff name"),))
    assert [e["name"] for e in written(tmp_path / "t.json", [batch])["traceEvents"] if e["ph"] == "X"] == [
        "file ? name"
    ]


def test_a_name_of_a_megabyte_is_written_once_for_each_span(tmp_path):
    """Names far longer than any buffer neither break the file nor widen the lines of others."""
    long = Descriptor(s.PHASE, "x" * 1_000_000)
    rows = [span(0 if i % 50 == 0 else 1, i, i + 1) for i in range(200)]
    trace = written(tmp_path / "t.json", [make_batch(0, rows, (long, Descriptor(s.PHASE, "y")))])
    names = Counter(e["name"] for e in trace["traceEvents"] if e["ph"] == "X")
    assert names == {long.name: 4, "y": 196}


def test_metrics_are_counters(tmp_path):
    """A metric of the run is a track of its process, with a series for each tensor it is about."""
    descriptors = (Descriptor(s.METRIC, "queue"), Descriptor(s.METRIC, "credit", tensor="w"), Descriptor(s.PHASE, "p"))
    rows = [span(1, 3, 0, size=7), span(0, 2, 0, size=1 << 40), span(2, 1, 4), span(0, 4, 0, size=0)]
    trace = written(tmp_path / "t.json", [make_batch(0, rows, descriptors)])
    counters = [
        (e["pid"], e["name"], e["ts"] - 86_400_000_000, e["args"]) for e in trace["traceEvents"] if e["ph"] == "C"
    ]
    assert counters == [
        (1, "queue", 1000, {"value": 1 << 40}),
        (1, "credit", 2000, {"w": 7}),
        (1, "queue", 3000, {"value": 0}),
    ]


def test_arrows_are_the_same_when_they_do_not_fit_in_memory(tmp_path):
    """Ends that were put aside in files give the arrows that they give in memory."""
    rng = np.random.default_rng(3)
    told = []
    for room in (1 << 20, 10):
        with ExitStack() as files:
            flows = Flows(files, room)
            rng = np.random.default_rng(3)
            for pid in range(1, 5):
                ends = np.zeros(500, FLOW_DTYPE)
                ends["id"], ends["ns"], ends["pid"], ends["tid"] = (
                    rng.integers(0, 300, 500),
                    rng.integers(1, 99, 500),
                    pid,
                    1,
                )
                flows.add(ends)
            lines = b"".join(text for text, _ in flows.lines()).decode().split(",\n")[1:]
        told.append(sorted(lines))
    assert told[0] == told[1]
    assert len(told[0]) > 500


def test_gz_is_packed_and_the_same_each_time(tmp_path):
    """A name that ends in .gz gives a gzip file of the same text, without time stamp."""
    plain, packed, again = (tmp_path / name for name in ("t.json", "t.json.gz", "u.json.gz"))
    for path in (plain, packed, again):
        write_chrome(two_ranks(), path)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.read_bytes() == again.read_bytes()


def test_a_failure_leaves_no_file(tmp_path):
    """A trace that could not be completed is not there, and the one before it still is."""

    def broken() -> Iterator[SpanBatch]:
        yield from two_ranks()
        raise OSError("disk on fire")

    path = tmp_path / "t.json"
    path.write_text("older")
    with pytest.raises(OSError, match="disk on fire"):
        write_chrome(broken(), path)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("t.json", "older")]


@pytest.mark.parametrize("batches", [[], [make_batch(0, [])]], ids=["no batch", "an empty batch"])
def test_nothing_recorded_is_an_empty_trace(tmp_path, batches):
    """Without spans the file is a valid trace with no events."""
    assert written(tmp_path / "t.json", batches)["traceEvents"] == []


def test_an_open_span_is_drawn_as_a_moment(tmp_path):
    """A span without end, of an unbound process, with foreign numbers, neither crashes nor runs backwards."""
    batch = make_batch(0, [span(ALL_REDUCE, 5, 0), span(99, 6, 7, step=NO_STEP, source=9, error=77)])
    batch = SpanBatch(batch.rows, batch.descriptors, Process(5, None, pid=42))
    trace = written(tmp_path / "t.json", [batch])
    assert [(e["name"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"] == [
        ("all_reduce", 0),
        ("other", 1000),
    ]
    assert trace["traceEvents"][0]["args"] == {"name": "pid 42 (localhost)"}


def test_a_damaged_start_leaves_the_others_where_they_are(tmp_path):
    """A flipped bit, in a file without checksums, makes a start centuries early."""
    whole, damaged = make_batch(0, [span(ALL_REDUCE, 1, 2)]), make_batch(0, [span(PUSH, 3, 7), span(ALL_REDUCE, 1, 2)])
    damaged.rows["start"][0] += np.int64(-(1 << 63))
    drawn = [
        [event["ts"] for event in written(tmp_path / "t.json", [batch])["traceEvents"] if event["name"] == "all_reduce"]
        for batch in (whole, damaged)
    ]
    assert drawn[0] == drawn[1] != []


@pytest.mark.parametrize("order", [slice(None), slice(None, None, -1)], ids=["first the old one", "last the old one"])
def test_runs_of_other_years_have_a_zero_of_their_own(tmp_path, order):
    """Where a run is 50 years behind zero, a double tells no ns; ranks of one run keep theirs in common."""
    new = [make_batch(rank, rank_spans(1000 + rank)) for rank in (0, 1)]
    undated = {rank: Process(7 + rank, new[rank].process.bind, "node-b") for rank in (0, 1)}
    runs = [[replace(make_batch(rank, rank_spans(rank)), process=undated[rank]) for rank in (0, 1)], new]

    trace = written(tmp_path / "trace.json", [batch for run in runs[order] for batch in run])

    about = trace["otherData"]
    zeros = {p["pid"]: int(p.get("base_unix_ns", about["base_unix_ns"])) for p in about["processes"]}
    begins = {e["pid"]: zeros[e["pid"]] + ns(e["ts"]) for e in trace["traceEvents"] if e["name"] == "rank.step"}
    assert sorted(begins.values()) == [0, MS, WALL + 1000 * MS, WALL + 1001 * MS]
    assert len(set(zeros.values())) == 2


def test_a_phase_after_its_operation_keeps_its_length(tmp_path):
    """Where only the issue of an operation is known, its device phase comes later: drawn beside it, whole."""
    batch = make_batch(0, [span(ALL_REDUCE, 1, 2), span(PUSH, 3, 7, 1)])
    lanes = by_lane(written(tmp_path / "t.json", [batch]))
    assert [(lane, name, end - start) for (_, lane), [(start, end, name)] in lanes.items()] == [
        ("operations", "all_reduce", 1 * MS),
        ("phases", "PUSH", 4 * MS),
    ]


def test_a_moment_is_no_child_of_what_begins_with_it(tmp_path):
    """Two operations that begin together are on two lanes, though one took no time."""
    batch = make_batch(0, [span(ALL_REDUCE, 1, 1), span(SEND, 1, 2)])
    lanes = by_lane(written(tmp_path / "t.json", [batch]))
    assert {lane: [name for *_, name in slices] for (_, lane), slices in lanes.items()} == {
        "operations": ["all_reduce"],
        "operations 2": ["send"],
    }


def test_evaluation_before_its_step_keeps_its_length(tmp_path):
    """A stage outside its step is not cut to nothing."""
    batch = make_batch(0, [span(STEP, 100, 200), span(FORWARD, 10, 90)])
    trace = written(tmp_path / "t.json", [batch])
    assert {e["name"]: e["dur"] for e in trace["traceEvents"] if e["ph"] == "X"}["forward"] == 80_000


def test_processes_and_clock_are_described(tmp_path):
    """Ranks are processes in order, from pid 1; the rest is in otherData."""
    trace = written(tmp_path / "t.json", list(reversed(two_ranks())))
    metadata = [(e["pid"], e["name"], *e["args"].values()) for e in trace["traceEvents"] if e["name"][:7] == "process"]
    assert sorted(metadata) == [
        (1, "process_labels", "generation 2"),
        (1, "process_name", "rank 0 (node-a)"),
        (1, "process_sort_index", 0),
        (2, "process_labels", "generation 2"),
        (2, "process_name", "rank 1 (node-a)"),
        (2, "process_sort_index", 1),
    ]
    assert trace["otherData"] == {
        "writer": "otel_dltrace",
        "job": "job-1",
        "job_name": "bert",
        "generation": "2.0011223344556677",
        "base_unix_ns": str(WALL + 1003 * MS - 86_400_000 * MS),
        "processes": [
            {
                "pid": r + 1,
                "name": f"rank {r} (node-a)",
                "process.pid": 100 + r,
                "clock_uncertainty_ns": 25,
                "spans": 13,
            }
            for r in (1, 0)
        ],
    }


def test_a_process_of_two_generations_has_both_in_its_label(tmp_path):
    """A process group that is made anew makes a run of its own; the process, and its lanes, stay."""
    first, second = make_batch(0, [span(STEP, 1, 2)]), make_batch(0, [span(STEP, 3, 4)])
    bind = replace(second.process.bind, generation="3.00")
    second = SpanBatch(second.rows, second.descriptors, replace(second.process, bind=bind))
    trace = written(tmp_path / "t.json", [first, second, first])
    labels = [e["args"]["labels"] for e in trace["traceEvents"] if e["name"] == "process_labels"]
    assert labels == ["generation 2", "generation 2, generation 3"]


def test_a_restarted_rank_is_a_process_of_its_own(tmp_path):
    """Two processes with one rank never share lanes."""
    first, second = make_batch(0, [span(STEP, 1, 2)]), make_batch(0, [span(STEP, 1, 2)])
    second = SpanBatch(second.rows, second.descriptors, Process(77, second.process.bind, "node-b"))
    trace = written(tmp_path / "t.json", [first, second])
    assert [e["pid"] for e in trace["traceEvents"] if e["ph"] == "X"] == [1, 1_000_001]


def test_progress_adds_up_to_the_rows(tmp_path):
    """Progress is told in rows done since the last call."""
    told: list[int] = []
    write_chrome(two_ranks(), tmp_path / "t.json", told.append)
    assert sum(told) == 26


SPANS = st.lists(
    st.builds(
        lambda descriptor, start, length, parent, step: {
            "descriptor": descriptor,
            "start": start,
            "end": start + length if length >= 0 else 0,
            "parent_no": parent,
            "step": step,
            "seq": 1,
        },
        st.integers(0, len(DESCRIPTORS)),
        st.integers(1_000_000, 1_000_060) | st.integers(0, 10**16),
        st.integers(-1, 30) | st.integers(0, 1_000_000),
        st.integers(0, 25),
        st.sampled_from([0, 0, 0, 1, NO_STEP]),
    ),
    max_size=25,
)


A_DAY_LATER = [(0, [span(PUSH, 86_400_001, 86_400_002)]), (0, [span(PUSH, 0, 86_400_002), span(PUSH, 0.5, 0.75)])]


@settings(max_examples=150)
@example(A_DAY_LATER)
@given(st.lists(st.tuples(st.integers(0, 2), SPANS), max_size=4))
def test_slices_nest_whatever_was_recorded(tmp_path, batches):
    """No viewer has a complaint, whatever the batches; each span is drawn once, children only shortened."""
    made = [make_batch(rank, spans) for rank, spans in batches]
    trace = written(tmp_path / "t.json", made)
    drawn = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    expected = [
        (f"{int(row['span_id']):016x}", max(0, int(row["end"]) - int(row["start"])))
        for batch in made
        for row, tick in zip(batch.rows, batch.is_kind(s.TICK), strict=True)
        if not tick
    ]
    assert Counter((e["args"]["span_id"], ns(e["dur"]) + e["args"].get("clamped_ns", 0)) for e in drawn) == Counter(
        expected
    )


LARGE = """
import resource, sys
from pathlib import Path
import numpy as np
from tests.support.chrome_batches import ALL_REDUCE, PUSH, make_batch
from otel_dltrace.export.chrome.writer import write_chrome
from otel_dltrace.model.spans import fill_ids

def batches(count, n=30_000):
    for step in range(count):
        batch = make_batch(0, [{}] * n)
        at = np.arange(n)
        batch.rows["step"] = step
        batch.rows["descriptor"] = np.where(at % 3, PUSH, ALL_REDUCE)
        batch.rows["parent_no"] = np.where(at % 3, at - at % 3 + 1, 0)
        batch.rows["start"] = step * 10**9 + at * 1000
        batch.rows["end"] = batch.rows["start"] + np.where(at % 3, 900, 3500)
        fill_ids(batch.rows, batch.descriptors, batch.process)
        yield batch

peaks = []
for count in (1, 10):
    write_chrome(batches(count), Path(sys.argv[1]))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(peaks[0], peaks[1])
"""


def test_memory_does_not_grow_with_the_trace(tmp_path):
    """Ten batches of 30,000 spans need no more than one, give or take 20 MB."""
    path = tmp_path / "t.json"
    command = [sys.executable, "-c", LARGE, str(path)]
    one, ten = map(int, subprocess.run(command, check=True, capture_output=True, text=True).stdout.split())
    assert path.read_bytes().count(b'"ph":"X"') == 300_000
    assert ten - one < 20_000


LANES = {
    "steps": ["rank.step"],
    "stages": ["dataloader_next", "forward"],
    "stages 2": ["backward"],
    "operations": ["all_reduce", "NEGOTIATE_ALLREDUCE", "ready", "PUSH", "wait", "all_reduce"],
    "phases": ["PUSH", "NEGOTIATE_ALLREDUCE"],
    "operations 2": ["all_reduce"],
}


@pytest.mark.parametrize("name", ["two.json", "two.json.gz"])
def test_the_viewer_of_chrome_shows_the_lanes(tmp_path, viewers, name):
    """chrome://tracing's own viewer, in a real Chromium, has each rank with its lanes, arrows, and no warning."""
    write_chrome(two_ranks(), tmp_path / name)
    shown = viewers.catapult(tmp_path / name)
    assert shown["warnings"] == []
    assert [(p["pid"], p["name"], p["labels"]) for p in shown["processes"]] == [
        (1, "rank 0 (node-a)", ["generation 2"]),
        (2, "rank 1 (node-a)", ["generation 2"]),
    ]
    for process in shown["processes"]:
        lanes = {lane: [title for title, _, _ in slices] for lane, slices in process["lanes"]}
        assert lanes == LANES
        assert list(lanes) == ["steps", "stages", "stages 2", "operations", "operations 2", "phases"]
        operations = dict(process["lanes"])["operations"]
        assert operations[1:5] == [
            ["NEGOTIATE_ALLREDUCE", 5 * MS, "all_reduce"],
            ["ready", 0, "NEGOTIATE_ALLREDUCE"],
            ["PUSH", 15 * MS, "all_reduce"],
            ["wait", 10 * MS, "all_reduce"],
        ]
    assert len(shown["flows"]) == 2
    assert all(source[0] == 1 and target[0] == 2 for source, target in shown["flows"])


@pytest.mark.parametrize("name", ["two.json", "two.json.gz"])
def test_perfetto_shows_the_lanes(tmp_path, viewers, name):
    """Perfetto, in a real Chromium, has the same lanes, and counts neither error nor loss."""
    write_chrome(two_ranks(), tmp_path / name)
    shown = viewers.perfetto(tmp_path / name)
    assert shown["warnings"] == []
    lanes = defaultdict(list)
    for pid, process, lane, title, _, _ in shown["slices"]:
        assert process == f"rank {pid - 1} (node-a)"
        lanes[pid, lane].append(title)
    assert lanes == {(pid, lane): titles for pid in (1, 2) for lane, titles in LANES.items()}
    assert len(shown["flows"]) == 2


def crowded(rank: int, rng: np.random.Generator) -> SpanBatch:
    """Return a batch of 1,000 spans, many shorter than 1 us, with phases that stick out of their parents."""
    n = 1000
    batch = make_batch(rank, [{}] * n)
    rows = batch.rows
    rows["descriptor"] = rng.integers(0, len(DESCRIPTORS), n)
    rows["start"] = 10**9 + rng.integers(0, 500_000, n)
    rows["end"] = rows["start"] + rng.integers(1, 3000, n) ** 2 // 1000 + 1
    children = rng.random(n) < 0.6
    rows["parent_no"] = np.where(children, rng.integers(1, n, n), 0)
    parents = rows["parent_no"][children] - 1
    rows["start"][children] = rows["start"][parents] + rng.integers(-20, 900, len(parents))
    rows["end"][children] = rows["start"][children] + rng.integers(1, 1500, len(parents))
    rows["seq"] = rng.integers(1, n // 2, n)
    fill_ids(rows, batch.descriptors, batch.process)
    return batch


def test_both_viewers_take_every_slice_as_it_is(tmp_path, viewers):
    """In a crowded trace of three ranks no slice is dropped, cut or moved, and every arrow finds its slices."""
    rng = np.random.default_rng(7)
    path = tmp_path / "crowded.json"
    trace = written(path, [crowded(rank, rng) for rank in range(3)])
    slices = Counter((e["pid"], e["name"], ns(e.get("dur", 0))) for e in trace["traceEvents"] if e["ph"] in "Xi")
    arrows = sum(e["ph"] in "tf" for e in trace["traceEvents"])
    assert arrows > 0

    perfetto = viewers.perfetto(path)
    assert perfetto["warnings"] == []
    assert Counter((pid, name, length) for pid, _, _, name, length, _ in perfetto["slices"]) == slices
    assert len(perfetto["flows"]) == arrows

    chrome = viewers.catapult(path)
    assert chrome["warnings"] == []
    seen = ((p["pid"], name, length) for p in chrome["processes"] for _, lane in p["lanes"] for name, length, _ in lane)
    assert Counter(seen) == slices
    assert len(chrome["flows"]) == arrows

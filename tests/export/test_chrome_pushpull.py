"""Push_pulls in Chrome traces: a lane for each tensor, below it one for each partition, stages in colour."""

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from otel_dltrace.export.chrome.marks import COLOURS, ERROR_COLOUR, QUEUE_COLOURS, TRUNCATED_COLOUR, WAIT_COLOUR
from otel_dltrace.export.foreign.byteps_in import Options, import_byteps
from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from otel_dltrace.model.queue_types import QueueType
from tests.support.byteps_files import START_STEP, unpack
from tests.support.chrome_batches import DAY, lanes_of, make_batch, span, written
from tests.support.chrome_rules import PALETTE


def of(tensor: str, key: int, queue: str = "") -> Descriptor:
    """Return the descriptor of a push_pull of *tensor*, or of its stage *queue*."""
    kind, name = (s.PHASE, queue) if queue else (s.COLLECTIVE, s.PUSH_PULL)
    return Descriptor(kind, name, backend="pushpull", tensor=tensor, key=key, queue_type=queue)


DESCRIPTORS = (
    RANK_STEP,
    of("bias", 4),
    of("weight", 3),
    of("weight", 3, "PUSH"),
    of("weight", 3, "PULL"),
    of("loss", -1),
    Descriptor(s.COLLECTIVE, "all_reduce", backend="gloo"),
    Descriptor(s.PHASE, s.WAIT),
    of("weight", 3, "SEND"),
)
STEP, BIAS, WEIGHT, PUSH, PULL, LOSS, ALL_REDUCE, WAIT, SEND = range(len(DESCRIPTORS))


def stage(descriptor: int, start: float, end: float, partition: int, **columns: Any) -> dict[str, Any]:
    """Return a stage of a partition, below the span with number 2."""
    return span(descriptor, start, end, 2, partition=partition, level=s.Level.PARTITION, **columns)


SPANS = [
    span(STEP, 0, 100, size=0),
    span(WEIGHT, 10, 50, seq=1),
    stage(PUSH, 12, 20, 0),
    stage(PULL, 20, 30, 0),
    stage(PUSH, 14, 22, 1),
    stage(PULL, 25, 55, 1),  # it ends after its operation: never cut
    span(WAIT, 40, 50, 2),
    span(BIAS, 20, 40, seq=1),
    span(WEIGHT, 30, 60, seq=2),  # begun again before it was done
    span(ALL_REDUCE, 10, 20, seq=1),
    span(LOSS, 70, 80, seq=1),
]


def test_a_tensor_has_a_lane_and_each_of_its_partitions_one_below(tmp_path):
    """In the order of declaration; what is no push_pull is drawn as ever."""
    trace = written(tmp_path / "t.json", [make_batch(0, SPANS, DESCRIPTORS)])

    lanes = lanes_of(trace)
    assert (list(lanes), lanes) == (
        [
            "steps",
            "operations",
            "weight total",
            "weight total 2",
            "weight key 196608",
            "weight key 196609",
            "bias total",
            "loss total",
        ],
        {
            "steps": [("rank.step", 0, 100)],
            "operations": [("all_reduce", 10, 20)],
            "weight total": [("push_pull", 10, 50), ("wait", 40, 50)],
            "weight total 2": [("push_pull", 30, 60)],
            "weight key 196608": [("PUSH", 12, 20), ("PULL", 20, 30)],
            "weight key 196609": [("PUSH", 14, 22), ("PULL", 25, 55)],
            "bias total": [("push_pull", 20, 40)],
            "loss total": [("push_pull", 70, 80)],
        },
    )


def test_steps_are_marked_across_all_lanes(tmp_path):
    """With a moment of the whole process, only where there are push_pulls."""
    steps = [span(STEP, 0, 10, step=3, size=0), span(STEP, 10, 20, step=4, size=0), span(STEP, 0, 1, step=NO_STEP)]
    plain = written(tmp_path / "plain.json", [make_batch(0, steps, DESCRIPTORS)])
    trace = written(tmp_path / "t.json", [make_batch(0, [*steps, span(LOSS, 5, 6)], DESCRIPTORS)])

    assert [e for e in plain["traceEvents"] if e["ph"] == "i"] == []
    marks = [e for e in trace["traceEvents"] if e["ph"] == "i"]
    assert [(e["name"], e["s"], e["ts"] / 1000 - DAY, e["args"]) for e in marks] == [
        ("step 3", "p", 0, {"dl.step": 3}),
        ("step 4", "p", 10, {"dl.step": 4}),
    ]


def test_lanes_stay_from_batch_to_batch(tmp_path):
    """A tensor has the same lanes in every step, and each is named once."""
    batches = [
        make_batch(0, [span(WEIGHT, t, t + 9, step=t, seq=t), *_stages_at(t)], DESCRIPTORS) for t in (100, 200, 300)
    ]

    trace = written(tmp_path / "t.json", batches)

    named = Counter(e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name")
    assert named == {"weight total": 1, "weight key 196608": 1, "weight key 196609": 1}
    assert {lane: len(slices) for lane, slices in lanes_of(trace).items()} == {
        "weight total": 3,
        "weight key 196608": 3,
        "weight key 196609": 3,
    }


def _stages_at(t: int) -> list[dict[str, Any]]:
    return [stage(PUSH, t + 1, t + 2, partition) | {"parent_no": 1} for partition in (0, 1)]


def test_every_queue_type_has_a_colour_of_its_own():
    """Viewers know it, and nothing else in these lanes has it."""
    taken = {*COLOURS.values(), WAIT_COLOUR, ERROR_COLOUR, TRUNCATED_COLOUR} - {COLOURS[s.P2P], COLOURS[s.STAGE]}

    assert set(QUEUE_COLOURS) == set(QueueType)
    assert len(set(QUEUE_COLOURS.values())) == len(QueueType)
    assert set(QUEUE_COLOURS.values()) <= PALETTE - taken


@pytest.mark.parametrize(
    ("descriptor", "flags", "colour"),
    [
        pytest.param(PUSH, 0, QUEUE_COLOURS[QueueType.PUSH], id="a queue type"),
        pytest.param(SEND, 0, COLOURS[s.PHASE], id="a queue type of a branch of BytePS"),
        pytest.param(PUSH, s.Flag.ERROR, ERROR_COLOUR, id="a failure"),
        pytest.param(WEIGHT, 0, COLOURS[s.COLLECTIVE], id="a total"),
    ],
)
def test_a_slice_has_the_colour_of_its_queue(tmp_path, descriptor, flags, colour):
    """What went wrong wins; a type that we do not know is a phase as any other."""
    batch = make_batch(0, [stage(descriptor, 1, 2, 0, flags=flags)], DESCRIPTORS)
    [event] = [e for e in written(tmp_path / "t.json", [batch])["traceEvents"] if e["ph"] == "X"]

    assert event["cname"] == colour


@pytest.mark.parametrize("run", ["byteps_w2_s1", "byteps_w1_l2_nodist"])
def test_an_imported_timeline_looks_as_bytepss_own(tmp_path: Path, run):
    """The same slices on the lanes `total` and partition key of each tensor, in each process, as in comm.json."""
    folder = unpack(run, tmp_path)
    import_byteps([folder], tmp_path / "RUN", Options(first=START_STEP))

    trace = written(tmp_path / "t.json", list(read_run(tmp_path / "RUN")))

    expected = [Counter(_original(path)) for path in sorted(folder.rglob("comm.json"))]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    drawn: dict[int, Counter[Any]] = defaultdict(Counter)
    for e in trace["traceEvents"]:
        lane = names.get((e["pid"], e["tid"]))
        if e["ph"] == "X" and lane != "steps":
            drawn[e["pid"]][lane, e["name"], round(e["dur"])] += 1
    assert [drawn[pid] for pid in sorted(drawn)] == expected


def _original(path: Path) -> list[tuple[str, str, int]]:
    """Return (lane, name, us) of every event of a ``comm.json``, as we name them."""
    found = []
    for e in json.loads(path.read_text())["traceEvents"]:
        tensor = e["pid"].removeprefix("Comm.")
        is_total = e["tid"] == "total"
        lane = f"{tensor} total" if is_total else f"{tensor} key {e['tid']}"
        found.append((lane, s.PUSH_PULL if is_total else e["name"].rpartition(".")[2], e["dur"]))
    return found

"""Horovod in Chrome traces: a lane for each tensor, as in its own timeline, and each rank a process."""

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from otel_dltrace.export.chrome import lanes as lanes_module
from otel_dltrace.export.foreign.horovod_in import import_horovod
from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.formats.horovod_json import BEGIN, OVER, TICK, Reader
from otel_dltrace.formats.horovod_spans import fold
from otel_dltrace.model import activities as h
from otel_dltrace.model import semconv as s
from otel_dltrace.model.operation import RANK_STEP, Descriptor
from tests.support import chromium
from tests.support.chrome_batches import lanes_of, make_batch, span, written
from tests.support.chrome_rules import ns
from tests.support.horovod_files import WHOLE, timeline, unpack


def of(kind: str, name: str, tensor: str) -> Descriptor:
    """Return the descriptor of what Horovod does with *tensor*."""
    group, activity = ("0", "") if kind == s.COLLECTIVE else ("", name)
    return Descriptor(kind, name, group, 2 if group else 0, h.BACKEND, tensor=tensor, activity=activity)


DESCRIPTORS = (
    RANK_STEP,
    of(s.COLLECTIVE, "allreduce", "allreduce.b"),
    of(s.COLLECTIVE, "allreduce", "allreduce.a"),
    of(s.PHASE, "NEGOTIATE_ALLREDUCE", "allreduce.a"),
    Descriptor(s.TICK, h.READY, backend=h.BACKEND, tensor="allreduce.a"),
    of(s.PHASE, "ALLREDUCE", "allreduce.a"),
    of(s.PHASE, "MPI_ALLREDUCE", "allreduce.a"),
    Descriptor(s.PHASE, s.WAIT),
    Descriptor(s.TICK, h.CYCLE_START, backend=h.BACKEND),
)
STEP, B, A, NEGOTIATE, READY, BAR, MPI, WAIT, CYCLE = range(len(DESCRIPTORS))

COORDINATOR = [
    span(STEP, 0, 100, size=0),
    span(A, 10, 60, seq=1),
    span(NEGOTIATE, 8, 30, 2, seq=1),  # the other rank was ready first
    span(READY, 8, 8, 3, seq=1, a=1),
    span(READY, 11, 11, 3, seq=1, a=0),
    span(BAR, 40, 50, 2, seq=1),
    span(MPI, 42, 48, 6, seq=1),
    span(WAIT, 35, 60, 2),
    span(B, 5, 70, seq=1),
    span(A, 80, 90, seq=2),
    span(WAIT, 85, 90, 10),
    span(CYCLE, 7, 7, a=-1),
]
OTHER = [span(STEP, 0, 100, size=0), span(B, 5, 70, seq=1), span(A, 8, 60, seq=1), span(WAIT, 50, 60, 3)]


def test_every_rank_has_a_lane_for_each_tensor(tmp_path: Path) -> None:
    """In the order in which they came; the wait lies beside where Horovod itself tells what the operation does."""
    trace = written(tmp_path / "t.json", [make_batch(0, COORDINATOR, DESCRIPTORS), make_batch(1, OTHER, DESCRIPTORS)])

    coordinator, other = lanes_of(trace), lanes_of(trace, 2)
    assert (list(coordinator), coordinator) == (
        ["steps", "phases", "allreduce.b", "allreduce.a"],
        {
            "steps": [("rank.step", 0, 100)],
            "phases": [("wait", 35, 60)],
            "allreduce.b": [("allreduce", 5, 70)],
            "allreduce.a": [
                ("allreduce", 10, 60),
                ("NEGOTIATE_ALLREDUCE", 10, 30),
                ("ALLREDUCE", 40, 50),
                ("MPI_ALLREDUCE", 42, 48),
                ("allreduce", 80, 90),
                ("wait", 85, 90),
            ],
        },
    )
    assert other == {
        "steps": [("rank.step", 0, 100)],
        "allreduce.b": [("allreduce", 5, 70)],
        "allreduce.a": [("allreduce", 8, 60), ("wait", 50, 60)],
    }
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    ticks = [e for e in trace["traceEvents"] if e["ph"] == "i" and e["cat"] == s.TICK]
    assert [(names[e["pid"], e["tid"]], e["name"], e["args"].get(s.DL_COMM_PEER_RANK)) for e in ticks] == [
        ("operations", "CYCLE_START", None),
        ("allreduce.a", "ready 1", 1),
        ("allreduce.a", "ready 0", 0),
    ]


def test_lanes_stay_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a program names anew without end is drawn as other operations are, once the lanes have been given."""
    monkeypatch.setattr(lanes_module, "MOST_TENSORS", 2)
    named = tuple(of(s.COLLECTIVE, "allreduce", f"allreduce.loss.{i}") for i in range(5))
    batches = [make_batch(0, [span(i, 10 * i, 10 * i + 5, step=i, seq=1)], named) for i in range(5)]

    lanes = lanes_of(written(tmp_path / "t.json", batches))
    assert {lane: len(slices) for lane, slices in lanes.items()} == {
        "operations": 3,
        "allreduce.loss.0": 1,
        "allreduce.loss.1": 1,
    }


FURTHER = re.compile(r"(?<=\.noname\.N) [0-9]+")
"""Unnamed tensors have one name, and so further lanes."""


def drawn(name: str, folder: Path) -> dict[str, Any]:
    """Return the trace of an imported timeline."""
    import_horovod([unpack(name, folder)], folder / "RUN", "", lambda _: None)
    return written(folder / "t.json", list(read_run(folder / "RUN")))


@pytest.mark.parametrize("name", WHOLE)
def test_an_imported_timeline_looks_as_horovods_own(tmp_path: Path, name: str) -> None:
    """The same bars, as long and as deep, and the same ready ticks on the lane of each tensor as in the file."""
    trace = drawn(name, tmp_path)

    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    base = int(trace["otherData"]["base_unix_ns"])
    bars, ticks = Counter[Any](), Counter[Any]()
    for e in trace["traceEvents"]:
        lane = FURTHER.sub("", names.get((e["pid"], e["tid"]), ""))
        if e["ph"] == "X" and s.DL_ACTIVITY in e["args"]:
            assert "clamped_ns" not in e["args"]
            start = base + ns(e["ts"])
            bars[lane, e["name"], (start + ns(e["dur"])) // 1000 - start // 1000] += 1
        elif e["ph"] == "i" and e["name"].startswith(h.READY):
            ticks[lane, int(e["name"].split()[1])] += 1
    assert (bars, ticks) == original(name)


def original(name: str) -> tuple[Counter[Any], Counter[Any]]:
    """Return of a timeline (tensor, name, us) of every bar, and (tensor, rank) of every ready tick."""
    bars, ticks, last = Counter[Any](), Counter[Any](), 0
    under_way: dict[str, list[Any]] = defaultdict(list)

    def close(tensor: str) -> None:
        title, start = under_way[tensor].pop()
        bars[fold(tensor)[0], title, last - start] += 1

    for event in Reader(timeline(name)):
        if event.phase not in (BEGIN, OVER, TICK):
            continue
        last = event.ts
        if event.phase == BEGIN:
            under_way[event.tensor].append((event.name, event.ts))
        elif event.phase == TICK:
            ticks[fold(event.tensor)[0], int(event.name)] += 1
        elif under_way[event.tensor]:
            close(event.tensor)
    for tensor, left in under_way.items():
        while left:
            close(tensor)
    return bars, ticks


def test_the_viewers_nest_it_as_horovods_own(tmp_path: Path, viewers: chromium.Viewers) -> None:
    """chrome://tracing's viewer and Perfetto have the tensors' lanes, and ticks in negotiations."""
    trace = drawn("hvd_real_HEAD_gloo2_allops_cache0", tmp_path)
    expected = Counter(e["name"] for e in trace["traceEvents"] if e["ph"] == "X" or e.get("s") == "t")

    shown = viewers.catapult(tmp_path / "t.json")
    (process,) = shown["processes"]
    lanes = dict(process["lanes"])
    assert shown["warnings"] == []
    assert Counter(title for lane in lanes.values() for title, _, _ in lane) == expected
    assert [(title, parent) for title, _, parent in lanes["allreduce.w1"]][:6] == [
        ("allreduce", None),
        ("NEGOTIATE_ALLREDUCE", "allreduce"),
        ("ready 0", "NEGOTIATE_ALLREDUCE"),
        ("ready 1", "NEGOTIATE_ALLREDUCE"),
        ("ALLREDUCE", "allreduce"),
        ("GLOO_ALLREDUCE", "ALLREDUCE"),
    ]

    perfetto = viewers.perfetto(tmp_path / "t.json")
    assert perfetto["warnings"] == []
    assert Counter(title for _, _, lane, title, _, _ in perfetto["slices"] if lane in lanes) == expected

"""Counters of a Chrome trace: the metrics of hosts and ranks, on the clock of the spans."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from otel_dltrace.export.chrome.events import CHUNK
from otel_dltrace.export.chrome.notes import Note
from otel_dltrace.export.chrome.writer import write_chrome
from otel_dltrace.model import metrics as m
from otel_dltrace.model.metric_batch import MetricBatch, batch_of
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.model.time import Anchor
from tests.support.chrome_batches import ANCHOR, SECOND, sampled
from tests.support.chrome_rules import complaints, ns
from tests.support.runs import MS, Rank

WALL = 1_700_000_000_000_000_000


def two_ranks(host: str = "node-0") -> list[Any]:
    """Return a step of two ranks on one host, of 1 s from 1 s on."""
    return [Rank(r, 2, host, anchor=ANCHOR).step(0, 1000, 2000).stage(0, "forward", 1000, 1900).batch() for r in (0, 1)]


def written(path: Path, batches: Iterable[SpanBatch], metrics: Iterable[MetricBatch] = ()) -> dict[str, Any]:
    """Return what `write_chrome` wrote, which no viewer complains about."""
    events = write_chrome(batches, path, metrics=metrics)
    trace: dict[str, Any] = json.loads(path.read_bytes())
    assert len(trace["traceEvents"]) == events
    assert complaints(trace["traceEvents"]) == []
    return trace


def drawn(trace: dict[str, Any]) -> dict[tuple[str, str], list[tuple[float, int]]]:
    """Return (s after the first step's begin, value) of each track, by the names of process and track."""
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    zero = min(ns(e["ts"]) for e in events if e["ph"] == "X")
    found = defaultdict(list)
    for e in events:
        if e["ph"] == "C":
            ((unit, value),) = e["args"].items()
            found[names[e["pid"]], f"{e['name']} {unit}"].append(((ns(e["ts"]) - zero) / SECOND, value))
    return dict(found)


def test_each_metric_is_a_track_of_its_host_or_rank(tmp_path):
    """A share and a rate hold from the sample before, a level from when it was seen; modes of the CPU are one."""
    disk = {m.DEVICE: "sda", m.DISK_DIRECTION: "write"}
    used = {m.MEMORY_STATE: "used"}
    points = [
        (1.0, m.SYSTEM_CPU_UTILIZATION, 0.25, {m.CPU_MODE: "user"}, -1),
        (1.0, m.SYSTEM_CPU_UTILIZATION, 0.1, {m.CPU_MODE: "system"}, -1),
        (1.0, m.SYSTEM_CPU_UTILIZATION, 0.65, {m.CPU_MODE: "idle"}, -1),
        (1.5, m.SYSTEM_CPU_UTILIZATION, 0.9, {m.CPU_MODE: "user"}, -1),
        (1.5, m.SYSTEM_CPU_UTILIZATION, 0.08, {m.CPU_MODE: "system"}, -1),
        (1.5, m.SYSTEM_CPU_UTILIZATION, 0.02, {m.CPU_MODE: "idle"}, -1),
        (1.0, m.SYSTEM_DISK_IO, 1e6, disk, -1),
        (1.5, m.SYSTEM_DISK_IO, 5e6, disk, -1),
        (2.0, m.SYSTEM_DISK_IO, 2e6, disk, -1),
        (1.25, m.SYSTEM_MEMORY_USAGE, 4e9, used, -1),
        (1.5, m.PROCESS_MEMORY_USAGE, 7e8, {}, 0),
        (1.5, m.PROCESS_MEMORY_USAGE, 8e8, {}, 1),
    ]

    trace = written(tmp_path / "trace.json", two_ranks(), [sampled(points)])

    assert drawn(trace) == {
        ("host node-0", "CPU busy %"): [(0.0, 98)],
        ("host node-0", "memory used bytes"): [(0.25, 4_000_000_000)],
        ("host node-0", "sda disk write bytes/s"): [(0.0, 8_000_000)],
        ("rank 0 (node-0)", "resident memory bytes"): [(0.5, 700_000_000)],
        ("rank 1 (node-0)", "resident memory bytes"): [(0.5, 800_000_000)],
    }


def test_each_host_has_its_own_tracks_and_clock(tmp_path):
    """Two hosts that booted at different times are drawn together where they were at one time."""
    late = Anchor(0, WALL + 5 * SECOND, 30)  # 5 s less since its boot
    other = Rank(1, 2, "node-1", anchor=late).step(0, -4000, -3000).batch()
    memory = {m.MEMORY_STATE: "used"}
    here = sampled([(1.5, m.SYSTEM_MEMORY_USAGE, 1, memory, -1)])
    there = sampled([(-3.5, m.SYSTEM_MEMORY_USAGE, 2, memory, -1)], "node-1")

    trace = written(tmp_path / "trace.json", [two_ranks()[0], other], [here, there])

    assert drawn(trace) == {
        ("host node-0", "memory used bytes"): [(0.5, 1)],
        ("host node-1", "memory used bytes"): [(0.5, 2)],
    }


def test_a_long_track_is_written_in_parts(tmp_path):
    """More values than a part holds are all there, in order."""
    count = 2 * CHUNK + 3
    points = [(1 + n / 1000, m.PROCESS_THREAD_COUNT, n, {}, 0) for n in range(count)]
    trace = written(tmp_path / "trace.json", two_ranks(), [sampled(points)])
    assert [value for _, value in drawn(trace)["rank 0 (node-0)", "threads count"]] == list(range(count))


@pytest.mark.parametrize("metrics", [[], [batch_of([])]], ids=["none", "empty"])
def test_a_run_without_metrics_has_no_counters(tmp_path, metrics):
    """Nothing sampled, nothing drawn; no process stands for the host."""
    trace = written(tmp_path / "trace.json", two_ranks(), metrics)
    assert drawn(trace) == {}
    assert len(trace["otherData"]["processes"]) == 2


def test_what_came_long_before_the_trace_is_left_out(tmp_path):
    """Viewers drop what is before 0, a day before the first span."""
    points = [(at, m.PROCESS_THREAD_COUNT, 1, {}, 0) for at in (-90_000, 1.5)]
    trace = written(tmp_path / "trace.json", two_ranks(), [sampled(points)])
    assert drawn(trace) == {("rank 0 (node-0)", "threads count"): [(0.5, 1)]}


def test_remarks_are_drawn_below_the_rank_they_are_about(tmp_path):
    """On a lane of their own, two where they overlap; one on a process that is not drawn is left out."""
    batches = two_ranks()
    one, other = (batch.process.nonce for batch in batches)
    notes = [
        Note(one, 1100 * MS, 1500 * MS, "slow forward", {"meanwhile": "the CPUs were 99% busy"}),
        Note(one, 1200 * MS, 1300 * MS, "slow residual"),
        Note(other, 1000 * MS, 1001 * MS, "slow forward"),
        Note(4711, 0, 1, "slow forward"),
    ]
    write_chrome(batches, tmp_path / "trace.json", notes=notes)
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert complaints(events) == []
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    zero = min(ns(e["ts"]) for e in events if e["ph"] == "X")
    assert [
        (e["pid"], lanes[e["pid"], e["tid"]], e["name"], (ns(e["ts"]) - zero) // MS, ns(e["dur"]) // MS, e["args"])
        for e in events
        if e.get("cat") == "note"
    ] == [
        (1, "slow stages", "slow forward", 100, 400, {"meanwhile": "the CPUs were 99% busy"}),
        (1, "slow stages 2", "slow residual", 200, 100, {}),
        (2, "slow stages", "slow forward", 0, 1, {}),
    ]


def test_both_viewers_show_the_counters_and_remarks(tmp_path, viewers):
    """Every track under its process with the same times and values, and no warning."""
    path = tmp_path / "trace.json"
    disk = {m.DEVICE: "sda", m.DISK_DIRECTION: "write"}
    points = [(1 + n / 2, m.SYSTEM_DISK_IO, n * n * 1e6, disk, -1) for n in range(4)]
    points += [(1.2 + n / 2, m.PROCESS_MEMORY_USAGE, 7e8 + n, {}, 1) for n in range(3)]
    batches = two_ranks()
    notes = [Note(batches[0].process.nonce, 1100 * MS, 1500 * MS, "slow forward")]
    write_chrome(batches, path, metrics=[sampled(points)], notes=notes)
    events = json.loads(path.read_bytes())["traceEvents"]
    written = sorted(
        (e["pid"], f"{e['name']} {unit}", ns(e["ts"]), value)
        for e in events
        if e["ph"] == "C"
        for unit, value in e["args"].items()
    )

    perfetto = viewers.perfetto(path)
    assert perfetto["warnings"] == []
    assert [tuple(row) for row in perfetto["counters"]] == written
    assert [1, "rank 0 (node-0)", "slow stages", "slow forward", 400 * MS, None] in perfetto["slices"]

    chrome = viewers.catapult(path)
    assert chrome["warnings"] == []
    assert [process["name"] for process in chrome["processes"]] == ["rank 0 (node-0)", "rank 1 (node-0)", "host node-0"]
    first = min(at for *_, at, _ in written)
    seen = [
        (process["pid"], f"{name} {unit}", at, value)
        for process in chrome["processes"]
        for name, samples in process["counters"]
        for unit, at, value in samples
    ]
    earliest = min(at for *_, at, _ in seen)
    assert sorted((pid, name, at - earliest, value) for pid, name, at, value in seen) == [
        (pid, name, at - first, value) for pid, name, at, value in written
    ]

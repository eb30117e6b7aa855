"""The Chrome trace exporter for spans of the OpenTelemetry SDK."""

import gc
import gzip
import itertools
import json
import logging
import math
import os
import random
import resource
import subprocess
import sys
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from otel_dltrace.export.chrome import arrows, live, roots
from otel_dltrace.export.chrome.exporter import ChromeTraceExporter, ChromeTraceExporterFromEnvironment
from otel_dltrace.model.errors import ConfigError
from tests.support.chrome_rules import complaints

DAY = 86_400_000_000_000
T0 = 20_000 * DAY
US = 1000
WEB = Resource({"service.name": "web", "process.pid": 42})
SUCCESS, FAILURE = SpanExportResult.SUCCESS, SpanExportResult.FAILURE


def context(span_id: int, remote: bool = False, trace: int = 1) -> SpanContext:
    """Return the context of the span with that number."""
    return SpanContext(trace, span_id, remote, TraceFlags(1))


def span(number: int, start: Any, end: Any, parent: int | SpanContext = 0, name: str = "", **more: Any) -> ReadableSpan:
    """Return span *number* from *start* to *end*, in us, below the span with number *parent*."""
    times = [T0 + round(at * US) if isinstance(at, (int, float)) and not math.isnan(at) else at for at in (start, end)]
    more.setdefault("resource", WEB)
    more["parent"] = (context(parent) if isinstance(parent, int) else parent) if parent else None
    return ReadableSpan(name or f"span {number}", context(number), start_time=times[0], end_time=times[1], **more)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the events of a file, which must be whole."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict[str, Any]] = json.loads(data)["traceEvents"]
    return events


def exported(path: Path, *batches: Sequence[ReadableSpan], **options: Any) -> list[dict[str, Any]]:
    """Return the events of *batches*, exported one after the other."""
    exporter = ChromeTraceExporter(path, **options)
    assert [exporter.export(batch) for batch in batches] == [SUCCESS] * len(batches)
    exporter.shutdown()
    return read(path)


def lanes(events: list[dict[str, Any]]) -> dict[tuple[int, str], list[str]]:
    """Return the names of the slices and moments of each lane, in order of their begin."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    out = defaultdict(list)
    for e in sorted((e for e in events if e["ph"] in "Xi"), key=lambda e: e["ts"]):
        out[e["pid"], names[e["pid"], e["tid"]]].append(e["name"])
    return dict(out)


def test_a_span_with_all_it_can_have(tmp_path):
    """Times, ids, attributes, events, links, an error: each is where viewers look for it."""
    failed = Status(StatusCode.ERROR, "no such host")
    told = Event("retry", {"n": 1}, timestamp=T0 + 15 * US)
    one = span(1, 0, 100, kind=SpanKind.SERVER)
    two = span(
        2, 10.001, 20, 1, "call", kind=SpanKind.CLIENT, status=failed, events=[told], links=[Link(context(9, trace=7))],
        attributes={"a": True, "b": (1, 2), "c": float("nan"), "d": 1 << 70, "span_id": "mine"},
    )  # fmt: skip
    events = exported(tmp_path / "t.json", [two, one])
    assert complaints(events) == []
    day = DAY / US
    assert events == [
        {"ph": "M", "pid": 42, "tid": 0, "name": "process_name", "args": {"name": "web (pid 42)"}},
        {"ph": "M", "pid": 42, "tid": 0, "name": "process_sort_index", "args": {"sort_index": 3_000_000}},
        {"ph": "M", "pid": 42, "tid": 5, "name": "thread_name", "args": {"name": "spans"}},
        {"ph": "M", "pid": 42, "tid": 5, "name": "thread_sort_index", "args": {"sort_index": 4_000_000}},
        {
            "ph": "X", "pid": 42, "tid": 5, "ts": day, "dur": 100, "name": "span 1", "cat": "server",
            "cname": "rail_response", "args": {"span_id": f"{1:016x}", "trace_id": f"{1:032x}"},
        },
        {
            "ph": "X", "pid": 42, "tid": 5, "ts": day + 10.001, "dur": 9.999, "name": "call", "cat": "client",
            "cname": "terrible",
            "args": {
                "span_id": f"{2:016x}", "trace_id": f"{1:032x}", "parent_id": f"{1:016x}", "a": True, "b": [1, 2],
                "c": "nan", "d": hex(1 << 70), "status": "ERROR no such host", "links": [f"{7:032x}:{9:016x}"],
            },
        },
        {
            "ph": "i", "s": "t", "pid": 42, "tid": 5, "ts": day + 15, "name": "retry", "cat": "event",
            "args": {"n": 1},
        },
    ]  # fmt: skip


def test_children_are_drawn_inside_their_parents_whenever_these_end(tmp_path):
    """Exported one by one, as they end, or at once: a tree is one lane, and what overlaps goes to the next."""
    spans = [span(3, 10, 20, 2), span(4, 20, 30, 2), span(2, 5, 40, 1), span(5, 50, 60, 1), span(1, 0, 100)]
    other = [span(7, 15, 35, 6), span(6, 12, 45)]
    expected = {
        (42, "spans"): ["span 1", "span 2", "span 3", "span 4", "span 5"],
        (42, "spans 2"): ["span 6", "span 7"],
    }
    assert lanes(exported(tmp_path / "one.json", *([one] for one in spans))) == {(42, "spans"): expected[42, "spans"]}
    assert lanes(exported(tmp_path / "all.json", spans + other)) == expected
    assert lanes(exported(tmp_path / "two.json", spans[:2] + other, spans[2:])) == expected


def test_a_foreign_span_is_never_drawn_as_a_child(tmp_path):
    """Where another's span is between its children, a parent that comes later has a lane of its own."""
    events = exported(tmp_path / "t.json", [span(2, 10, 20, 1)], [span(4, 30, 40, 3)], [span(1, 0, 100)])
    assert lanes(events) == {(42, "spans"): ["span 2", "span 4"], (42, "spans 2"): ["span 1"]}


def test_threads_have_lanes_of_their_own(tmp_path):
    """A span that says its thread is on that thread's lane."""
    threads = [{"thread.id": 7, "thread.name": "loader"}, {"thread.id": 8}, {}]
    events = exported(tmp_path / "t.json", [span(n, 0, 10, attributes=a) for n, a in enumerate(threads, 1)])
    assert lanes(events) == {
        (42, "loader (7)"): ["span 1"],
        (42, "thread (8)"): ["span 2"],
        (42, "spans"): ["span 3"],
    }


def rank(number: int) -> Resource:
    """Return the resource of a rank, as the drain has it."""
    return Resource({"dl.rank": number, "dl.role": "worker", "dl.world": "default", "host.name": "node-a"})


def test_our_own_spans_are_drawn_as_from_the_run(tmp_path):
    """Ranks are processes; steps, stages, operations with their phases have their lanes; arrows join collectives."""
    batches = []
    for number in (0, 1):
        comm = {"dl.comm.operation": "all_reduce", "dl.time.source": "host_done", "dl.comm.collective_id": "ab" * 8}
        rows = [
            (1, 0, 100, 0, "rank.step", {"dl.step": 3}),
            (2, 0, 60, 1, "forward", {"dl.phase": "forward"}),
            (3, 50 + number, 90, 1, "all_reduce", comm),
            (4, 60, 95, 3, "PUSH", {"dl.time.source": "host_done"}),
        ]
        of = rank(number)
        batches.append([
            span(n + 10 * number, a, b, p and p + 10 * number, name, resource=of, attributes=attributes)
            for n, a, b, p, name, attributes in rows
        ])  # fmt: skip
    events = exported(tmp_path / "t.json", *batches)
    assert complaints(events) == []
    assert lanes(events) == {
        (pid, lane): names
        for pid in (1, 2)
        for lane, names in (("steps", ["rank.step"]), ("stages", ["forward"]), ("operations", ["all_reduce", "PUSH"]))
    }
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["rank 0 (node-a)", "rank 1 (node-a)"]
    assert [(e["ph"], e["pid"], e["name"]) for e in events if e["ph"] in "sf"] == [
        ("s", 1, "collective"),
        ("f", 2, "collective"),
    ]


def test_arrows_follow_links_and_remote_parents(tmp_path):
    """An arrow begins at the span that is linked to, also if that ends later."""
    other = Resource({"service.name": "db", "process.pid": 43})
    remote = span(3, 20, 30, context(1, remote=True), resource=other)
    linked = span(4, 200, 210, links=[Link(context(1)), Link(context(99))])
    events = exported(tmp_path / "t.json", [remote], [span(1, 0, 100)], [linked])
    assert complaints(events) == []
    assert [(e["ph"], e["pid"], e["name"], round(e["ts"] - DAY / US)) for e in events if e["ph"] in "sf"] == [
        ("s", 42, "parent", 0),
        ("f", 43, "parent", 20),
        ("s", 42, "link", 0),
        ("f", 42, "link", 200),
    ]


class _Nasty:
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param('a "quoted\\" name', id="quotes"),
        pytest.param("nul \0 and \x1f and\r\nnewline", id="control characters"),
        pytest.param("100 %d %s %% {} {pid}", id="format signs"),
        pytest.param("שלום \u202e gradient 🚀 勾配 \u2028", id="right to left"),
        pytest.param("x" * 1_000_000, id="1 MB"),
    ],
)
def test_any_name_is_kept(tmp_path, name, suffix):
    """Names, attributes, services and events come back as they were."""
    made = span(
        1, 0, 10, name=name, attributes={name: name}, events=[Event(name, {}, T0)], resource=Resource({name: 1})
    )
    events = exported(tmp_path / f"t{suffix}", [made], [span(2, 20, 30)])
    [first, second] = [e for e in events if e["ph"] == "X"]
    assert (first["name"], first["args"][name], second["name"]) == (name, name, "span 2")
    assert [e["name"] for e in events if e["ph"] == "i"] == [name]


def test_a_lone_surrogate_becomes_a_question_mark(tmp_path):
    """No viewer that reads UTF-8 takes a lone surrogate."""
    events = exported(tmp_path / "t.json", [span(1, 0, 1, name="file \udcff", attributes={"a\ud800": "\udfff"})])
    [event] = [e for e in events if e["ph"] == "X"]
    assert (event["name"], event["args"]["a?"]) == ("file ?", "?")


def test_what_is_no_span_is_left_out(tmp_path, capfd):
    """Times that are no times, attributes without text: the others are written, and export never raises."""
    broken = [span(1, "yesterday", 5), span(2, 0, float("nan")), span(3, 0, 1, attributes=None), span(4, None, None)]
    broken[2]._attributes = {"a": _Nasty()}
    path = tmp_path / "t.json"
    events = exported(path, [*broken, span(5, 0, 10, kind=SpanKind.SERVER), span(6, 5, 1)])
    assert complaints(events) == []
    assert [e["name"] for e in events if e["ph"] == "X"] == ["span 4", "span 5", "span 6"]
    assert ChromeTraceExporter(path).export([None]) is FAILURE  # type: ignore[list-item]
    assert "failed and is not traced" in capfd.readouterr().err


ROWS = st.lists(
    st.tuples(
        st.integers(0, 30) | st.integers(0, 10**14),  # start
        st.integers(-1, 20) | st.integers(0, 10**9),  # length
        st.integers(0, 25),  # parent
        st.sampled_from(["", "", "", "loader", "phase", "operation", "rank 1"]),
        st.booleans(),  # whether an export begins here
    ),
    max_size=25,
)
KINDS = {"loader": {"thread.id": 1}, "phase": {"dl.time.source": "x"}, "operation": {"dl.comm.operation": "x"}}


@settings(max_examples=100)
@given(ROWS)
def test_slices_nest_whatever_was_exported(tmp_path, rows):
    """Viewers have no complaint about any spans, exported in any order; each is drawn once, as long as it was."""
    batches: list[list[ReadableSpan]] = [[]]
    lengths = Counter()
    for number, (start, length, parent, kind, cut) in enumerate(rows, 1):
        if cut:
            batches.append([])
        of = rank(1) if kind == "rank 1" else WEB
        made = span(number, start / US, (start + length) / US, parent, attributes=KINDS.get(kind, {}), resource=of)
        batches[-1].append(made)
        lengths[f"{number:016x}", max(0, length)] += 1
    path = tmp_path / "t.json"
    if not rows:
        return
    events = exported(path, *batches)
    assert complaints(events) == []
    slices = [e for e in events if e["ph"] == "X"]
    drawn = Counter((e["args"]["span_id"], int(e["dur"] * 1000.0) + e["args"].get("clamped_ns", 0)) for e in slices)
    assert drawn == lengths


# -- the file -------------------------------------------------------------------------------------

KILLED = """
import gzip, json, os, random, signal, sys, time
from pathlib import Path
from tests.otel.test_chrome_exporter import ChromeTraceExporter, read, span

path, kills = Path(sys.argv[1]), int(sys.argv[2])
whole = 0
for kill in range(kills):
    path.unlink(missing_ok=True)
    child = os.fork()
    if not child:
        exporter = ChromeTraceExporter(path)
        for number in range(10**9):
            more = {"stack": "x" * 5000} if number % 50 == 49 else {}
            spans = [(5 * number + i, 100 * number + i) for i in range(5)]
            exporter.export([span(name, at, at + 1, attributes=more) for name, at in spans])
    while not path.exists():
        time.sleep(0.001)
    time.sleep(random.random() / 20)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    names = [e["args"]["span_id"] for e in read(path) if e["ph"] == "X"]
    assert names == [f"{number:016x}" for number in range(len(names))], names
    whole += len(names)
print(whole)
"""


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_the_file_is_whole_after_a_kill_at_any_instant(tmp_path, name):
    """SIGKILL leaves JSON with all spans that were exported, but for those of the last call."""
    command = [sys.executable, "-c", KILLED, str(tmp_path / name), "20"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    assert int(result.stdout) > 0


class _KillError(BaseException):
    pass


def test_the_file_is_whole_wherever_a_write_is_stopped(tmp_path, monkeypatch):
    """The kernel stops the write of a killed process between pages: at each of them the file is whole JSON."""
    path = tmp_path / "t.json"
    exporter = ChromeTraceExporter(path)
    exporter.export([span(1, 0, 1)])
    seen = []
    pwrite = os.pwrite

    def page_by_page(fd: int, data: bytes, offset: int) -> int:
        size = min(len(data), live.PAGE - offset % live.PAGE)
        done = pwrite(fd, data[:size], offset)
        seen.append(len(read(path)))
        return done

    monkeypatch.setattr(live.os, "pwrite", page_by_page)
    exporter.export([span(n, n, n + 1, attributes={"a": "x" * random.randrange(3000)}) for n in range(2, 20)])
    assert seen == sorted(seen)
    assert len(set(seen)) > 3
    monkeypatch.undo()
    exporter.shutdown()
    assert len([e for e in read(path) if e["ph"] == "X"]) == 19


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
@pytest.mark.parametrize("call", ["open", "sendfile", "write", "close"])
def test_the_file_is_whole_wherever_it_is_replaced(tmp_path, monkeypatch, name, call):
    """A writer that dies while it copies the file leaves the one before."""
    path = tmp_path / name
    exporter = ChromeTraceExporter(path)
    exporter.export([span(1, 0, 1)])

    def die(*_: Any) -> None:
        raise _KillError

    monkeypatch.setattr(live.os, call, die)
    with pytest.raises(_KillError):
        exporter.export([span(2, 2, 3, attributes={"a": "x" * 5000})])
    assert [e["name"] for e in read(path) if e["ph"] == "X"][:1] == ["span 1"]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_each_file_of_a_rotation_is_complete(tmp_path, name):
    """No file is larger than asked, each names its lanes, and together they hold every span once."""
    exporter = ChromeTraceExporter(tmp_path / name, max_bytes=20_000)
    for n in range(1, 1001, 10):
        links = [Link(context(max(1, n - 10)))]
        exporter.export([span(m, 10 * m, 10 * m + 5, links=links) for m in range(n, n + 10)])
    exporter.shutdown()
    paths = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    suffix = name.removeprefix("t")
    assert [path.name for path in paths] == [name, *(f"t.{n}{suffix}" for n in range(1, len(paths)))]
    assert len(paths) > 10
    drawn: Counter[str] = Counter()
    for path in paths:
        events = read(path)
        assert complaints(events) == []
        drawn.update(e["name"] for e in events if e["ph"] == "X")
        assert len(path.read_bytes() if name.endswith("n") else gzip.decompress(path.read_bytes())) <= 22_000
    assert drawn == Counter(f"span {n}" for n in range(1, 1001))


def test_only_the_latest_files_stay(tmp_path):
    """With a limit the oldest file is removed."""
    exporter = ChromeTraceExporter(tmp_path / "t.json", max_bytes=1, max_files=2)
    for n in range(1, 6):
        exporter.export([span(n, n, n + 1)])
    exporter.shutdown()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.3.json", "t.4.json"]


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_a_full_disk_is_told_once_and_left_behind(tmp_path, caplog, name):
    """Export fails while there is no room, with one line; the file stays whole, and goes on when there is some."""
    path = tmp_path / name
    exporter = ChromeTraceExporter(path)
    results = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def export(n: int) -> None:
        text = random.Random(n).randbytes(6000).hex()
        results.append(exporter.export([span(n, 10 * n, 10 * n + 1, attributes={"a": text})]))

    with caplog.at_level(logging.WARNING):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
            for n in range(1, 41):
                export(n)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len([e for e in read(path) if e["ph"] == "X"]) == results.count(SUCCESS)
        export(41)
    exporter.shutdown()
    assert results[0] is results[-1] is SUCCESS
    assert results[-2] is FAILURE
    missing = results.count(FAILURE)
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} cannot be written: File too large; spans are lost until it can",
        f"{path} is written again; {missing} spans are missing",
    ]
    events = read(path)
    assert complaints(events) == []
    assert len([e for e in events if e["ph"] == "X"]) == 41 - missing
    assert [left.name for left in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("where", ["", "missing/t.json", "/proc/t.json"])
def test_what_cannot_be_a_file_is_a_failure(tmp_path, caplog, where):
    """A folder, or a place where no file can be: FAILURE and a line; a folder that is not there is made."""
    exporter = ChromeTraceExporter(tmp_path / where)
    made = exporter.export([span(1, 0, 1)])
    exporter.shutdown()
    assert (made is SUCCESS, len(caplog.records)) == ((True, 0) if where[:1] == "m" else (False, 1))


def test_exporters_do_not_share_a_file(tmp_path, caplog):
    """A second exporter with the same name takes another, and says so; what nobody writes any more is replaced."""
    path = tmp_path / "t.json"
    path.write_text("from an earlier run")
    exporters = [ChromeTraceExporter(path) for _ in range(3)]
    for number, exporter in enumerate(exporters, 1):
        exporter.export([span(number, 0, 1)])
    pid = os.getpid()
    names = ["t.json", f"t.{pid}.json", f"t.{pid}-2.json"]
    assert [[e["name"] for e in read(tmp_path / name) if e["ph"] == "X"] for name in names] == [
        ["span 1"],
        ["span 2"],
        ["span 3"],
    ]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path} is being written by another exporter; the spans of this one go to {tmp_path / name}"
        for name in names[1:]
    ]
    for exporter in exporters:
        exporter.shutdown()


def test_a_link_in_place_of_the_hidden_copy_leads_nowhere(tmp_path, monkeypatch):
    """Its name can be guessed, and others may write where the file is."""
    mine = tmp_path / "mine"
    mine.write_text("kept")
    monkeypatch.setattr(live, "_numbers", itertools.count())
    for number in range(4):
        (tmp_path / f".trace.json.{os.getpid()}-{number}").symlink_to(mine)
    exporter = ChromeTraceExporter(tmp_path / "trace.json")

    assert exporter.export([span(1, 0, 5)]) is SpanExportResult.SUCCESS
    exporter.shutdown()
    assert (mine.read_text(), (tmp_path / "trace.json").is_symlink()) == ("kept", False)


def test_a_name_in_capitals_says_gzip_as_well(tmp_path):
    """What the exporter writes there is gzipped from the first event on."""
    exporter = ChromeTraceExporter(tmp_path / "T.JSON.GZ")
    exporter.export([span(1, 0, 1)])
    exporter.shutdown()
    assert gzip.decompress((tmp_path / "T.JSON.GZ").read_bytes()).startswith(b'{"displayTimeUnit"')


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_exporters_do_not_share_the_files_of_a_rotation(tmp_path, suffix):
    """Who has the first file has those that follow it: an exporter that comes later replaces none of them."""
    exporters = []
    for number in range(2):
        exporters.append(ChromeTraceExporter(tmp_path / f"t{suffix}", max_bytes=1))
        exporters[0].export([span(1 + number, 0, 1, name="first")])
    for number in range(3, 6):
        exporters[1].export([span(number, 0, 1, name="second")])
    for exporter in exporters:
        exporter.shutdown()
    pid = os.getpid()
    names = ["t", "t.1", f"t.{pid}", f"t.{pid}.1", f"t.{pid}.2"]
    drawn = {path.name: [e["name"] for e in read(path) if e["ph"] == "X"] for path in tmp_path.iterdir()}
    assert drawn == {f"{name}{suffix}": ["second" if str(pid) in name else "first"] for name in names}


FORKED = """
import os, sys
from tests.otel.test_chrome_exporter import ChromeTraceExporter, span
exporter = ChromeTraceExporter("t.json")
exporter.export([span(1, 0, 1)])
child = os.fork()
exporter.export([span(2, 2, 3)] if child else [span(3, 2, 3)])
exporter.shutdown()
if child:
    os.waitpid(child, 0)
    print(child)
"""


def test_a_forked_child_writes_a_file_of_its_own(tmp_path):
    """Parent and child do not meet in one file, whoever ends first."""
    command = [sys.executable, "-c", FORKED]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True)
    child = int(result.stdout)
    files = {path.name: [e["name"] for e in read(path) if e["ph"] == "X"] for path in tmp_path.iterdir()}
    assert files == {"t.json": ["span 1", "span 2"], f"t.{child}.json": ["span 3"]}


def test_after_shutdown_nothing_is_written(tmp_path, caplog):
    """No file is made without spans; shutdown may come twice; flushing needs nothing."""
    exporter = ChromeTraceExporter(tmp_path / "t.json")
    assert exporter.export([]) is SUCCESS
    assert exporter.force_flush()
    exporter.shutdown()
    exporter.shutdown()
    assert exporter.export([span(1, 0, 1)]) is FAILURE
    assert [record.getMessage() for record in caplog.records] == [
        "The Chrome trace exporter is shut down; 1 spans are lost"
    ]
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_trace(tmp_path, monkeypatch):
    """After the tables of latest spans are full, four times as many spans need no more memory."""
    monkeypatch.setattr(arrows, "KEPT", 100)
    monkeypatch.setattr(roots, "KEPT", 100)
    exporter = ChromeTraceExporter(tmp_path / "t.json")

    def export(first: int, last: int) -> int:
        for n in range(first, last, 100):
            exporter.export(
                [span(m, 10 * m, 10 * m + 15, m - m % 2000, links=[Link(context(m - 1))]) for m in range(n, n + 100)]
            )
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        few = export(1, 2001)
        many = export(2001, 8001)
    finally:
        tracemalloc.stop()
        exporter.shutdown()
    assert many - few < 100_000, (few, many)


# -- by name --------------------------------------------------------------------------------------


def test_the_sdk_finds_the_exporter_by_its_name():
    """``OTEL_TRACES_EXPORTER=chrome_trace`` makes it without arguments."""
    [found] = entry_points(group="opentelemetry_traces_exporter", name="chrome_trace")
    assert found.load() is ChromeTraceExporterFromEnvironment


def test_the_environment_says_where_and_how_much(tmp_path, monkeypatch, caplog):
    """Variables are read when the exporter is made; a bad number is told, and the default used."""
    monkeypatch.setenv("OTEL_EXPORTER_CHROME_TRACE_FILE", str(tmp_path / "{service}-{pid}.json.gz"))
    monkeypatch.setenv("OTEL_EXPORTER_CHROME_TRACE_MAX_BYTES", "500")
    monkeypatch.setenv("OTEL_EXPORTER_CHROME_TRACE_MAX_FILES", "many")
    provider = TracerProvider(resource=Resource({"service.name": "my/service"}))
    provider.add_span_processor(SimpleSpanProcessor(ChromeTraceExporterFromEnvironment()))
    with provider.get_tracer("t").start_as_current_span("outer"), provider.get_tracer("t").start_as_current_span("in"):
        pass
    provider.shutdown()
    assert [record.getMessage() for record in caplog.records] == [
        "OTEL_EXPORTER_CHROME_TRACE_MAX_FILES='many' is not a whole number (K, M or G may follow it); 0 is used"
    ]
    name = f"my_service-{os.getpid()}"
    files = {path.name: [e["name"] for e in read(path) if e["ph"] == "X"] for path in tmp_path.iterdir()}
    assert files == {f"{name}.json.gz": ["in"], f"{name}.1.json.gz": ["outer"]}


PROGRAM = """
import multiprocessing
from opentelemetry import trace

tracer = trace.get_tracer("demo")

def child():
    with tracer.start_as_current_span("child"):
        pass
    trace.get_tracer_provider().force_flush()

with tracer.start_as_current_span("parent"):
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
"""


@pytest.mark.parametrize("arguments", [{"max_bytes": -1}, {"max_bytes": "64M"}, {"max_files": 1.5}], ids=str)
def test_an_argument_that_is_no_number_is_refused(tmp_path, arguments):
    """At once, with its name and value: not when spans are lost for it."""
    ((name, value),) = arguments.items()
    with pytest.raises(ConfigError) as error:
        ChromeTraceExporter(tmp_path / "t.json", **arguments)
    assert str(error.value) == f"{name}={value!r} is not a whole number; write 0 or more"


def test_opentelemetry_instrument_writes_a_trace(tmp_path):
    """The ecosystem's own switch, with nothing of ours in the program: a file for each process."""
    instrument = Path(sys.executable).with_name("opentelemetry-instrument")
    if not instrument.exists():
        pytest.skip("pip install opentelemetry-distro")
    (tmp_path / "program.py").write_text(PROGRAM)
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    env |= {"OTEL_TRACES_EXPORTER": "chrome_trace", "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none"}
    env |= {"OTEL_SERVICE_NAME": "demo", "PYTHONWARNINGS": "ignore"}
    command = [str(instrument), sys.executable, "program.py"]
    subprocess.run(command, cwd=tmp_path, env=env, timeout=240, check=True)
    traces = [read(path) for path in tmp_path.glob("trace-demo-*.json")]
    assert [complaints(events) for events in traces] == [[], []]
    assert sorted(e["name"] for events in traces for e in events if e["ph"] == "X") == ["child", "parent"]


# -- in a browser ---------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [True, False], ids=["closed", "still open"])
@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_both_viewers_show_what_was_exported(tmp_path, viewers, name, closed):
    """Every slice, moment and arrow is there, without complaint; also while the file is being written."""
    chance = random.Random(5)
    exporter = ChromeTraceExporter(tmp_path / name)
    number = 0
    for _ in range(20):
        batch = []
        for _ in range(20):
            number += 1
            start = chance.randrange(10_000) / 7
            batch.append(
                span(
                    number, start, start + chance.randrange(1, 90_000) / US, chance.randrange(number + 5),
                    name=chance.choice(["a", "b\0", "ü🚀", '"']), links=[Link(context(chance.randrange(1, 400)))],
                    events=[Event("moment", {}, T0 + int(start * US))],
                )
            )  # fmt: skip
        exporter.export(batch)
    if closed:
        exporter.shutdown()
    events = read(tmp_path / name)
    assert complaints(events) == []
    slices = Counter((e["name"], int(e.get("dur", 0) * 1000.0)) for e in events if e["ph"] in "Xi")
    ends = sum(e["ph"] == "f" for e in events)

    perfetto = viewers.perfetto(tmp_path / name)
    assert perfetto["warnings"] == []
    assert Counter(length for *_, length, _ in perfetto["slices"]) == Counter(
        length for (_, length), n in slices.items() for _ in range(n)
    )
    assert len(perfetto["flows"]) == ends > 100

    chrome = viewers.catapult(tmp_path / name)
    assert chrome["warnings"] == []
    seen = ((title, length) for p in chrome["processes"] for _, lane in p["lanes"] for title, length, _ in lane)
    assert Counter(seen) == slices
    assert len(chrome["flows"]) == ends
    exporter.shutdown()

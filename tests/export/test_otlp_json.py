"""`export --to otlp` writes what OTLP would have sent, in the form that the Collector writes and reads."""

import gzip
import json
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from otel_dltrace._version import __version__
from otel_dltrace.cli.main import main
from otel_dltrace.export.otlp.json_lines import json_lines, write_otlp_json
from otel_dltrace.export.outgoing.as_sent import as_sent
from otel_dltrace.export.rundir.traces import trace_id_column
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.model import semconv as s
from otel_dltrace.model.attributes import resource_attributes
from otel_dltrace.model.errors import RunNotFoundError
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import Flag
from otel_dltrace.model.spans import SpanBatch, empty_rows
from tests.support import servers
from tests.support.paths import ROOT
from tests.support.processes import Place, requests_of
from tests.support.random_spans import BIND, batches, normal, texts
from tests.support.runs import Rank
from tests.support.steps import EVERYTHING

PAGE = ROOT / "docs" / "collector.md"


def traces_in(text: str) -> TracesData:
    """Return what lines say, read by protobuf's own parser, which takes no field that it does not know."""
    everything = TracesData()
    for line in text.splitlines():
        everything.MergeFrom(servers.traces_from_json(json.loads(line)))
    return everything


def by_id(data: TracesData) -> dict[bytes, object]:
    """Return every span with its resource, by its id, attributes in alphabetic order; none is there twice."""
    found = {}
    for resource_spans in data.resource_spans:
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                assert span.span_id not in found
                alone = TracesData()
                part = alone.resource_spans.add(resource=resource_spans.resource)
                part.scope_spans.add(scope=scope_spans.scope, spans=[span])
                part.resource.attributes.sort(key=lambda attribute: attribute.key)
                found[span.span_id] = normal(alone)
    return found


# -- the same as our requests ----------------------------------------------------------------------


@settings(max_examples=100)
@given(batches(), st.dictionaries(texts.filter(bool), texts, max_size=3))
def test_lines_say_what_our_requests_say(batch, resource):
    """Whatever is in a batch, surrogates and extremes too, the official parser reads the same from both."""
    resource |= dict(batch.process.resource)
    batch = replace(batch, process=replace(batch.process, bind=BIND, resource=tuple(resource.items())))

    ((line, spans),) = json_lines(batch)

    attributes = resource_attributes(batch.process)
    (request,) = requests_of(batch, trace_id_column(batch, BIND), attributes)
    assert line.isascii()
    assert line.endswith("\n")
    assert spans == len(batch)
    assert by_id(traces_in(line)) == by_id(TracesData.FromString(request.body))


def test_a_line_in_full():
    """Ids are hexadecimal, 64-bit integers are strings, names in camelCase: all of it, as it stands in the file."""
    rank = Rank(1, 2).step(7, 1, 3, a=32)
    rank.collective(7, 1.5, 2, 4, dtype="float32", flags=Flag.ERROR | Flag.ASYNC, error=1)
    batch = replace(rank.batch(), errors=(("", ""), ("RuntimeError", 'peer "gone"')))

    ((line, _),) = json_lines(batch)

    (resource_spans,) = json.loads(line)["resourceSpans"]
    (scope_spans,) = resource_spans["scopeSpans"]
    assert scope_spans["scope"] == {"name": "otel_dltrace", "version": __version__}
    assert {"key": "dl.rank", "value": {"intValue": "1"}} in resource_spans["resource"]["attributes"]
    trace = trace_id_column(batch, batch.process.bind)[0].tobytes().hex()
    step, operation = (f"{number:016x}" for number in batch["span_id"].tolist())
    assert scope_spans["spans"] == [
        {
            "traceId": trace,
            "spanId": step,
            "flags": 256,
            "name": "rank.step",
            "kind": 1,
            "status": {},
            "startTimeUnixNano": "1000000",
            "endTimeUnixNano": "3000000",
            "attributes": [
                {"key": "dl.step", "value": {"intValue": "7"}},
                {"key": "dl.step.user", "value": {"intValue": "0"}},
                {"key": "dl.batch_size", "value": {"intValue": "32"}},
            ],
        },
        {
            "traceId": trace,
            "spanId": operation,
            "parentSpanId": step,
            "flags": 256,
            "name": "all_reduce",
            "kind": 1,
            "status": {"message": 'peer "gone"', "code": 2},
            "startTimeUnixNano": "1500000",
            "endTimeUnixNano": "2000000",
            "attributes": [
                {"key": "dl.step", "value": {"intValue": "7"}},
                {"key": "dl.comm.seq", "value": {"intValue": "4"}},
                {"key": "dl.comm.size", "value": {"intValue": "1024"}},
                {"key": "dl.comm.collective_id", "value": {"stringValue": "b63b4a020c22c5c5"}},
                {"key": "dl.comm.operation", "value": {"stringValue": "all_reduce"}},
                {"key": "dl.comm.async", "value": {"boolValue": True}},
                {"key": "dl.comm.backend", "value": {"stringValue": "gloo"}},
                {"key": "dl.comm.group.id", "value": {"stringValue": "0"}},
                {"key": "dl.comm.dtype", "value": {"stringValue": "float32"}},
                {"key": "error.type", "value": {"stringValue": "RuntimeError"}},
                {"key": "dl.time.source", "value": {"stringValue": "host_done"}},
            ],
        },
    ]


def test_lines_stay_within_what_the_receiver_reads():
    """Every span is there once, in lines within the limit; one that alone is longer goes alone."""
    giant = Descriptor(s.PHASE, "PULL", tensor="g" * 5000)
    rank = Rank(0, 1)
    for number in range(50):
        rank.wait(3, number, number + 1)
    rank.add(giant, 3, 50, 51).wait(3, 51, 52)
    batch = rank.batch()

    lines = list(json_lines(batch, limit=5000))

    assert sum(spans for _, spans in lines) == len(by_id(traces_in("".join(line for line, _ in lines)))) == 52
    assert [spans for line, spans in lines if len(line) > 5000] == [1]
    assert len(lines) < 52 / 5


# -- the same as what was sent ---------------------------------------------------------------------

RANK = """
    import otel_dltrace as d, os
    d.start()
    with d.phase("before any step"):
        pass
    for i in range(8):
        with d.step(i):
            with d.operation("push_pull", size=8, tensor="w"):
                with d.phase("PUSH", size=8):
                    pass
    with d.step(8):
        pass
    for _ in range(3):
        with d.phase("after the last step"):
            pass
"""
SPANS = 2 * (1 + 8 * 3 + 1 + 3)
ROOTS = 9


def two_ranks_recovered(place: Place, **env: str) -> Path:
    """Trace two ranks, have one `recover` do the drain's work, so that it sees both from the first; return the run."""
    who = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OTEL_DLTRACE_RUN": "nightly", "OTEL_DLTRACE_DRAIN": "off"}
    ranks = [place.start(RANK, RANK=str(rank), LOCAL_RANK=str(rank), **who) for rank in range(2)]
    assert [rank.wait(240) for rank in ranks] == [0, 0]
    result = place.command("recover", **EVERYTHING, **env)
    assert result.returncode == 0, result.stderr
    (run,) = place.runs()
    return run


@contextmanager
def reading_collector(folder: Path, file: Path) -> Iterator[servers.Collector]:
    """Run a collector that reads *file* with the receiver that our page tells of, and writes what it has read."""
    written = folder / "read-again.jsonl"
    receivers = yaml.safe_load(PAGE.read_text().split("```yaml\nreceivers:")[1].split("```")[0])
    receivers["otlp_json_file"] |= {"include": [str(file)], "poll_interval": "50ms"}
    if file.suffix != ".gz":
        del receivers["otlp_json_file"]["compression"]
    config = {
        "receivers": receivers,
        "exporters": {"file": {"path": str(written), "rotation": {"max_megabytes": 1000}}},
        "service": {
            "telemetry": {"metrics": {"level": "none"}},
            "pipelines": {"traces": {"receivers": ["otlp_json_file"], "exporters": ["file"]}},
        },
    }
    path = folder / "reading.yaml"
    path.write_text(json.dumps(config))
    server = servers.Collector("otelcol", path, folder / "reading.log", spans_file=written)
    with servers.running(server):
        yield server


@pytest.mark.parametrize("name", ["spans.jsonl", "spans.jsonl.gz"])
def test_the_file_holds_what_was_sent_and_a_collector_reads_it(place, tmp_path, name):
    """Span for span, roots too, the same as the Collector got over OTLP; and as another one reads from the file."""
    (tmp_path / "sent").mkdir()
    with servers.collector(tmp_path / "sent") as collector:
        run = two_ranks_recovered(place, OTEL_EXPORTER_OTLP_ENDPOINT=collector.http)
        collector.wait_for(SPANS + ROOTS)
        sent = by_id(collector.traces())
    result = place.command("export", str(run), "--to", "otlp", "-o", name)
    assert result.returncode == 0, result.stderr
    assert f"{name}: {SPANS + ROOTS} spans, " in result.stdout

    data = (place.folder / name).read_bytes()
    written = by_id(traces_in((gzip.decompress(data) if name.endswith(".gz") else data).decode()))
    assert written == sent
    with reading_collector(tmp_path, place.folder / name) as collector:
        collector.wait_for(SPANS + ROOTS)
        assert by_id(collector.traces()) == sent


def spans_of(place: Place, run: Path, *more: str) -> dict[bytes, object]:
    """Export *run* and return the file's spans by id."""
    assert main(["export", str(run), "--to", "otlp", "-o", str(place.folder / "part.jsonl"), *more]) == 0
    return by_id(traces_in((place.folder / "part.jsonl").read_text()))


def facts(data: TracesData) -> tuple[int, int | None, str]:
    """Return a lone span's rank, step and name."""
    (resource_spans,) = data.resource_spans
    (span,) = resource_spans.scope_spans[0].spans
    numbers = {a.key: a.value.int_value for a in [*resource_spans.resource.attributes, *span.attributes]}
    return numbers[s.DL_RANK], numbers.get(s.DL_STEP), span.name


def test_steps_and_ranks_can_be_chosen(place):
    """The part is the same spans as in the whole; a root is rank 0's, and over all ranks even if it is chosen alone."""
    run = two_ranks_recovered(place)
    whole = spans_of(place, run)
    chosen = {
        ("--steps", "3-5"): lambda _, step: step in (3, 4, 5),
        ("--rank", "1"): lambda rank, _: rank == 1,
        ("--rank", "0", "--steps", "8"): lambda rank, step: rank == 0 and step == 8,
    }

    parts = {args: spans_of(place, run, *args) for args in chosen}

    assert parts == {
        args: {id_: span for id_, span in whole.items() if is_in(*facts(span)[:2])} for args, is_in in chosen.items()
    }
    assert sorted(facts(span)[2] for span in parts["--rank", "0", "--steps", "8"].values()) == [
        *["after the last step"] * 3,
        s.RANK_STEP,
        s.TRAIN_STEP,
    ]


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        pytest.param(("RUN", "--rank", "7"), "rank 7 is not in this run; it has ranks 0 to 0", id="no rank"),
        pytest.param(("RUN", "--steps", "90-91"), "none of the steps asked for is in this run; it has", id="no step"),
        pytest.param(("nowhere",), "nowhere is not a run directory", id="no run"),
    ],
)
def test_what_is_not_there_is_one_sentence(place, args, sentence):
    """Exit code 2, and no file."""
    place.run("import otel_dltrace as d\nd.start()\nwith d.step(): pass")
    place.wait_for_rings()
    named = [str(place.runs()[0]) if arg == "RUN" else arg for arg in args]

    result = place.command("export", *named, "--to", "otlp", "-o", "x.jsonl")

    assert (result.returncode, result.stdout) == (2, "")
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(place.folder.glob("*x.jsonl*"))


def test_help_says_what_each_format_is_for(place):
    """Formats are explained where they are chosen."""
    result = place.finish(place.popen([sys.executable, "-m", "otel_dltrace", "export", "--help"]))

    assert "chrome  Chrome trace JSON" in result.stdout
    assert "otlp    OTLP JSON lines" in result.stdout


# -- runs made by hand -----------------------------------------------------------------------------


def a_run(folder: Path, rank: Rank, files: int = 1, host: str = "node-0") -> Path:
    """Write the spans of *rank* as a run of as many files."""
    batch = rank.batch()
    writer = RunWriter(folder / "dltrace-demo", host)
    writer.open()
    writer.know(batch.process)
    for rows in np.array_split(batch.rows, files):
        writer.append(batch.process.nonce, rows, batch.descriptors, batch.errors)
        writer.close_segment()
    writer.write_summary({})
    writer.close()
    return folder / "dltrace-demo"


def test_what_has_no_step_span_hangs_under_nothing(tmp_path):
    """As over OTLP: its parent never goes out, so nobody looks for it."""
    rank = Rank(0, 1).step(0, 0, 10).wait(0, 1, 2).wait(1, 11, 12)
    run = a_run(tmp_path, rank, files=3)  # what a process has of its steps may be in any file

    spans = {(row["step"], row["span_id"]): row["parent_id"] for part in as_sent([run]) for row in part.rows}

    ids = rank.batch()["span_id"]
    parents = {key: parent for key, parent in spans.items() if key[1] in ids}
    (root,) = (key[1] for key in spans if key[1] not in ids)
    assert parents == {(0, ids[0]): root, (0, ids[1]): ids[0], (1, ids[2]): 0}


def orphans(parts: list[SpanBatch]) -> list[str]:
    """Return the names of spans whose parent is not in their trace."""
    spans = {
        (bytes(trace), row["span_id"]): (row["parent_id"], part.descriptors[row["descriptor"]].name)
        for part in parts
        for row, trace in zip(part.rows, trace_id_column(part, part.process.bind), strict=True)
    }
    return [name for (trace, _), (parent, name) in spans.items() if parent and (trace, parent) not in spans]


def test_generations_of_one_process_have_roots_of_their_own(tmp_path):
    """Who leaves a process group and joins another goes on with its steps and its nonce, in another run."""
    runs = []
    for number in (1, 2):
        rank = Rank(0, 1).step(number, number * 10, number * 10 + 5).wait(number, number * 10 + 1, number * 10 + 2)
        assert rank.process.bind is not None
        rank.process = replace(rank.process, bind=replace(rank.process.bind, generation=f"{number}.00"))
        runs.append(a_run(tmp_path / str(number), rank))

    parts = list(as_sent(runs))

    roots = [(part.process.bind.generation, row["step"]) for part in parts for row in part.rows[part["parent_id"] == 0]]
    assert (roots, orphans(parts)) == ([("1.00", 1), ("2.00", 2)], [])


def test_a_job_may_go_on_meanwhile(tmp_path):
    """A step, or a rank, that comes after the first reading is whole as well."""
    run = a_run(tmp_path, Rank(1, 2, "node-0").step(0, 0, 10), host="node-0")
    a_run(tmp_path, Rank(0, 2, "node-1").step(0, 0, 10), host="node-1")
    sent = as_sent([run])

    parts = [next(sent)]
    for number in (0, 2):
        late = Rank(number, 2, "node-1", nonce=9 + number).step(1, 11, 20).wait(1, 12, 13)
        a_run(tmp_path, late, host="node-1")
    parts += sent

    assert orphans(parts) == []
    assert sorted(step for part in parts for step in part["step"].tolist()) == [0, 0, 0, 1, 1, 1, 1, 1]


def test_who_belongs_to_no_job_is_left_out(tmp_path):
    """There are no ids for its spans, and nothing of it was ever sent."""
    rank = Rank(0, 1).step(0, 0, 10)
    rank.process = replace(rank.process, bind=None)

    with pytest.raises(RunNotFoundError, match="the run has no span that belongs to a job"):
        list(as_sent([a_run(tmp_path, rank)]))


def peak_of(folder: Path, files: int) -> int:
    """Return how many bytes it takes at most to write a run of as many files."""
    rank = Rank(0, 1)
    for step in range(150 * files):
        rank.step(step, step, step + 1)
        for part in range(20):
            rank.wait(step, step + part / 20, step + (part + 1) / 20)
    folder.mkdir()
    run = a_run(folder, rank, files)
    tracemalloc.start()
    write_otlp_json(as_sent([run]), folder / "spans.jsonl", lambda _: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_does_not_grow_with_the_run(tmp_path):
    """A run four times as long takes some bytes more for each step, and no more for its spans."""
    short, long = (peak_of(tmp_path / name, files) for name, files in (("short", 2), ("long", 8)))
    assert long < 1.5 * short


def test_a_file_is_whole_or_absent(tmp_path):
    """When a run turns out unreadable half way, neither the file nor a part of it is left."""

    def failing() -> Iterator[SpanBatch]:
        yield Rank(0, 1).step(0, 0, 10).batch()
        raise RunNotFoundError("gone")

    with pytest.raises(RunNotFoundError):
        write_otlp_json(failing(), tmp_path / "spans.jsonl", lambda _: None)

    assert list(tmp_path.iterdir()) == []
    assert write_otlp_json([SpanBatch(empty_rows(), (), Rank(0, 1).process)], tmp_path / "none.jsonl", print) == 0

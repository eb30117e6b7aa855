"""Programs without steps: every rank cuts them into the same traces, by phases, or by 1,000 operations (contract 4)."""

import json
import signal
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from otel_dltrace.model.identity import NO_STEP, Bind, trace_id
from otel_dltrace.model.semconv import Flag
from tests.support import servers
from tests.support.processes import Place

RUN = "00c0ffee00c0ffee"
BIND = Bind("solver", f"1.{RUN}")
SOLVER = """
import os, sys, time
from pathlib import Path
import otel_dltrace as d
from otel_dltrace.configure.recording import bind_by_environment
from otel_dltrace.record.tracer import live

with d.phase("start"):
    pass
bind_by_environment(live.tracer)  # as MPI_Init does
if os.environ["RANK"] == "0":
    with d.phase("log"):
        pass
for turn in range(2):
    with d.phase("solve"):
        with d.operation("all_reduce", tensor="norm"):
            with d.phase("copy"):
                pass
        with d.phase("smooth"):
            with d.operation("all_reduce", tensor="norm"):
                pass
            while turn and not Path(sys.argv[1]).exists():
                time.sleep(0.01)
for _ in range(1001):
    with d.operation("push", tensor="x"):
        pass
"""
SOLVED = ["all_reduce", "all_reduce", "copy", "smooth", "solve"]
"""What is in the trace of one phase `solve`."""


def solve(place: Place, go_on: Path, **env: str) -> "list[subprocess.Popen[str]]":
    """Start the solver on two ranks."""
    ours = {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_JOB": BIND.job, "OTEL_DLTRACE_RUN": RUN, "WORLD_SIZE": "2", **env}
    return [place.start(SOLVER, str(go_on), RANK=str(rank), LOCAL_RANK=str(rank), **ours) for rank in range(2)]


def traces_of(data: TracesData) -> dict[bytes, dict[int, list[str]]]:
    """Return for each trace what each rank has in it, and check that no parent is in another trace."""
    found: dict[bytes, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    trace_of = {span.span_id: span.trace_id for span in servers.spans_of(data)}
    for resource in data.resource_spans:
        (rank,) = (a.value.int_value for a in resource.resource.attributes if a.key == "dl.rank")
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            found[span.trace_id][rank].append(span.name)
            assert not span.parent_span_id or trace_of[span.parent_span_id] == span.trace_id
    return {trace: {rank: sorted(names) for rank, names in ranks.items()} for trace, ranks in found.items()}


def named(parts: dict[str, dict[int, list[str]]]) -> dict[bytes, dict[int, list[str]]]:
    """Return *parts* by the ids that the contract gives them."""
    return {trace_id(BIND, part).to_bytes(16, "big"): ranks for part, ranks in parts.items()}


EXPECTED = {
    "phase.start.1": {0: ["start"], 1: ["start"]},
    "phase.log.1": {0: ["log"]},
    "phase.solve.1": {0: SOLVED, 1: SOLVED},
    "phase.solve.2": {0: SOLVED, 1: SOLVED},
    "ops.0": {rank: ["push"] * 999 for rank in range(2)},
    "ops.1": {rank: ["push"] * 2 for rank in range(2)},
}


def lines(paths: Iterable[Path]) -> TracesData:
    """Return what is in files of OTLP JSON."""
    everything = TracesData()
    for path in paths:
        for line in path.read_text().splitlines():
            everything.MergeFrom(servers.traces_from_json(json.loads(line)))
    return everything


def test_a_file_has_a_trace_for_each_phase_and_for_each_thousand_operations(place, tmp_path):
    """By its name and how often that came, so that a phase of one rank alone shifts nobody's traces."""
    (tmp_path / "go").touch()
    for rank in solve(place, tmp_path / "go"):
        assert place.finish(rank).returncode == 0
    place.wait_for_rings()
    written = place.command("export", *map(str, place.runs()), "--to", "otlp", "-o", "spans.jsonl")

    assert written.returncode == 0, written.stderr
    assert traces_of(lines([tmp_path / "spans.jsonl"])) == named(EXPECTED)


def test_a_trace_of_operations_keeps_to_the_budget(place, tmp_path):
    """Each rank sends its share, of the operations that came first and are there of the others too."""
    (tmp_path / "go").touch()
    with servers.collector(tmp_path) as collector:
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, "OTEL_DLTRACE_SPAN_BUDGET": "600"}
        for rank in solve(place, tmp_path / "go", **env):
            assert place.finish(rank).returncode == 0
        place.wait_for_rings()
        place.deliver()

        kept = {**EXPECTED, "ops.0": {rank: ["push"] * 300 for rank in range(2)}}
        collector.wait_for(sum(len(names) for parts in kept.values() for names in parts.values()))
        assert traces_of(collector.traces()) == named(kept)
        first = {s.end_time_unix_nano for s in servers.spans_of(collector.traces()) if s.name == "push"}
        assert len(first) > 300  # of both ranks
    summaries = [json.loads(path.read_text()) for path in place.folder.glob("dltrace-*/hosts/*/drain.json")]
    assert sum(summary["summary"]["not_in_otlp"] for summary in summaries) == 2 * (999 - 300)


def test_what_is_below_a_phase_is_sent_into_its_trace_before_it_is_over(place, tmp_path):
    """A program that is one long phase is seen while it runs, and its spans lie together in the end."""
    with servers.collector(tmp_path) as collector:
        ranks = solve(place, tmp_path / "go", OTEL_EXPORTER_OTLP_ENDPOINT=collector.http)
        collector.wait_for(2 * (1 + len(SOLVED) + 3) + 1)  # all but what is still open in the second turn
        early = traces_of_early(collector)
        (tmp_path / "go").touch()
        for rank in ranks:
            assert place.finish(rank).returncode == 0
        collector.wait_for(sum(len(names) for parts in EXPECTED.values() for names in parts.values()))

        assert early == {rank: ["all_reduce", "all_reduce", "copy"] for rank in range(2)}
        assert traces_of(collector.traces()) == named(EXPECTED)


def traces_of_early(collector: servers.Collector) -> dict[int, list[str]]:
    """Return what of the second `solve`, which is still open, has arrived from each rank."""
    second = trace_id(BIND, "phase.solve.2").to_bytes(16, "big")
    found: dict[int, list[str]] = defaultdict(list)
    for resource in collector.traces().resource_spans:
        (rank,) = (a.value.int_value for a in resource.resource.attributes if a.key == "dl.rank")
        found[rank] += [s.name for scope in resource.scope_spans for s in scope.spans if s.trace_id == second]
    return {rank: sorted(names) for rank, names in found.items()}


def test_a_killed_phase_is_there_truncated(place, tmp_path):
    """Outside any step a phase with something below it is written as it begins, so a kill leaves no orphan."""
    ranks = solve(place, tmp_path / "go")
    servers.wait_until(lambda: [batch["seq"].max() for batch in place.spans()] == [4, 4], what="both second turns")
    for rank in ranks:
        rank.send_signal(signal.SIGKILL)
    place.wait_for_rings()

    for batch in place.spans():
        is_cut = batch["flags"] & np.uint16(Flag.TRUNCATED) != 0
        assert sorted(batch.descriptor_of(int(row)).name for row in np.flatnonzero(is_cut)) == ["smooth", "solve"]
        assert set(batch["parent_id"]) - {0} <= set(batch["span_id"])
        assert set(batch["step"]) == {NO_STEP}

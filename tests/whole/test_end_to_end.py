"""The whole path on real processes: torchrun, the drain, a real Collector, Jaeger, report and Chrome trace."""

import gzip
import json
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import trace_id
from tests.support import servers
from tests.support.processes import Place, a_place

pytest.importorskip("torch")

STEPS = 8
TRAIN = """
    import json, sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(7)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.03)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    data = DataLoader(TensorDataset(torch.randn(8 * 4, 64)), batch_size=4)
    for step, (x,) in enumerate(data):
        optimizer.zero_grad()
        loss = ddp(x).square().mean()
        loss.backward()
        optimizer.step()
        if step % 4 == 3:
            dist.all_reduce(loss.detach().clone())
    work = dist.broadcast(torch.ones(16), src=1, async_op=True)
    work.wait()
    dist.barrier()
    if len(sys.argv) > 1:
        entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))["entries"]
        open(f"{sys.argv[1]}/recorder.{rank}.json", "w").write(json.dumps(entries))
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_both_ranks_of_a_step_are_one_trace_in_the_collector(place, tmp_path, protocol):
    """One trace per step under one root, the same collective ids on both ranks, every recorded span once."""
    with servers.collector(tmp_path) as collector:
        endpoint = collector.grpc if protocol == "grpc" else collector.http
        env = {
            "OTEL_DLTRACE": "1",
            "OTEL_DLTRACE_STEPS": "all",
            "OTEL_DLTRACE_SPAN_BUDGET": "0",
            "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "TORCH_FR_BUFFER_SIZE": "2000",
        }
        result = place.torchrun(TRAIN, str(tmp_path), **env)
        assert result.returncode == 0, result.stderr
        place.wait_for_rings()
        batches = place.spans()
        recorded = {f"{int(i):016x}" for batch in batches for i in batch["span_id"]}
        arrived = collector.wait_for(len(recorded) + STEPS)
        by_rank = defaultdict(list)
        for resource in collector.traces().resource_spans:
            rank = servers.attributes(resource.resource)[s.DL_RANK]
            by_rank[rank] += [span for scope in resource.scope_spans for span in scope.spans]

    ids = [span.span_id.hex() for span in arrived]
    roots = {span.span_id.hex(): span for span in arrived if span.name == s.TRAIN_STEP}
    assert len(ids) == len(set(ids))
    assert set(ids) - set(roots) == recorded
    assert len(roots) == len({root.trace_id for root in roots.values()}) == STEPS
    check_each_step_hangs_under_its_root(by_rank, roots)
    check_against_the_flight_recorder(by_rank, tmp_path)


def check_each_step_hangs_under_its_root(by_rank, roots) -> None:
    """Every trace of a step holds both ranks, and every parent is there."""
    root_of = {root.trace_id: root for root in roots.values()}
    for spans in by_rank.values():
        steps = {span.trace_id: span for span in spans if span.name == s.RANK_STEP}
        assert set(steps) == set(root_of)
        for trace, step in steps.items():
            assert step.parent_span_id == root_of[trace].span_id
            assert root_of[trace].start_time_unix_nano <= step.start_time_unix_nano
            assert step.end_time_unix_nano <= root_of[trace].end_time_unix_nano
    known = {span.span_id for spans in by_rank.values() for span in spans}
    dangling = [
        span.name
        for spans in by_rank.values()
        for span in spans
        if span.parent_span_id and span.parent_span_id not in known
    ]
    assert dangling == []


def check_against_the_flight_recorder(by_rank, folder: Path) -> None:
    """Operations with a sequence number are those that torch's own recorder saw: same sizes, same order."""
    mine = {}
    for rank, spans in by_rank.items():
        rows = {}
        for span in spans:
            a = servers.attributes(span)
            if s.DL_COMM_SEQ in a:
                rows[a[s.DL_COMM_SEQ]] = (a[s.DL_COMM_OPERATION], a[s.DL_COMM_SIZE], a[s.DL_COMM_COLLECTIVE_ID])
        mine[rank] = rows
        entries = json.loads((folder / f"recorder.{rank}.json").read_text())
        seen = {e["collective_seq_id"]: e["profiling_name"].removeprefix("gloo:") for e in entries}
        # DDP's construction broadcasts coalesced; the recorder has each part, and the number is the last one's.
        assert {seq: op.removesuffix("_coalesced") for seq, (op, _, _) in rows.items()} == {n: seen[n] for n in rows}
        sizes = {
            e["collective_seq_id"]: 4 * sum(int(np.prod(shape)) for shape in e["input_sizes"])
            for e in entries
            if e["profiling_name"] == "gloo:all_reduce"
        }
        assert {seq: size for seq, (op, size, _) in rows.items() if op == "all_reduce"} == {
            seq: sizes[seq] for seq, (op, _, _) in rows.items() if op == "all_reduce"
        }
    assert mine[0] == mine[1]
    operations = Counter(op for op, _, _ in mine[0].values())
    assert operations["broadcast"] == 1
    assert operations["barrier"] == 1
    # The first step's buckets are not yet those that DDP settles on, and are not claimed to be known.
    assert operations["all_reduce"] >= 2 + (STEPS - 1)


def test_jaeger_shows_a_step_by_its_derived_id(place, tmp_path):
    """The trace id is computed from the run directory alone; Jaeger has the trace, whole and without a warning."""
    with servers.jaeger(tmp_path) as jaeger:
        env = {"OTEL_DLTRACE": "1", "OTEL_EXPORTER_OTLP_ENDPOINT": jaeger.http}
        result = place.torchrun(TRAIN, **env)
        assert result.returncode == 0, result.stderr
        place.wait_for_rings()
        batches = place.spans()
        step = 5
        count = 1 + sum(int((batch["step"] == step).sum()) for batch in batches)
        trace = f"{trace_id(batches[0].process.bind, step):032x}"
        found = servers.spans_of(jaeger.trace(trace, count))
        plain = jaeger.get(f"/api/traces/{trace}")["data"][0]

    assert len(found) == count
    assert Counter(span.name for span in found)[s.RANK_STEP] == 2
    assert [span["warnings"] for span in plain["spans"] if span["warnings"]] == []
    assert {p["serviceName"] for p in plain["processes"].values()} == {"program"}


def test_outside_the_window_only_stages_go_out(place, tmp_path):
    """Steps in the window are whole; of the others, stages; what was left out is counted."""
    with servers.collector(tmp_path) as collector:
        env = {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_STEPS": "2-3", "OTEL_EXPORTER_OTLP_ENDPOINT": collector.http}
        result = place.torchrun(TRAIN, **env)
        assert result.returncode == 0, result.stderr
        place.wait_for_rings()
        recorded = [sum(int((batch["step"] == step).sum()) for batch in place.spans()) for step in range(STEPS)]

        def arrived() -> list[tuple[int, int]]:
            """How many spans of each step have arrived beside its root, and how many were left out."""
            told = [servers.attributes(span) for span in collector.spans()]
            of = [[said.get(s.DL_SPANS_LEFT_OUT, 0) for said in told if said.get(s.DL_STEP) == n] for n in range(STEPS)]
            return [(len(left_out) - 1, sum(left_out)) for left_out in of]

        servers.wait_until(lambda: list(map(sum, arrived())) == recorded, what="all that was not left out")
        left_out = [left_out for _, left_out in arrived()]

    assert left_out[2:4] == [0, 0]


def test_two_jobs_at_once_stay_two(place):
    """Torchrun's run id is `none` for both; each agrees on an id of its own."""
    place.write(TRAIN)
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--nnodes", "1"]
    jobs = []
    for _ in range(2):
        port = servers.free_port()
        command = [sys.executable, *launcher, "--master-port", str(port), "program.py"]
        jobs.append(place.popen(command, OTEL_DLTRACE="1", OMP_NUM_THREADS="1"))
    results = [place.finish(job) for job in jobs]

    assert [r.returncode for r in results] == [0, 0], results[0].stderr + results[1].stderr
    place.wait_for_rings()
    binds = [[batch.process.bind for batch in read_run(run)] for run in place.runs()]
    assert len(binds) == 2
    assert [sorted(b.rank for b in run) for run in binds] == [[0, 1], [0, 1]]
    assert len({b.job for run in binds for b in run}) == 2


def test_an_elastic_restart_keeps_the_ranks_together(place):
    """A rank fails once: two generations of one job, each with both ranks."""
    # torch 2.13's ranks share the agent's store, where Gloo may find the addresses of the first start.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    failing = textwrap.dedent(TRAIN) + textwrap.dedent("""
        import os
        if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            sys.exit(1)
    """)
    place.write(failing)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "program.py"]
    job = place.popen(command, OTEL_DLTRACE="1", OMP_NUM_THREADS="1", **own_store)
    result = place.finish(job)

    assert result.returncode == 0, result.stderr
    place.wait_for_rings()
    binds = [[batch.process.bind for batch in read_run(run)] for run in place.runs()]
    assert sorted((b.generation_number, b.attempt, b.rank) for run in binds for b in run) == [
        (1, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (2, 1, 1),
    ]
    assert len({b.job for run in binds for b in run}) == 1
    assert [len({b.generation for b in run}) for run in binds] == [1, 1]


def test_run_prints_the_report_and_export_writes_a_chrome_trace(place):
    """The stranger's one command, and the file that Perfetto opens."""
    place.write(TRAIN)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = place.command("run", "--", *launcher, "program.py", OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
    (run,) = place.runs()
    assert run.name in result.stderr
    assert re.search(r"backward", result.stdout)
    assert re.search(r"all_reduce", result.stdout)
    assert list(place.rings.iterdir()) == []

    export = place.command("export", str(run), "--to", "chrome", "-o", "trace.json.gz")

    assert export.returncode == 0, export.stderr
    with gzip.open(place.folder / "trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    spans = sum(len(batch) for batch in read_run(run))
    assert sum(event["ph"] == "X" for event in events) == spans
    assert {e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "process_name"} >= set()
    assert {event["ph"] for event in events} >= {"X", "M", "s", "f"}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Give a folder with a run of one step."""
    with a_place(tmp_path_factory.mktemp("recorded")) as it:
        it.run("import otel_dltrace as d\nd.start()\nwith d.step(): pass")
        it.wait_for_rings()
        yield it


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        pytest.param(("report", "nowhere"), "nowhere is not a run directory", id="no run"),
        pytest.param(("report", "RUN", "--rank", "7"), "rank 7 is not in this run", id="no rank"),
        pytest.param(("report", "RUN", "--steps", "900-901"), "none of the steps", id="no step"),
        pytest.param(("report", "RUN", "--steps", "soon"), "'soon' is not a range of steps", id="no range"),
        pytest.param(
            ("export", "RUN", "--to", "chrome", "-o", "/proc/x.json"), "/proc/x.json cannot be written", id="no file"
        ),
        pytest.param(("run",), "no program given", id="no program"),
        pytest.param(("run", "--", "./not-there"), "not-there cannot be started", id="no such program"),
    ],
)
def test_what_a_user_gets_wrong_is_one_sentence(recorded, args, sentence):
    """Exit code 2, what, which value."""
    run = str(recorded.runs()[0])
    result = recorded.command(*[run if arg == "RUN" else arg for arg in args])

    assert result.returncode == 2, result.stdout
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_a_run_that_can_start_no_drain_says_so(place):
    """Nothing is run then: with as few open files as here no program could be."""
    command = f"ulimit -n 9; exec {sys.executable} -m otel_dltrace run -- true"
    result = place.finish(place.popen(["sh", "-c", command]))

    assert result.returncode == 2
    assert result.stderr == "otel-dltrace: the drain cannot be started: [Errno 24] Too many open files\n"

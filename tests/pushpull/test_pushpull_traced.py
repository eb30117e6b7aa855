"""push_pull jobs under tracing, as real processes: what workers and servers record, and where it all goes."""

import json
import os
import re
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from otel_dltrace.cli.pushpull import traced_environment
from otel_dltrace.export.rundir.reader import read_run, read_summaries
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP, trace_id
from otel_dltrace.model.server_keys import first_key
from otel_dltrace.model.topology import World
from otel_dltrace.pushpull.keys import KeyHash, server_of
from otel_dltrace.report.words import ms
from otel_dltrace.settings.config import Config
from otel_dltrace.settings.process import environment_bind, job_name_of
from tests.support import servers
from tests.support.paths import ROOT
from tests.support.processes import Place, a_place

EXAMPLES = ROOT / "examples"
STEPS = 6
SIZE = 12_000  # bytes of a tensor: two partitions
WORKERS, LOCAL_RANKS, SERVERS = 2, 2, 2
PROGRAM = f"""
    import os, signal, time
    from pathlib import Path
    import numpy as np
    import otel_dltrace
    from otel_dltrace.pushpull.compression import Fp16
    from otel_dltrace.pushpull.engine import Engine
    from otel_dltrace.pushpull.options import read_env

    layout, options = read_env(os.environ)
    engine = Engine(layout, options)
    engine.start()
    plain, packed = engine.declare("plain"), engine.declare("packed", compressor=Fp16())

    def push_pull(*tensors, step=-1):
        with Path(f"begun.{{layout.rank}}").open("a") as file:
            file.write(f"{{time.monotonic_ns()}}\\n")
        operations = [engine.push_pull(t, np.ones({SIZE} // 4, np.float32), average=False) for t in tensors]
        Path(f"step{{step}}.{{layout.rank}}").touch()
        for operation in operations:
            engine.wait(operation)

    push_pull(plain)  # outside any step, as parameters are sent
    for step in range({STEPS}):
        with otel_dltrace.step():
            if layout.rank == int(os.environ.get("SLOW", -1)):
                time.sleep(0.2)
            if layout.rank == int(os.environ.get("DIES", -1)) and step == 3:
                while len([*Path().glob("step3.*")]) < layout.size - 1:
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)
            push_pull(plain, packed, step=step)
    engine.stop()
"""
ENV = {
    "BYTEPS_PARTITION_BYTES": "8192",
    "BYTEPS_MIN_COMPRESS_BYTES": "0",
    "PUSHPULL_TIMEOUT": "120",
    "OTEL_DLTRACE_SPAN_BUDGET": "0",
}
# Spec 2.3 for several machines of two GPUs on one switch: the highest local rank is the root.
ROOT = ("REDUCE", "COPYD2H", "PUSH", "PULL", "COPYH2D", "BROADCAST")
PACKED = ("REDUCE", "COPYD2H", "COMPRESS", "PUSH", "PULL", "DECOMPRESS", "COPYH2D", "BROADCAST")
OTHERS = (
    "COORDINATE_REDUCE",
    "REDUCE",
    "COPYD2H",
    "COORDINATE_PUSH",
    "COPYH2D",
    "COORDINATE_BROADCAST",
    "BROADCAST",
)


class Span(NamedTuple):
    """A row of a run, with what its descriptor and its process say."""

    role: str
    rank: int
    name: str
    tensor: str
    key: int
    partition: int
    seq: int
    step: int
    start: int
    end: int
    size: int
    wait: int
    b: int
    flags: int
    error: str
    id: int
    parent: int


def launch(place: Place, *options: str, program: str = PROGRAM, **env: str) -> Any:
    """Run *program* as a job of two workers with two local ranks, and two servers, under ``otel-dltrace run``."""
    script = str(place.write(program, "job.py"))
    counts = ["--workers", str(WORKERS), "--local-ranks", str(LOCAL_RANKS), "--servers", str(SERVERS)]
    job = [sys.executable, "-m", "otel_dltrace", "pushpull", "launch", *counts, "--", sys.executable, script]
    return place.command("run", "--no-report", *options, "--", *job, **{**ENV, **env})


def spans_of(run: Path) -> list[Span]:
    """Return what *run* holds, by start."""
    found = []
    for batch in read_run(run):
        bind = batch.process.bind
        for i, row in enumerate(batch.rows):
            d = batch.descriptor_of(i)
            columns = ("partition", "seq", "step", "start", "end", "size", "a", "b", "flags")
            numbers = [int(row[name]) for name in columns]
            error, ids = batch.errors[row["error"]][0], (int(row["span_id"]), int(row["parent_id"]))
            found.append(Span(bind.role, bind.rank, d.name, d.tensor, d.key, *numbers, error, *ids))
    return sorted(found, key=lambda span: span.start)


class Job(NamedTuple):
    """A finished run: its directory, its spans, and what came to the collector."""

    run: Path
    spans: list[Span]
    sent: Any


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Run one job, told nothing of levels, with a real collector behind it."""
    folder = tmp_path_factory.mktemp("traced")
    with a_place(folder) as place, servers.collector(folder) as collector:
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.http}
        done = launch(place, "--steps", "all", SLOW="3", **endpoint)
        assert done.returncode == 0, done.stderr
        place.deliver(**endpoint)
        (run,) = place.runs()
        spans = spans_of(run)
        collector.wait_for(len(spans) + STEPS)  # and the roots
        yield Job(run, spans, collector.traces())


EXPECTED = {"plain": {0: OTHERS, 1: ROOT}, "packed": {0: OTHERS, 1: PACKED}}
"""The stages of each tensor's partitions on each local rank."""


def all_stages() -> dict[tuple[Any, ...], tuple[str, ...]]:
    """Return the stages of each rank, tensor, occurrence, step and partition."""
    return {
        (rank, tensor, seq, step, partition): EXPECTED[tensor][rank % 2]
        for rank in range(WORKERS * LOCAL_RANKS)
        for tensor, seq, step in push_pulls()
        for partition in range(2)
    }


def push_pulls() -> list[tuple[str, int, int]]:
    """Return tensor, occurrence and step of each operation that a rank makes."""
    plain = [("plain", 1, NO_STEP), *(("plain", 2 + step, step) for step in range(STEPS))]
    return plain + [("packed", 1 + step, step) for step in range(STEPS)]


def test_each_partition_has_its_stages_in_order(job):
    """Below its operation, in its step, one after the other, for each rank and occurrence: as section 2.3 has it."""
    operations = {span.id: span for span in job.spans if span.name == s.PUSH_PULL}
    stages = defaultdict(list)
    for span in job.spans:
        if span.role == "worker" and span.parent in operations and span.name != s.WAIT:
            above = operations[span.parent]
            assert above[1:2] + above[3:5] + above[6:8] == span[1:2] + span[3:5] + span[6:8]
            assert above.start <= span.start <= span.end <= above.end
            stages[span.rank, span.tensor, span.seq, span.step, span.partition].append(span)

    assert {which: tuple(span.name for span in each) for which, each in stages.items()} == all_stages()
    for each in stages.values():
        for before, span in pairwise(each):
            assert span.start - before.end >= span.wait * 1000 >= 0, "a bar begins when the partition leaves the queue"
    assert {span.size for each in stages.values() for span in each} == {8192, SIZE - 8192}


def test_what_the_program_waits_for_is_below_it(job):
    """From when it asked for the result until that was there; of one that was done by then there is none."""
    by_id = {span.id: span for span in job.spans}
    waits = [span for span in job.spans if span.name == s.WAIT]
    for span in waits:
        above = by_id[span.parent]
        assert (above.name, above.role, above.rank, above.step) == (s.PUSH_PULL, "worker", span.rank, span.step)
        assert above.start <= span.start
        assert above.end == span.end, "Jaeger warns of a child that hangs over its parent"
    assert len({span.parent for span in waits}) == len(waits)
    assert {span.step for span in waits} >= set(range(STEPS)), "whoever is first waits for the slow one"


def test_each_request_is_below_the_stage_that_sent_it(job):
    """In the worker's step, of the same key and occurrence, within its time; each push and pull has one."""
    by_id = {span.id: span for span in job.spans}
    requests = [span for span in job.spans if span.role == "server"]
    for span in requests:
        above = by_id[span.parent]
        assert (above.role, above.rank, above.name.lower()) == ("worker", span.b, span.name)
        assert above[3:8] == span[3:8]
        assert above.start <= span.start <= span.end <= above.end
        assert span.wait * 1000 <= span.end - span.start

    sent = [span.id for span in job.spans if span.role == "worker" and span.name in ("PUSH", "PULL")]
    assert sorted(span.parent for span in requests) == sorted(sent)
    assert {span.rank for span in requests} == {0, 1}
    assert {span.b for span in requests} == {1, 3}


def test_the_collector_has_every_stage_in_order(job):
    """With its queue type, key and partition as attributes, by the times that were sent."""
    found = defaultdict(list)
    for resource in job.sent.resource_spans:
        process = servers.attributes(resource.resource)
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            told = servers.attributes(span)
            if s.DL_QUEUE_TYPE in told:
                assert told[s.DL_KEY] == {"plain": 0, "packed": 1}[told[s.DL_TENSOR_NAME]] << 16 | told[s.DL_PARTITION]
                which = (process[s.DL_RANK], told[s.DL_TENSOR_NAME], told.get(s.DL_STEP, NO_STEP), told[s.DL_PARTITION])
                found[which].append((span.start_time_unix_nano, told[s.DL_QUEUE_TYPE]))

    in_order = {which: tuple(queue for _, queue in sorted(stages)) for which, stages in found.items()}
    assert in_order == {(rank, tensor, *rest): stages for (rank, tensor, _, *rest), stages in all_stages().items()}


def test_the_collector_has_them_in_one_trace(job):
    """What is in the run directory has arrived, and a server's span is in the trace of its step and of its parent."""
    bind = next(batch.process.bind for batch in read_run(job.run))
    sent = {}
    for resource in job.sent.resource_spans:
        role = servers.attributes(resource.resource)[s.DL_ROLE]
        for scope in resource.scope_spans:
            sent |= {int.from_bytes(span.span_id, "big"): (role, span) for span in scope.spans}
    traces = {key: int.from_bytes(span.trace_id, "big") for key, (_, span) in sent.items()}

    expected = {span.id: trace_id(bind, "ops.0" if span.step == NO_STEP else span.step) for span in job.spans}
    assert {key: traces[key] for key in expected} == expected
    for role, span in sent.values():
        if role == "server":
            told, parent = servers.attributes(span), sent[int.from_bytes(span.parent_span_id, "big")][1]
            above = servers.attributes(parent)
            assert parent.trace_id == span.trace_id
            assert (told[s.DL_KEY], told[s.DL_TENSOR_NAME], told.get(s.DL_STEP)) == (
                above[s.DL_KEY],
                above[s.DL_TENSOR_NAME],
                above.get(s.DL_STEP),
            )
            assert told[s.DL_COMM_PEER_RANK] in (1, 3)


def sent_in_full(data: Any) -> dict[str, Counter[int]]:
    """Return how many pushes and pulls of each step there are, by whose side of them it is."""
    found = {"worker": Counter(), "server": Counter()}
    for resource in data.resource_spans:
        role = servers.attributes(resource.resource)[s.DL_ROLE]
        for span in (span for scope in resource.scope_spans for span in scope.spans):
            if span.name.lower() in (s.PUSH, s.PULL):
                found[role][servers.attributes(span).get(s.DL_STEP, NO_STEP)] += 1
    return found


def test_a_slow_step_goes_out_with_the_servers_part(place, tmp_path):
    """It is known by its end, seconds after they have answered; a usual step outside the window is without details."""
    pause = "time.sleep(4 * (step == 4))  # longer than anything is held for its own sake\n"
    program = PROGRAM.replace("step=step)\n", f"step=step)\n            {pause}")
    with servers.collector(tmp_path) as collector:
        endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.http, "OTEL_BSP_SCHEDULE_DELAY": "250"}
        done = launch(place, "--steps", "0-0", program=program, SLOW="3", **endpoint)
        assert done.returncode == 0, done.stderr
        place.deliver(**endpoint)
        (drain,) = read_summaries(*place.runs())
        collector.wait_for(drain["summary"]["otlp"]["accepted"])
        sent = sent_in_full(collector.traces())

    assert sent["server"] == sent["worker"]
    # What all of them wait for is 0.2 s a step; a machine that stops for as long makes one more step slow.
    assert sent["server"].keys() >= {NO_STEP, 0, 4}
    assert len(sent["server"]) < STEPS
    assert sent["server"][4] == WORKERS * 2 * 2 * 2, "two tensors of two partitions are pushed and pulled"


def test_a_process_group_of_torch_leaves_workers_in_the_run_of_their_servers(place):
    """Servers know no store of torch: the run is that which the launcher has told all of them."""
    group = """
    import torch, torch.distributed as dist
    store = dist.FileStore("store", layout.size)
    dist.init_process_group("gloo", store=store, rank=layout.rank, world_size=layout.size)
    dist.all_reduce(torch.ones(1))
    """
    program = PROGRAM.replace("    engine = Engine", f"{group.strip(' ')}    engine = Engine")
    done = launch(place, program=program)
    assert done.returncode == 0, done.stderr
    (run,) = place.runs()
    assert {(span.role, span.rank) for span in spans_of(run)} == {
        *(("worker", rank) for rank in range(WORKERS * LOCAL_RANKS)),
        *(("server", rank) for rank in range(SERVERS)),
    }


def test_a_slow_worker_is_named_from_both_sides(job, place):
    """Rank 3 sleeps 200 ms before it pushes: workers and servers say that it is last, and by how much it was."""
    begun = [[int(line) for line in (job.run.parent / f"begun.{rank}").read_text().split()[1:]] for rank in range(4)]
    planted = median(mine - max(others) for *others, mine in zip(*begun, strict=True))
    found = json.loads(place.command("report", str(job.run), "--by", "key", "--json").stdout)
    text = place.command("report", str(job.run), "--by", "key").stdout

    for side, whose in (("workers", ""), ("servers", f", which pushes for its worker's {LOCAL_RANKS} ranks,")):
        seen = {rank["rank"]: rank[side] for rank in found["ranks"] if rank[side]}
        last = max(seen.values(), key=itemgetter("times"))
        assert last["rank"] == 3, seen
        assert abs(last["late"] - planted) < 100e6, (last, planted)
        share = f"{last['times']} of {last['arrivals']} times, by {ms(last['late'])} ms (p50)"
        assert f"Seen from the {side}, rank 3{whose} comes last most often: {share}." in " ".join(text.split())


def test_a_killed_worker_leaves_complete_spans(place, tmp_path):
    """The others end with an error that is on their spans, no ring stays, and BytePS's files are written anyway."""
    traces = tmp_path / "not" / "there"
    window = {"BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_START_STEP": "1", "BYTEPS_TRACE_END_STEP": "100"}
    done = launch(place, DIES="2", BYTEPS_TRACE_DIR=str(traces), **window)
    assert done.returncode == 137, done.stderr
    assert "PeerLostError" in done.stderr
    assert list(place.rings.glob("*.ring")) == []

    spans = spans_of(*place.runs())
    workers = [span for span in spans if span.role == "worker" and span.name != s.WAIT]
    whole = Counter((span.rank, span.step) for span in workers if span.step < 3)
    others, root = 1 + 2 + 4 * len(OTHERS), 1 + 2 + 2 * len(ROOT) + 2 * len(PACKED)
    assert whole == {(rank, step): root if rank % 2 else others for rank in range(4) for step in range(3)}
    last = [span for span in workers if span.step == 3 and span.flags & s.Flag.TRUNCATED]
    assert [(span.rank, span.name) for span in last] == [(2, s.RANK_STEP)]
    failed = Counter((span.rank, span.error) for span in spans if span.name == s.PUSH_PULL and span.error)
    assert failed == dict.fromkeys([(rank, "otel_dltrace.pushpull.errors.PeerLostError") for rank in (0, 1, 3)], 2)

    said = place.command("report", *map(str, place.runs())).stdout
    assert re.search("Rank 3 had the first error: [a-z_.]*PeerLostError: .*local rank 0", " ".join(said.split())), said

    files = sorted(str(path.relative_to(traces)) for path in traces.rglob("*"))
    assert [name for name in files if name.endswith(".json")] == [
        f"worker{worker}/{local}/comm.json" for worker in range(2) for local in range(2)
    ]


def test_an_error_that_nobody_caught_comes_before_those_that_follow_from_it(place):
    """The worker says goodbye as its program ends, and the others fail of that at once."""
    program = """
    import torch
    import otel_dltrace.pushpull.torch as bps

    bps.init()
    for number in range(6):
        if bps.rank() == 2 and number == 3:
            raise ValueError("planted")
        bps.push_pull(torch.ones(5), name="x")
    """
    pytest.importorskip("torch")
    done = launch(place, program=program)
    assert done.returncode == 1, done.stderr
    assert "PeerLostError" in done.stderr

    said = place.command("report", *map(str, place.runs())).stdout
    assert "Rank 2 had the first error: ValueError: planted (in exit outside any step)." in " ".join(said.split()), said


@pytest.mark.parametrize("as_in_profile", [False, True], ids=["a key", "a pid of the profile"])
def test_the_old_variables_choose_what_is_traced_and_written(place, tmp_path, as_in_profile):
    """The timeline holds the second and third time of each tensor, whatever goes out, the profile one key."""
    key = 1 << 16 | 1  # of server 1
    pid = key + first_key(server_of(key, SERVERS, KeyHash(), WORKERS), SERVERS)
    env = {
        "OTEL_DLTRACE_LEVEL": "phase",
        "OTEL_DLTRACE_STEPS": "all",
        "BYTEPS_TRACE_ON": "1",
        "BYTEPS_TRACE_START_STEP": "2",
        "BYTEPS_TRACE_END_STEP": "3",
        "BYTEPS_TRACE_DIR": "traces",
        "BYTEPS_SERVER_ENABLE_PROFILE": "1",
        "BYTEPS_SERVER_PROFILE_OUTPUT_PATH": "profile/server.json",
        "BYTEPS_SERVER_KEY_TO_PROFILE": str(pid if as_in_profile else key),
    }
    done = launch(place, **env)
    assert done.returncode == 0, done.stderr

    comm = json.loads((tmp_path / "traces" / "worker1" / "1" / "comm.json").read_text())["traceEvents"]
    expected = Counter()
    for tensor, stages in (("plain", ROOT), ("packed", PACKED)):
        expected[f"Comm.{tensor}", "total"] = 2
        for partition in range(2):
            key = str((tensor == "packed") << 16 | partition)
            expected.update({(f"Comm.{tensor}.{stage}", key): 2 for stage in stages})
    assert Counter((event["name"], event["tid"]) for event in comm) == expected
    assert {tuple(event) for event in comm} == {("ph", "args", "pid", "name", "ts", "dur", "tid", "cat")}

    (run,) = place.runs()
    assert place.command("export", str(run), "--to", "byteps", "-o", "again").returncode == 0
    files = sorted(path.relative_to(tmp_path / "traces") for path in (tmp_path / "traces").rglob("*.json"))
    assert len(files) == WORKERS * LOCAL_RANKS
    for file in files:
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "traces" / file).read_bytes()

    (profile,) = (tmp_path / "profile").rglob("server.json")
    events = json.loads(profile.read_text())["traceEvents"]
    names = {f"{kind}-{worker}" for kind in ("push", "pull") for worker in (9, 11)}
    assert Counter(event["name"] for event in events) == dict.fromkeys(names, 2 * STEPS)


def test_without_stages_requests_are_below_their_operation(place):
    """At a level without partitions servers may be asked to record theirs; that workers have none is said."""
    traces = {"OTEL_DLTRACE_COMM_DIR": "traces", "OTEL_DLTRACE_COMM_STEPS": "200-300"}
    done = launch(place, "--level", "phase", OTEL_DLTRACE_SERVER_SPANS="on", **traces)
    assert done.returncode == 0, done.stderr

    spans = spans_of(*place.runs())
    by_id = {span.id: span for span in spans}
    names = Counter((span.role, span.name) for span in spans if span.name != s.WAIT)
    requests = 2 * 2 * len(push_pulls())
    assert names == {
        ("worker", s.RANK_STEP): 4 * STEPS,
        ("worker", s.PUSH_PULL): 4 * len(push_pulls()),
        ("server", s.PUSH): requests,
        ("server", s.PULL): requests,
    }
    served = [span for span in spans if span.role == "server"]
    assert {(by_id[span.parent].name, by_id[span.parent].step == span.step) for span in served} == {(s.PUSH_PULL, True)}

    missing = "traces is not written: the run has no push_pull, and a comm.json holds nothing else (200-300 of each"
    assert missing in done.stderr.splitlines()[-1]
    done = place.command("export", str(place.runs()[0]), "--to", "byteps", "--completions", "all")
    assert (done.returncode, "no stage of a partition was recorded, only totals" in done.stderr) == (0, True)


def test_a_file_that_cannot_be_written_at_the_end_is_said_in_the_last_line(place, tmp_path):
    """The job has ended well, so nobody would look for it elsewhere."""
    in_the_way = 'Path("traces").mkdir(exist_ok=True); Path("traces/worker0").touch()'
    traces = {"OTEL_DLTRACE_COMM_DIR": "traces"}
    done = launch(place, program=f"{PROGRAM}    {in_the_way}\n", **traces)

    assert done.returncode == 0
    trouble = f"; {tmp_path}/traces/worker0/[01] cannot be written .Not a directory.; `otel-dltrace export` does it"
    assert re.search(trouble, done.stderr.splitlines()[-1]), done.stderr


LINES = """
    set -e
    job="otel-dltrace pushpull launch --workers 2 --local-ranks 2 --servers 2 -- python examples/train_pushpull.py"
    job="$job --epochs 2 --steps 6 --width 16 --depth 1"
    OTEL_DLTRACE=1 otel-dltrace run -- $job > first
    BYTEPS_TRACE_ON=1 BYTEPS_TRACE_START_STEP=10 BYTEPS_TRACE_END_STEP=20 BYTEPS_TRACE_DIR=./traces $job
    FIRST=$(sed -n 's/.*; in //p' said | head -1)
    otel-dltrace import byteps traces/ -o RUN
    otel-dltrace export RUN --to byteps -o again/
    otel-dltrace export $FIRST --to byteps -o first-traces/
    otel-dltrace export $FIRST --to byteps-server
    otel-dltrace report $FIRST --by key > by-key
    otel-dltrace report RUN --by key > imported-by-key
"""


def test_the_command_lines_of_a_user_do_what_they_say(place, tmp_path):
    """From a job, traced for nothing but one variable, to BytePS's files, and from these to a run again."""
    pytest.importorskip("torch", reason="the example trains a model of torch")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    path = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = place.finish(place.popen(["bash", "-c", f"exec 2> >(tee said >&2)\n{textwrap.dedent(LINES)}"], **path))
    assert done.returncode == 0, done.stderr

    def totals(folder):
        read = (
            json.loads(file.read_text())["traceEvents"] for file in sorted(tmp_path.glob(f"{folder}/*/*/comm.json"))
        )
        return [
            Counter(e["name"] for e in events if e["tid"] == "total" and "Gradient" in e["name"]) for events in read
        ]

    names = [f"Comm.byteps.Gradient.{layer}.{kind}" for layer in (0, 2, 4) for kind in ("weight", "bias")]
    assert totals("first-traces") == [dict.fromkeys(names, 12)] * 4
    assert totals("traces") == totals("again") == [dict.fromkeys(names, 3)] * 4
    pushed = [
        event
        for file in tmp_path.glob("[01]/server_profile.json")
        for event in json.loads(file.read_text())["traceEvents"]
        if event["name"].startswith("push") and event["ph"] == "B"
    ]
    gradients, parameters, losses = 6 * 12, 6, 2
    assert len(pushed) == 2 * (gradients + parameters + losses)
    for report in ("by-key", "imported-by-key"):
        text = (tmp_path / report).read_text()
        assert "longest in" in text
        assert "byteps.Gradient.0.weight" in text
    assert "Seen from the servers, rank" in (tmp_path / "by-key").read_text()
    first = (tmp_path / "first").read_text()
    assert "push_pull byteps.Gradient" in first
    assert "for push_pull, `report --by key` shows the key, partition and server" in first


TORCH = """
    import torch
    import otel_dltrace.pushpull.torch as bps

    bps.init()
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 4)
    bps.broadcast_parameters(model.state_dict())
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    bps.shutdown()
"""


def test_the_steps_of_torch_hold_their_gradients(place):
    """Without a word from the program: each step of the optimizer has its gradients, on every rank."""
    pytest.importorskip("torch")
    done = launch(place, program=TORCH)
    assert done.returncode == 0, done.stderr

    spans = spans_of(*place.runs())
    found = Counter((span.tensor, span.step) for span in spans if span.name == s.PUSH_PULL)
    names = [f"Gradient.{name}" for name in ("weight", "bias")]
    expected = {(f"byteps.{name}", step): 4 for name in names for step in range(4)}
    assert found == expected | {(f"byteps.Parameter.{name}", NO_STEP): 4 for name in ("weight", "bias")}
    assert {"forward", "backward", "optimizer"} <= {span.name for span in spans}


RUN, LAUNCH = "OTEL_DLTRACE_RUN", "OTEL_DLTRACE_LAUNCH"
ON = {"OTEL_DLTRACE": "1"}


@pytest.mark.parametrize(
    ("env", "alone", "same"),
    [
        pytest.param({}, True, True, id="off"),
        pytest.param(ON, True, False, id="on"),
        pytest.param({"BYTEPS_TRACE_ON": "1"}, True, False, id="on by BytePS's variable"),
        pytest.param({"BYTEPS_SERVER_ENABLE_PROFILE": "1"}, True, False, id="on for its servers"),
        pytest.param(ON | {RUN: "r"}, True, False, id="one of several jobs of a run"),
        pytest.param(ON | {RUN: "r", LAUNCH: "l"}, True, True, id="given"),
        pytest.param(ON | {RUN: "r"}, False, True, id="one host of several"),
        pytest.param(ON, False, False, id="one host of several, and nothing given"),
    ],
)
def test_a_job_has_a_generation_of_its_own(env, alone, same, capsys):
    """All its processes are told the same, which no other job is, and to record stages; what was given is kept."""
    binds = []
    for _ in range(2):
        told = traced_environment(["python", "-u", "jobs/train.py", "--epochs", "3"], env, alone=alone)
        assert {name: told[name] for name in env} == env
        assert told == env or (job_name_of(told), Config.from_env(told).level) == ("train", "partition")
        binds.append(environment_bind(Config(run=told.get(RUN, ""), launch=told.get(LAUNCH, "")), World(), "train"))

    assert (binds[0] == binds[1]) == same
    assert ("give all hosts" in capsys.readouterr().err) == (not alone and RUN not in env)


def test_blanks_are_nothing_said_of_a_job():
    """As in a template that was left open: the processes are of one run all the same, and record stages."""
    told = traced_environment(["train.py"], ON | {RUN: "", "OTEL_DLTRACE_LEVEL": " "}, alone=True)

    assert (len(told[RUN]), told["OTEL_DLTRACE_LEVEL"], told.get(LAUNCH)) == (16, "partition", None)

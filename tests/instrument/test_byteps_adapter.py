"""The adapter for BytePS's own package: its push_pulls become operations, whoever asked for them."""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from otel_dltrace.export.foreign.byteps_ingest import ingest
from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.export.rundir.writer import RunWriter
from otel_dltrace.formats.comm_json import read_comm
from otel_dltrace.instrument import byteps
from otel_dltrace.instrument._sites import Site
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.model.time import Anchor
from tests.support import byteps_package, torch_harness
from tests.support.processes import Place, top_level
from tests.support.runs import MS, Rank

pytest.importorskip("torch")


SITES = [row for row in byteps.ROWS if isinstance(row, Site)]


@pytest.fixture(scope="session")
def sdist(tmp_path_factory) -> Path:
    """BytePS's sdist; it cannot be built here, and need not be."""
    found = byteps_package.download(tmp_path_factory.mktemp("sdist"))
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_every_row_is_there_in_the_sdist(sdist, site):
    """The function exists where the row says, and its parameters are those that are read."""
    file = {byteps.OPS: "torch/ops.py", byteps.PLUGIN: "torch/__init__.py"}[site.module]
    found = top_level(byteps_package.source(sdist, file))
    read = byteps.PARAMETERS.get(site.name, ("handle",) if site.name in {"synchronize", "poll"} else ())

    assert site.name in found
    assert tuple((found[site.name] or ())[: len(read)]) == read


TRAINING = """
    import byteps.torch as bps, torch
    from torch.utils.data import DataLoader, TensorDataset

    bps.init()
    torch.manual_seed(bps.rank())
    model = torch.nn.Linear(4, 2)
    bps.broadcast_parameters(dict(model.state_dict()), root_rank=1)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    for (points,) in DataLoader(TensorDataset(torch.full((4, 4), 1.0 + bps.rank())), batch_size=2):
        optimizer.zero_grad()
        model(points).sum().backward()
        optimizer.step()
    loss = bps.push_pull(torch.full((3,), bps.rank()).float(), name="loss")
    handle = bps.byteps_push_pull(torch.ones(5), average=False)
    while not bps.poll(handle):
        pass
    unnamed = bps.synchronize(handle)
    try:
        bps.byteps_push_pull(torch.ones(1), name="refused")
    except RuntimeError as error:
        print(error, loss.tolist(), unnamed.tolist(), bps.synchronize(handle))
"""
SAID = "Duplicated tensor_name [0.5, 0.5, 0.5] [2.0, 2.0, 2.0, 2.0, 2.0] None\n"


def two_ranks(place: Place, package: Path) -> list[SpanBatch]:
    """Return what two ranks of `TRAINING` recorded, by rank."""
    meet = place.folder / "meet"
    meet.mkdir()
    env = {"PYTHONPATH": str(package), "MEET": str(meet), "DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2"}
    env |= {"OTEL_DLTRACE": "1", "OTEL_DLTRACE_RUN": "run-7", "OMP_NUM_THREADS": "1"}
    ranks = [place.start(TRAINING, DMLC_WORKER_ID=str(rank), **env) for rank in range(2)]
    done = [place.finish(rank) for rank in ranks]
    assert [(rank.returncode, rank.stdout) for rank in done] == [(0, SAID)] * 2, done
    place.wait_for_rings()
    return sorted(place.spans(), key=lambda batch: batch.rank)


def operations(batch: SpanBatch) -> list[tuple[Any, ...]]:
    """Return (tensor, occurrence, step, bytes, root, asynchronous, error) of the operations, by start."""
    found = sorted(batch.take(batch.is_kind(s.COLLECTIVE)).rows, key=lambda row: row["start"])
    return [
        (
            batch.descriptors[row["descriptor"]].tensor,
            int(row["seq"]),
            None if row["step"] == NO_STEP else int(row["step"]),
            int(row["size"]),
            int(row["b"]),
            bool(row["flags"] & s.Flag.ASYNC),
            batch.errors[row["error"]],
        )
        for row in found
    ]


NO_ERROR = ("", "")
EXPECTED = [
    ("byteps.Parameter.bias", 1, None, 8, 1, True, NO_ERROR),
    ("byteps.Parameter.weight", 1, None, 32, 1, True, NO_ERROR),
    ("byteps.Gradient.bias", 1, 0, 8, -1, True, NO_ERROR),
    ("byteps.Gradient.weight", 1, 0, 32, -1, True, NO_ERROR),
    ("byteps.Gradient.bias", 2, 1, 8, -1, True, NO_ERROR),
    ("byteps.Gradient.weight", 2, 1, 32, -1, True, NO_ERROR),
    ("byteps.loss", 1, 1, 12, -1, False, NO_ERROR),
    ("byteps.noname.0", 1, 1, 20, -1, True, NO_ERROR),
    ("byteps.refused", 0, 1, 4, -1, True, ("RuntimeError", "Duplicated tensor_name")),
]


@pytest.fixture(params=["its surface", "its own Python"])
def package(request, tmp_path_factory) -> Path:
    """A ``byteps`` to import: one with the same surface, and BytePS's own Python above a stand-in for its C++."""
    own = request.getfixturevalue("sdist") if request.param == "its own Python" else None
    return byteps_package.lay_out(tmp_path_factory.mktemp("package"), own)


def test_each_push_pull_is_an_operation_on_every_rank(place, package):
    """Broadcasts, gradients from hooks, blocking and polled calls: once each, in the same run, alike on both ranks."""
    batches = two_ranks(place, package)
    described = {(d.name, d.backend, d.group_size, d.dtype) for batch in batches for d in batch.descriptors if d.tensor}

    assert [batch.process.bind.generation for batch in batches] == [batches[0].process.bind.generation] * 2
    assert [(batch.rank, operations(batch)) for batch in batches] == [(0, EXPECTED), (1, EXPECTED)]
    assert described == {(s.PUSH_PULL, "byteps", 2, "float32")}


ALONE = """
    import json, os, sys
    sys.path.insert(0, os.environ["PACKAGE"])
    os.environ |= {"DMLC_NUM_WORKER": "1", "DMLC_WORKER_ID": "0", "MEET": os.environ["OUT"]}
"""


def alone(folder: Path, program: str) -> torch_harness.Recorded:
    """Return what one process that runs *program* recorded."""
    package = byteps_package.lay_out(folder / "package")
    [recorded] = torch_harness.run(folder, ALONE + program, PACKAGE=str(package))
    return recorded


def test_the_time_blocked_in_synchronize_is_a_child(tmp_path):
    """The operation lasts until its wait ends; where it was done before, nobody waited."""
    recorded = alone(
        tmp_path,
        """
    import byteps.torch.ops as ops, torch, threading
    from byteps.torch import c_lib

    free, wait = threading.Event(), c_lib.byteps_torch_wait_and_clear
    average = c_lib._average
    c_lib._average = lambda *args: (free.wait(), average(*args))
    handle = ops.push_pull_async(torch.ones(2), name="late")
    c_lib.byteps_torch_wait_and_clear = lambda handle: (free.set(), wait(handle))
    ops.synchronize(handle)
    handle = ops.push_pull_async(torch.ones(2), name="early")
    c_lib._done[handle].wait()
    ops.synchronize(handle)
    ops.synchronize(ops.push_pull_group_sync_inplace(torch.ones(2), name="group")[0])
    """,
    )
    [late, early, group] = recorded.spans(s.COLLECTIVE)
    waits = {span.parent: span for span in recorded.spans(s.PHASE, s.WAIT)}

    assert [span.descriptor.tensor for span in (late, early, group)] == ["byteps.late", "byteps.early", "byteps.group"]
    assert (waits[late.number].end, late.source) == (late.end, s.Source.HOST_DONE)
    assert early.number not in waits


def test_what_nobody_waits_for_ends_as_issued(tmp_path):
    """When tracing ends; that its end is not known is said."""
    recorded = alone(
        tmp_path,
        """
    import byteps.torch.ops as ops, torch
    ops.push_pull_async(torch.ones(2), name="lost")
    """,
    )
    [lost] = recorded.spans(s.COLLECTIVE)

    assert (lost.descriptor.tensor, lost.source) == ("byteps.lost", s.Source.HOST_ISSUE)


def test_an_imported_byteps_is_traced_and_given_back(tmp_path):
    """Names that other modules of it had taken are traced as well; afterwards every object is the one it was."""
    recorded = alone(
        tmp_path,
        """
    registry.uninstrument()
    import byteps.torch as bps, byteps.torch.ops as ops, torch

    def objects():
        return {(m.__name__, name): value for m in (bps, ops) for name, value in vars(m).items() if callable(value)}

    before = objects()
    bps.push_pull(torch.ones(1), name="before")
    registry.instrument()
    bps.push_pull(torch.ones(1), name="traced")
    registry.uninstrument()
    bps.push_pull(torch.ones(1), name="after")
    after = objects()
    say(same=all(after[name] is value for name, value in before.items()), count=len(before) - len(after))
    """,
    )

    assert recorded.said == [{"same": True, "count": 0}]
    assert [span.descriptor.tensor for span in recorded.spans(s.COLLECTIVE)] == ["byteps.traced"]


WITH_FILE = """
    import json, time
    from pathlib import Path
    import byteps.torch as bps, torch

    bps.init()
    events = []

    def event(tensor, stage, key, ts, dur):
        name = f"Comm.byteps.{tensor}"
        of_stage = {"name": f"{name}.{stage}", "tid": str(key)} if stage else {"name": name, "tid": "total"}
        events.append({"ph": "X", "args": {"name": name}, "pid": name, **of_stage, "ts": ts, "dur": dur, "cat": "Comm"})

    for nth in range(1, 5):
        for declared, tensor in enumerate(("a", "b")):
            begun = time.time_ns() // 1000
            bps.push_pull(torch.ones(4), name=tensor)
            half = (time.time_ns() // 1000 - begun) // 2
            if 2 <= nth <= 3:
                event(tensor, "", 0, begun, 2 * half)
                event(tensor, "PULL", declared << 16, begun + half, half)
                event(tensor, "PUSH", declared << 16, begun, half)
    path = Path("traces/0/comm.json")  # BytePS makes no folder
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
"""


def test_what_byteps_wrote_is_taken_in_at_the_end(place, tmp_path):
    """Each stage of its file hangs under the operation that we saw, whichever occurrence the file begins with."""
    package = byteps_package.lay_out(tmp_path / "package")
    env = {"PYTHONPATH": str(package), "DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "1", "DMLC_WORKER_ID": "0"}
    env |= {"MEET": str(tmp_path), "BYTEPS_TRACE_ON": "1", "BYTEPS_TRACE_START_STEP": "2", "BYTEPS_TRACE_END_STEP": "3"}
    env |= {"OTEL_DLTRACE": "1", "BYTEPS_TRACE_DIR": str(place.folder / "traces")}
    done = place.command("run", "--", sys.executable, str(place.write(WITH_FILE)), **env)
    assert done.returncode == 0, done
    batches = place.spans()
    operations = {
        int(row["span_id"]): (batch.descriptors[row["descriptor"]].tensor, int(row["seq"]))
        for batch in batches
        for row in batch.take(batch.is_kind(s.COLLECTIVE)).rows
    }
    stages = sorted(
        (*operations[int(row["parent_id"])], d.queue_type, d.key)
        for batch in batches
        for row in batch.rows
        if (d := batch.descriptors[row["descriptor"]]).queue_type
    )
    assert stages == [
        (f"byteps.{tensor}", nth, stage, key)
        for key, tensor in enumerate("ab")
        for nth in (2, 3)
        for stage in ("PULL", "PUSH")
    ]
    assert place.command("export", str(place.runs()[0]), "--to", "byteps", "-o", "again").returncode == 0
    again = read_comm((place.folder / "again" / "0" / "comm.json").read_bytes())
    asked = {(one.tensor, one.stage): 2 for one in again.series}
    assert Counter((one.tensor, one.stage) for one, _, _ in again.events()) == asked


def test_a_timeline_without_a_folder_is_told(tmp_path):
    """It was removed, or could not be made: then BytePS has lost what it had to write."""
    writer = a_traced_worker(tmp_path / "RUN", steps=2)
    notes = ingest(writer, tmp_path / "traces")
    (tmp_path / "traces" / "0").mkdir(parents=True)
    notes += ingest(writer, tmp_path / "traces")
    writer.close()
    path = tmp_path / "traces" / "0" / "comm.json"
    reasons = (
        "the folder is missing, and BytePS does not create it",
        "it does when every tensor has reached BYTEPS_TRACE_END_STEP",
    )
    assert notes == [f"BytePS has not written {path}: {reason}" for reason in reasons]


NOON = 1_700_000_000_000_000_000
PERIOD, WAITED = 100.0, 60.0


def a_traced_worker(root: Path, steps: int) -> RunWriter:
    """Write a worker to *root* whose push_pulls of one tensor begin every `PERIOD` ms."""
    worker = Rank(anchor=Anchor(0, NOON, 0))
    d = Descriptor(s.COLLECTIVE, s.PUSH_PULL, backend="byteps", tensor="byteps.a")
    for step in range(steps):
        worker.add(d, step, step * PERIOD, step * PERIOD + WAITED, seq=step + 1, level=s.Level.COLLECTIVE)
    batch, writer = worker.batch(), RunWriter(root, "node-0")
    writer.open()
    writer.name_run(batch.process.bind)
    writer.know(batch.process)
    writer.append(batch.process.nonce, batch.rows, batch.descriptors, [("", "")])
    writer.close_segment()
    return writer


def byteps_writes(traces: Path, begins: list[float]) -> Path:
    """Write what BytePS writes of one tensor whose totals begin at *begins*, ms after `NOON`."""
    events = []
    for begin in begins:
        ts = (NOON + round(begin * MS)) // 1000
        of_total = {"name": "Comm.byteps.a", "tid": "total", "ts": ts, "dur": 20_000}
        of_stage = {"name": "Comm.byteps.a.PUSH", "tid": "0", "ts": ts + 1000, "dur": 5_000}
        common = {"ph": "X", "args": {"name": "Comm.byteps.a"}, "pid": "Comm.byteps.a", "cat": "Comm"}
        events += [{**common, **of_total}, {**common, **of_stage}]
    path = traces / "0" / "comm.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return path


@pytest.mark.timeout(60)
def test_a_long_timeline_is_taken_in(tmp_path):
    """What its totals belong to is looked up in what is sorted once; to go through it for each took minutes."""
    writer = a_traced_worker(tmp_path / "RUN", steps=60_000)
    byteps_writes(tmp_path / "traces", [step * PERIOD + 0.2 for step in range(9, 60_000)])
    notes = ingest(writer, tmp_path / "traces")
    writer.close()
    taken = sum(int(batch.is_kind(s.PHASE).sum()) for batch in read_run(tmp_path / "RUN"))
    assert (taken, notes) == (60_000 - 9, [])


@pytest.mark.parametrize(
    ("begins", "taken", "off"),
    [
        pytest.param([200.2, 300.2], [3, 4], "", id="this worker's"),
        pytest.param([45.0, 100.2, 230.0, 300.2, 400.2], [1, 2, 3, 4, 5], "", id="some begin late"),
        pytest.param([45.0], [1], "", id="only the first, which a thread begins"),
        pytest.param([230.0, 330.0], [], "30.0", id="a machine that is always 30 ms later"),
        pytest.param([193.0, 307.0], [], "7.0", id="a machine a little before and after"),
        pytest.param([-900.0, -800.0], [], "900.0", id="long before"),
        pytest.param([300_000.0, 300_100.0], [], "299,600.0", id="long after"),
    ],
)
def test_what_another_machine_wrote_is_refused(begins, taken, off, tmp_path):
    """Two machines with one folder overwrite each other's file: whose it is shows in when its push_pulls begin."""
    writer = a_traced_worker(tmp_path / "RUN", steps=6)
    path = byteps_writes(tmp_path / "traces", begins)
    notes = ingest(writer, tmp_path / "traces")
    writer.close()
    batches = read_run(tmp_path / "RUN")
    operations = {int(row["span_id"]): int(row["seq"]) for b in batches for row in b.take(b.is_kind(s.COLLECTIVE)).rows}
    parents = [operations[int(row["parent_id"])] for b in batches for row in b.take(b.is_kind(s.PHASE)).rows]

    refused = (
        f"{path}: none of it is used, since its push_pulls begin {off} ms (median) off those of this worker: "
        "another machine wrote it, or the clock was set; give each machine a BYTEPS_TRACE_DIR of its own"
    )
    assert (parents, notes) == (taken, [refused] if off else [])

"""Collectives and DDP's buckets on real process groups: they are those that PyTorch's Flight Recorder has seen."""

import textwrap
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.torch_harness import Recorded, Span, counts, read_ring, run

pytest.importorskip("torch")


FLIGHT = """
def flight():
    dump = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))
    return [
        [
            e["process_group"][0],
            e["collective_seq_id"],
            e["profiling_name"].removeprefix("gloo:"),
            [s for s in e["input_sizes"]],
            [s for s in e["output_sizes"]],
        ]
        for e in dump["entries"]
    ]
"""


def numbered(spans: list[Span]) -> dict[tuple[str, int], Span]:
    """Return the spans by group and number."""
    return {(s.descriptor.group, s.seq): s for s in spans if s.seq}


def elements(sizes: list[list[int]]) -> int:
    """Return how many numbers tensors of these sizes hold."""
    total = 0
    for size in sizes:
        count = 1
        for dimension in size:
            count *= dimension
        total += count
    return total


CALLS = (
    FLIGHT
    + """
import time
import torch
import torch.distributed as dist
from torch.distributed import all_reduce

dist.init_process_group("gloo")
rank = dist.get_rank()
pair = dist.new_group([0, 1])
alone = dist.new_group([0])
ones = torch.ones(8)
all_reduce(ones)
dist.all_reduce(torch.ones(2, 3), group=pair)
dist.broadcast(ones, src=1)
dist.broadcast(torch.ones(5, dtype=torch.int64), group=pair, group_src=0)
dist.barrier()
dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3), async_op=False)
dist.all_gather_single(torch.empty(6), torch.ones(3))
dist.all_reduce(torch.ones(7), group=alone)  # outside of it rank 1 does nothing
launched = Path(os.environ["OUT"], "launched")
if rank == 0:
    while not (launched.exists() and stands(launched.read_text())):
        time.sleep(0.001)
work = dist.all_reduce(torch.ones(9), async_op=True)
assert isinstance(work, dist.Work)
if rank == 1:
    launched.with_suffix(".new").write_text(str(os.getpid()))
    launched.with_suffix(".new").rename(launched)
work.wait()
unwaited = dist.all_reduce(torch.ones(10), async_op=True)
while not unwaited.is_completed():
    time.sleep(0.01)
time.sleep(0.5)
dist.barrier()
say(flight=flight())
try:
    dist.all_reduce("no tensor")
except TypeError as error:
    say(error=type(error).__name__)
try:
    dist.broadcast(torch.ones(1), src=5)
except RuntimeError as error:
    say(error=str(error))
dist.destroy_process_group()
"""
)


@pytest.fixture(scope="module")
def called(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    """Two ranks that call every kind of collective."""
    return run(tmp_path_factory.mktemp("calls"), CALLS, 2, TORCH_FR_BUFFER_SIZE="2000")


NAMES = {"allreduce": "all_reduce", "allgather": "all_gather"}


def test_collectives_are_those_of_the_flight_recorder(called: list[Recorded]) -> None:
    """Same groups, numbers, operations and bytes as torch's own recorder says, in its order."""
    for rank, recorded in enumerate(called):
        expected = []
        for group, seq, profiling_name, inputs, outputs in recorded.said[0]["flight"]:
            name = NAMES.get(profiling_name, profiling_name)
            expected.append((group, seq, name, 0 if name == "barrier" else max(elements(inputs), elements(outputs))))
        width = {"int64": 8}
        seen = [
            (s.descriptor.group, s.seq, s.name.removesuffix("_single"), s.size // width.get(s.descriptor.dtype, 4))
            for s in recorded.spans("collective")
            if s.seq
        ]
        assert seen == expected, rank


def test_a_collective_says_group_backend_dtype_and_root(called: list[Recorded]) -> None:
    """What is constant about an operation is in its descriptor; the root is a rank of the world."""
    broadcasts = called[0].spans("collective", "broadcast")[:2]
    assert [(s.descriptor.group_size, s.descriptor.backend, s.descriptor.dtype, s.b) for s in broadcasts] == [
        (2, "gloo", "float32", 1),
        (2, "gloo", "int64", 0),
    ]


def test_both_ranks_give_a_collective_the_same_number(called: list[Recorded]) -> None:
    """Group and number name one collective on every rank."""
    first, second = (numbered(recorded.spans("collective")) for recorded in called)
    shared = first.keys() & second.keys()
    assert second.keys() == shared
    assert [(first[k].name, first[k].size) for k in shared] == [(second[k].name, second[k].size) for k in shared]
    assert [s.size for k, s in first.items() if k not in shared] == [7 * 4]


def test_a_nonblocking_collective_lasts_until_its_work_is_done(called: list[Recorded]) -> None:
    """Rank 1 waits for rank 0, who has seen it stand for 0.1 s: its span and the wait inside it show that."""
    (span,) = [s for s in called[1].spans("collective") if s.size == 9 * 4]
    (wait,) = called[1].spans("phase", "wait")
    assert (wait.parent, wait.step, span.flags) == (span.number, span.step, 1)
    assert wait.start >= span.start
    assert wait.end - wait.start >= 100e6
    assert wait.start < span.end <= wait.end


def test_a_work_that_nobody_waits_for_ends_when_it_is_done(called: list[Recorded]) -> None:
    """Its future says when; the sleep after that is not part of it."""
    for recorded in called:
        (span,) = [s for s in recorded.spans("collective", "all_reduce") if s.size == 10 * 4]
        barrier = recorded.spans("collective", "barrier")[-1]
        assert span.end < barrier.start - 100e6


def test_an_error_leaves_unmodified_and_is_recorded(called: list[Recorded]) -> None:
    """The program sees torch's own errors; the spans say their types."""
    for recorded in called:
        errors = [fields["error"] for fields in recorded.said if "error" in fields]
        assert errors == ["TypeError", "ProcessGroupGloo::broadcast: invalid root rank: 5"]
        failed = [s for s in recorded.spans("collective") if s.flags & 2]
        assert [(s.name, s.seq, s.size) for s in failed] == [("all_reduce", 0, 0), ("broadcast", 0, 4)]
        assert recorded.errors == [(failed[0].number, "TypeError"), (failed[1].number, "RuntimeError")]


BUCKETS = (
    FLIGHT
    + """
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(128, 128) for _ in range(4)])
ready = {}
for i, parameter in enumerate(model.parameters()):
    parameter.register_hook(lambda gradient, i=i: ready.__setitem__(i, time.monotonic_ns()))
ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
for step in range(6):
    optimizer.zero_grad()
    if step == 3:
        with ddp.no_sync():
            ddp(torch.ones(4, 128)).sum().backward()
    loss = ddp(torch.ones(4, 128)).sum()
    time.sleep(0.03)
    if step == 4:
        dist.all_reduce(loss.detach(), async_op=True)
    loss.backward()
    optimizer.step()
    say(step=step, ready=ready)
say(flight=flight())
hooked = nn.Linear(8, 8)
hooked = nn.parallel.DistributedDataParallel(hooked)
hooked.register_comm_hook(None, allreduce_hook)
for step in range(3):
    hooked(torch.ones(1, 8)).sum().backward()
dist.destroy_process_group()
"""
)


@pytest.fixture(scope="module")
def bucketed(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    """Two ranks that train with DDP."""
    return run(tmp_path_factory.mktemp("buckets"), BUCKETS, 2, TORCH_FR_BUFFER_SIZE="2000")


def buckets(recorded: Recorded, step: int) -> list[Span]:
    """Return the bucket spans of *step* but for those of the small model at the end."""
    return [s for s in recorded.spans("collective") if s.descriptor.tensor and s.step == step and s.size > 1000]


def test_buckets_are_those_of_the_flight_recorder(bucketed: list[Recorded]) -> None:
    """Every bucket with a number is the all-reduce that torch's own recorder has under that number, of its size."""
    for recorded in bucketed:
        flown = {
            (group, seq): (NAMES.get(name, name), elements(inputs) * 4)
            for group, seq, name, inputs, _ in recorded.said[-1]["flight"]
        }
        certain = [s for step in range(6) for s in buckets(recorded, step) if s.seq]
        assert len(certain) > 10
        assert [flown[s.descriptor.group, s.seq] for s in certain] == [(s.name, s.size) for s in certain]


def test_every_synchronising_backward_has_its_buckets(bucketed: list[Recorded]) -> None:
    """One in the first step, all of them after that; none in no_sync; no number where another call interferes."""
    first, second = (
        [
            [(s.descriptor.tensor, s.size, s.seq > 0, s.source, s.parent, s.b) for s in buckets(r, step)]
            for step in range(6)
        ]
        for r in bucketed
    )
    total = 4 * (128 * 128 + 128) * 4
    assert first == second
    assert first[0] == [("bucket 0", total, True, 4, 0, -1)]
    assert [len(step) for step in first[1:]] == [len(first[1])] * 5
    assert len(first[1]) > 1
    assert {sum(size for _, size, *_ in step) for step in first} == {total}


def test_a_bucket_is_launched_when_its_last_gradient_is_ready(bucketed: list[Recorded]) -> None:
    """Launch times agree with hooks on the parameters, far better than the pause before them is long."""
    for recorded in bucketed:
        by_step = {fields["step"]: fields["ready"] for fields in recorded.said if "step" in fields}
        apart = []
        for step in (1, 2, 4):
            spans = buckets(recorded, step)
            (backward,) = [s for s in recorded.spans("stage", "backward") if s.step == step]
            (optimizer,) = [s for s in recorded.spans("stage", "optimizer") if s.step == step]
            assert {s.end for s in spans} == {spans[-1].end}
            assert backward.end <= spans[-1].end <= optimizer.start
            apart.append(spans[-1].start - by_step[step]["0"])
            assert spans[0].start <= spans[-1].start
        # The last bucket holds the first layer's parameters, whose weight comes last or next to last.
        # The least of them: a rank may lose the processor between two looks at the clock.
        assert min(abs(a) for a in apart) < 5_000_000


def test_a_bucket_under_a_hook_of_the_program_has_no_number(bucketed: list[Recorded]) -> None:
    """A hook may call other collectives than DDP: nothing is claimed about them."""
    for recorded in bucketed:
        hooked = [s for s in recorded.spans("collective") if s.descriptor.tensor and s.size < 1000]
        assert [s.seq for s in hooked] == [0, 0, 0]


TRAIN = (ROOT / "examples" / "train_ddp.py").read_text().replace("if __name__", "SAY\nif __name__")
SHORT = TRAIN.replace("    del model  #", "    finish(model)\n    del model  #").replace(
    "SAY\n",
    textwrap.dedent("""
    def finish(model):
        import hashlib
        data = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        say(digest=hashlib.sha256(data).hexdigest())

    sys.argv[1:] = ["--epochs", "2", "--steps", "6", "--width", "64"]
    """),
)


def test_training_computes_the_same_traced_and_untraced(tmp_path: Path) -> None:
    """Parameters are equal to the bit, on both ranks; both count the same steps."""
    run(tmp_path / "off", SHORT, 2, 0)
    traced = run(tmp_path / "on", SHORT, 2)
    files = [(tmp_path / way / f"rank{rank}.jsonl").read_text() for way in ("off", "on") for rank in range(2)]
    assert len(set(files)) == 1
    assert [recorded.steps() for recorded in traced] == [list(range(12))] * 2
    assert counts(traced[0].spans("collective")) == counts(traced[1].spans("collective"))


RECORDED_TWICE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layers = [torch.nn.Linear(48, 48) for _ in range(4)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def learn():
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 48)).sum().backward()
        optimizer.step()

learn()
tracer.steps.end()
live.tracer = again = Tracer(Recorder(Path(os.environ["RINGS"]), 4 << 20, 3), "again")
learn()
again.steps.end()
again.recorder.close()
"""


def test_buckets_of_one_recording_are_not_told_in_the_next(tmp_path: Path) -> None:
    """Those that were not known yet when it ended are lost: the steps of the next one have the same numbers."""
    run(tmp_path, RECORDED_TWICE)
    recordings = [read_ring(path) for path in (tmp_path / "rings").glob("*.ring")]
    told = [[span for span in recorded.spans("collective") if span.descriptor.tensor] for recorded in recordings]
    for recorded, spans in zip(recordings, told, strict=True):
        begun = {span.step: span.start for span in recorded.spans("step")}
        assert all(begun[bucket.step] <= bucket.start for bucket in spans)
    assert sorted(map(len, told)) == [1, 4]


SPARSE = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.sparse_coo_tensor([[1, 4]], torch.ones(2), (9,)))
dist.destroy_process_group()
"""


def test_a_sparse_tensor_has_the_bytes_of_its_indices_and_values(tmp_path: Path) -> None:
    """Two indices of 8 bytes, two values of 4."""
    (recorded,) = run(tmp_path, SPARSE)
    assert [(span.name, span.size) for span in recorded.spans("collective")] == [("all_reduce", 24)]


CHECKPOINTED = """
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

class Checkpointed(torch.nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=True)
        return x

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
layers = Checkpointed(*[torch.nn.Linear(48, 48) for _ in range(4)])
model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=0.02)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(4, 48, requires_grad=True)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_buckets_of_a_model_with_reentrant_checkpoints_are_told_once(tmp_path: Path) -> None:
    """Each layer's backward runs inside that of the loss, and ends before all gradients are ready."""
    (recorded,) = run(tmp_path, CHECKPOINTED)
    buckets = [(s.step, s.descriptor.tensor) for s in recorded.spans("collective") if s.descriptor.tensor]
    assert len(buckets) > 4
    assert len(set(buckets)) == len(buckets)


def test_a_level_that_is_not_recorded_leaves_no_record(tmp_path: Path) -> None:
    """At level step there are steps and stages, and nothing else."""
    for recorded in run(tmp_path, SHORT, 2, 1):
        assert {s.descriptor.kind for s in recorded.records} == {"step", "stage"}

"""Collectives, DDP's buckets and the identity of ranks, on real process groups."""

import itertools
import textwrap
import threading
import time
from pathlib import Path

import pytest

from otel_dltrace.instrument._torch import store as torch_store
from otel_dltrace.instrument._torch.binding import Binding
from otel_dltrace.instrument._torch.store import Start, bind_from_store
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.semconv import Source
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer
from tests.support.paths import ROOT
from tests.support.processes import Place
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


TWICE = """
import time
import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
for start in range(2):
    dist.init_process_group("gloo", init_method=f"file://{os.environ['OUT']}/store{start}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    signs = [Path(os.environ["OUT"], f"done{start}.{which}") for which in range(2)]
    signs[rank].touch()
    while not all(sign.exists() for sign in signs):  # gloo resets a connection that the other side still reads
        time.sleep(0.001)
    dist.destroy_process_group()
"""


def test_each_start_of_the_process_group_is_a_generation(tmp_path: Path) -> None:
    """Started twice, one job has two generations, which both ranks know."""
    first, second = run(tmp_path, TWICE, 2)
    assert [b.generation for b in first.binds] == [b.generation for b in second.binds]
    assert [(b.generation_number, b.rank, b.world_size) for b in second.binds] == [(1, 1, 2), (2, 1, 2)]
    assert len({b.job for b in first.binds + second.binds}) == 1


TRAINED_TWICE = TWICE.replace(
    "    dist.barrier()\n",
    """
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2):
        model(batch).sum().backward()
        optimizer.step()
    dist.barrier()
""",
).replace("    dist.all_reduce(torch.ones(1))\n", "")


def test_all_ranks_know_with_which_step_a_generation_begins(tmp_path: Path) -> None:
    """The last step before the process group is made anew belongs to the generation in which it was trained."""
    ranks = run(tmp_path, TRAINED_TWICE, 2)
    assert [[(b.generation_number, b.from_step) for b in rank.binds] for rank in ranks] == [[(1, 0), (2, 3)]] * 2
    assert [rank.steps() for rank in ranks] == [[*range(6)]] * 2


SUB_GROUPS_ALONE = """
import otel_dltrace
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank = dist.get_rank()
groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
for _ in range(3):
    with otel_dltrace.step():
        dist.all_reduce(torch.ones(1), group=groups[rank // 2])
"""


def test_ranks_that_are_in_no_group_with_the_first_one_are_of_its_run(place: Place) -> None:
    """As on a mesh: nothing of theirs shows that rank 0 has spoken, and it spoke after they began."""
    assert binds_of(place, SUB_GROUPS_ALONE, 4) == [(1, 0), (1, 1), (1, 2), (1, 3)]


def binds_of(place: Place, program: str, ranks: int) -> list[tuple[int, int]]:
    """Return which ranks are in which start of *program*, each of which is one generation."""
    done = place.torchrun(program, ranks=ranks, OTEL_DLTRACE="1")
    assert done.returncode == 0, done.stderr
    place.wait_for_rings()
    binds = {batch.process.bind for batch in place.spans()}
    assert len({bind.generation for bind in binds}) == len({bind.generation_number for bind in binds})
    return sorted((bind.generation_number, bind.rank) for bind in binds)


STOPPED_AND_ON = """
import otel_dltrace
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
otel_dltrace.stop()
dist.barrier()
otel_dltrace.instrument("torch")
for _ in range(3):
    with otel_dltrace.step():
        dist.barrier()
"""


def test_a_second_recording_knows_the_world_that_was_there(place: Place) -> None:
    """Its ranks are one run again, a later one."""
    assert binds_of(place, STOPPED_AND_ON, 2) == [(1, 0), (1, 1), (2, 0), (2, 1)]


STEPPED_TWICE = "import otel_dltrace\n" + TWICE.replace(
    "    dist.barrier()\n",
    """
    for _ in range(2):
        with otel_dltrace.step():
            dist.barrier()
""",
)


def test_what_comes_between_two_starts_of_the_process_group_has_no_id_of_the_first(tmp_path: Path) -> None:
    """The numbers begin anew: so it is in no step, and of the generation that has begun, on all ranks."""
    operations = [("all_reduce", NO_STEP, 1), ("barrier", 0, 2), ("barrier", 1, 3)]
    operations += [("all_reduce", NO_STEP, 1), ("barrier", 2, 2), ("barrier", 3, 3)]

    for rank in run(tmp_path, STEPPED_TWICE, 2):
        spans = rank.spans("collective")
        assert [(span.descriptor.name, span.step, span.seq) for span in spans] == operations
        assert rank.binds[1].from_step == 2
        assert spans[2].end <= rank.binds[1].since <= spans[3].start


OFF_AND_ON = """
import torch
import torch.distributed as dist
from otel_dltrace.instrument import registry

dist.init_process_group("gloo")
dist.barrier()
for _ in range(2):
    registry.uninstrument()
    dist.barrier()
    registry.instrument()
    dist.barrier()
"""


def test_instrumenting_anew_is_no_new_start_of_the_process_group(tmp_path: Path) -> None:
    """A world that was known stays the same generation, in the same run directory."""
    recorded = run(tmp_path, OFF_AND_ON, 2)
    assert [len(one.binds) for one in recorded] == [1, 1]
    assert recorded[0].binds[0].generation == recorded[1].binds[0].generation


RESTARTED = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.broadcast(torch.ones(1), src=0)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
    stop()
    os._exit(1)
dist.barrier()
"""


def test_an_elastic_restart_is_the_next_generation_of_the_same_job(tmp_path: Path) -> None:
    """All ranks are started again: one job, generation 1 then 2, and ranks agree in each, once rank 0 has sent."""
    # torch 2.13's ranks share the agent's store, where gloo finds the addresses of the first start.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    rings = run(tmp_path, RESTARTED, 2, 3, "--max-restarts", "1", **own_store)
    binds = [bind for recorded in rings for bind in recorded.binds]
    assert [(b.generation_number, b.rank, b.attempt) for b in binds] == [(1, 0, 0), (1, 1, 0), (2, 0, 1), (2, 1, 1)]
    assert len({b.job for b in binds}) == 1
    assert len({b.generation for b in binds}) == 2


def test_a_store_that_outlives_a_restart_counts_it(tmp_path: Path) -> None:
    """Below the prefixes of each start is one store: the number goes on, what was said then is not read again."""
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()
    told = []
    for attempt in range(2):
        recorders = [Recorder(tmp_path / f"{attempt}{rank}", 1 << 20) for rank in range(2)]
        bindings = [Binding(Tracer(recorder), itertools.count(1)) for recorder in recorders]
        for rank, binding in reversed(list(enumerate(bindings))):
            binding.initialised(dist.PrefixStore("default_pg", store), rank, 2)
        assert recorders[1].bound is None
        bindings[1].met()
        told.append([recorder.bound for recorder in recorders])
    assert [[(b.generation_number, b.rank) for b in binds] for binds in told] == [[(1, 0), (1, 1)], [(2, 0), (2, 1)]]
    assert [len({b.generation for b in binds}) for binds in told] == [1, 1]
    assert len({b.job for binds in told for b in binds}) == 1


def test_what_was_said_before_a_process_began_is_not_believed_before_it_has_met_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of an earlier start; what was said since is of this one."""
    dist = pytest.importorskip("torch.distributed")
    store, tracers = dist.HashStore(), [Tracer(Recorder(tmp_path / str(rank), 1 << 20)) for rank in range(2)]
    assert bind_from_store(tracers[0], Start(store, 0, 2))
    with monkeypatch.context() as patched:
        patched.setattr(torch_store, "process_began", lambda: time.time() + 1)
        assert not bind_from_store(tracers[1], Start(store, 1, 2), has_met=False)
    assert bind_from_store(tracers[1], Start(store, 1, 2), has_met=False)
    assert tracers[0].recorder.bound.generation == tracers[1].recorder.bound.generation


def test_a_store_that_is_gone_leaves_the_process_unbound(tmp_path: Path) -> None:
    """No answer, no error: the environment will say who we are."""

    class Gone:
        def check(self, _keys: list[str]) -> bool:
            raise RuntimeError("Broken pipe")

    recorder = Recorder(tmp_path, 1 << 20)
    assert bind_from_store(Tracer(recorder), Start(Gone(), 1, 2))
    assert recorder.bound is None


def test_a_store_that_does_not_answer_is_not_waited_for(tmp_path: Path) -> None:
    """Its process may be frozen: what it is asked on another thread may stay unanswered."""
    answers = threading.Event()

    class Frozen:
        def check(self, _keys: list[str]) -> bool:
            return answers.wait(60)

    recorder = Recorder(tmp_path, 1 << 20)
    begun = time.monotonic()
    assert bind_from_store(Tracer(recorder), Start(Frozen(), 1, 2), patience_s=0.1)
    assert (recorder.bound, time.monotonic() - begun < 30) == (None, True)
    answers.set()


def test_a_job_named_by_its_environment_keeps_its_name(tmp_path: Path) -> None:
    """What the launcher calls the job is its id."""
    (recorded, _) = run(tmp_path, TWICE, 2, JOB_UID="nightly")
    assert {bind.job for bind in recorded.binds} == {"nightly"}


EXIT = """
import atexit, time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
ending = Path(os.environ["OUT"], "ending")
if dist.get_rank() == 0:
    work = dist.all_reduce(torch.ones(1), async_op=True)
    atexit.register(ending.touch)
else:
    while not ending.exists():
        time.sleep(0.01)
    os._exit(0)  # so the work of the other, which is at its end, fails there
"""


def test_a_process_may_end_while_a_collective_is_under_way(tmp_path: Path) -> None:
    """It waits for it, as without us: our callback would come into an interpreter that is gone, and kill it."""
    first, _ = run(tmp_path, EXIT, 2)
    assert len(first.spans("collective")) == 2


BESIDE = """
import threading
import torch
import torch.distributed as dist

class Late:
    # While it is pickled, inside of the call that gathers it, the thread that trains begins the next step.
    def __reduce__(self):
        inside.set()
        stepped.wait(60)
        return Late, ()

def gather():
    dist.all_gather_object([None], Late())

inside, stepped = threading.Event(), threading.Event()
file = f"file://{os.environ['OUT']}/store"
dist.init_process_group("gloo", init_method=file, rank=0, world_size=1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
thread = threading.Thread(target=gather)
for step in range(2):
    model(torch.ones(1)).backward()
    optimizer.step()
    if step == 0:
        thread.start()
        inside.wait(60)
stepped.set()
thread.join()
dist.destroy_process_group()
"""


def test_a_call_of_another_thread_is_one_operation_though_a_step_begins_in_it(tmp_path: Path) -> None:
    """As in the `async_save` of checkpoints: the calls inside it are its parts, whose bytes and number it has."""
    (recorded,) = run(tmp_path, BESIDE)
    (span,) = recorded.spans("collective")
    assert recorded.steps() == [0, 1]
    assert (span.name, span.step, span.seq) == ("all_gather_object", 0, 2)
    assert span.size > 8  # how long the object is, and then the object


PICKLES = """
import time
import torch.distributed as dist

def make():
    say(made=time.monotonic_ns())

class Own:
    def __reduce__(self):
        say(pickled=time.monotonic_ns())
        return make, ()

rank, file = int(os.environ["RANK"]), f"file://{os.environ['OUT']}/store"
dist.init_process_group("gloo", init_method=file, rank=rank, world_size=2)
dist.barrier()
dist.all_gather_object([None, None], Own())
dist.destroy_process_group()
"""


def test_objects_are_pickled_before_they_are_gathered(tmp_path: Path) -> None:
    """A rank that pickles for long comes late: as if it were gathering, all had come at once, and waited for nobody."""
    for recorded in run(tmp_path, PICKLES, 2):
        span = recorded.spans("collective")[-1]
        pickled, *made = (at for said in recorded.said for at in said.values())
        assert (span.name, len(made)) == ("all_gather_object", 2)
        assert pickled <= span.start < span.end <= min(made)


WITHOUT_TENSORS = """
import torch.distributed as dist

for backend in (None, "cpu:gloo"):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.all_gather_object([None], "one")
    dist.destroy_process_group()
"""


def test_a_call_without_tensors_has_the_backend_that_the_group_has_for_it(tmp_path: Path) -> None:
    """A group that the program gave no backend, or one for each kind of device, says none that is its own."""
    (recorded,) = run(tmp_path, WITHOUT_TENSORS)
    spans = recorded.spans("collective")
    assert [(s.name, s.descriptor.backend, s.source) for s in spans] == [
        (name, "gloo", Source.HOST_DONE) for name in ("barrier", "barrier", "all_gather_object") * 2
    ]


SEVERAL_BACKENDS = """
import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
other, kinds = dist.new_group([0], backend="gloo"), dist.ProcessGroup.BackendType
dist.all_reduce(torch.ones(1), group=other)
dist.group.WORLD._register_backend(torch.device("cuda"), kinds.NCCL, other._get_backend(torch.device("cpu")))
dist.group.WORLD._set_default_backend(kinds.NCCL)
dist.all_reduce(torch.ones(1))
dist.broadcast(torch.ones(1), 0)
"""


def test_a_group_of_several_backends_gives_no_call_the_number_of_another_one(tmp_path: Path) -> None:
    """As ``cpu:gloo,cuda:nccl``, which counts what NCCL does: all that Gloo does in between would be one collective."""
    (recorded,) = run(tmp_path, SEVERAL_BACKENDS)
    assert [(s.name, s.seq) for s in recorded.spans("collective")] == [
        ("barrier", 1),
        ("all_reduce", 1),  # of the other group
        ("all_reduce", 0),
        ("broadcast", 0),
    ]


WITHOUT_A_DEFAULT = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(1))
dist.barrier()
"""


def test_a_group_with_one_backend_is_counted_also_where_pytorch_gives_it_no_default(tmp_path: Path) -> None:
    """As ``cpu:gloo`` once a plugin such as ``fake`` is known, which FSDP2 imports: the group itself has no number."""
    (recorded,) = run(tmp_path, WITHOUT_A_DEFAULT)
    assert [(s.name, s.seq) for s in recorded.spans("collective")] == [("all_reduce", 1), ("barrier", 2)]


ON_ANOTHER_DEVICE = """
import torch
import torch.distributed as dist
from torch.testing._internal.distributed import fake_pg

dist.init_process_group("cpu:gloo,meta:fake", store=dist.HashStore(), rank=0, world_size=1)
world, meta, options = dist.group.WORLD, torch.device("meta", 0), dist.BarrierOptions()
dist.barrier()
dist.barrier(device_ids=[0])  # the accelerator's, which here is the CPU
world.bound_device_id = meta
dist.barrier()
dist.barrier(device_ids=[0])
world.barrier(options).wait()
options.device = meta
world.barrier(options).wait()
dist.all_gather_object([None], "one")
for device in (None, "meta", meta):
    try:
        dist.broadcast_object_list(["one"], 0, device=device)
    except (RuntimeError, NotImplementedError):
        pass  # what is on no real device cannot be read
world._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
world._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, world._get_backend(meta))
try:
    world.barrier()
except (RuntimeError, AssertionError):
    pass  # there is no such device
"""


def test_a_call_without_tensors_has_the_backend_of_the_device_that_it_is_asked_to_use(tmp_path: Path) -> None:
    """As NCCL's barrier, with ``cpu:gloo,cuda:nccl`` and a ``device_id``."""
    (recorded,) = run(tmp_path, ON_ANOTHER_DEVICE)
    spans = [(s.name, s.descriptor.backend, s.source == Source.HOST_DONE) for s in recorded.spans("collective")]
    gloo, fake = ("gloo", True), ("fake", False)
    barriers = [("barrier", *on) for on in (gloo, gloo, fake, gloo, gloo, fake)]
    objects = [("all_gather_object", *gloo), *(("broadcast_object_list", *on) for on in (gloo, fake, fake))]
    assert spans == [*barriers, *objects, ("barrier", *fake)]


BUCKETS_OF_SEVERAL_BACKENDS = (
    SEVERAL_BACKENDS
    + """
model = torch.nn.Linear(4, 1, bias=False)
parallel = torch.nn.parallel.DistributedDataParallel(model)
model.weight.register_hook(lambda gradient: dist.all_reduce(gradient, group=other))
for _ in range(3):
    parallel(torch.ones(2, 4)).sum().backward()
"""
)


@pytest.mark.parametrize("level", [3, 4])
def test_buckets_in_a_group_of_several_backends_have_no_number_of_another_one(tmp_path: Path, level: int) -> None:
    """Also where the other backend has done as much in a backward as the buckets would count."""
    (recorded,) = run(tmp_path, BUCKETS_OF_SEVERAL_BACKENDS, level=level)
    buckets = [s for s in recorded.spans("collective") if s.descriptor.tensor.startswith("bucket")]
    assert [(s.name, s.descriptor.backend, s.seq) for s in buckets] == [("all_reduce", "gloo", 0)] * 3


OF_ITS_OWN = """
from datetime import timedelta
import torch
import torch.distributed as dist

store, gloo = dist.HashStore(), dist.ProcessGroup.BackendType.GLOO
group = dist.ProcessGroup(store, 0, 1)
group._register_backend(torch.device("cpu"), gloo, dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=60)))
group._set_default_backend(gloo)
group._set_group_name("mine")
group.barrier().wait()
group.allreduce([torch.ones(1)]).wait()
"""


def test_a_group_that_the_world_does_not_know_is_traced(tmp_path: Path) -> None:
    """Programs make some by hand, as `torch.distributed._dist2` does."""
    (recorded,) = run(tmp_path, OF_ITS_OWN)
    spans = [(s.name, s.descriptor.group, s.descriptor.backend, s.seq) for s in recorded.spans("collective")]
    assert spans == [("barrier", "mine", "gloo", 1), ("all_reduce", "mine", "gloo", 2)]


WITHOUT_DEVICES = """
import torch.distributed as dist

class Own(dist.ProcessGroup):
    def barrier(self, opts=None):
        return None

try:
    dist.ProcessGroup(dist.HashStore(), 0, 1).barrier()
except RuntimeError as error:
    assert "No backend type" in str(error), error
dist.barrier(Own(0, 1))
"""


def test_a_group_without_a_backend_for_any_device_is_traced(tmp_path: Path) -> None:
    """What a program makes by hand has none until it is given one, and a class of its own may need none."""
    (recorded,) = run(tmp_path, WITHOUT_DEVICES)
    spans = [(s.name, s.descriptor.group, s.descriptor.backend, s.seq) for s in recorded.spans("collective")]
    assert spans == [("barrier", "", "undefined", 0)] * 2


INSIDE = """
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

dist.init_process_group("gloo", init_method=f"file://{os.environ['OUT']}/store", rank=0, world_size=1)
model = torch.nn.Linear(4, 1)
parallel = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader, held_out = (DataLoader(torch.randn(size, 4), batch_size=size) for size in (3, 7))
for epoch in range(2):
    for batch in loader:
        parallel(batch).mean().backward()
        optimizer.step()
    for batch in held_out:
        with torch.no_grad():
            model(batch)
dist.destroy_process_group()
"""


def test_an_evaluation_of_what_ddp_wraps_is_seen(tmp_path: Path) -> None:
    """As a rank does that evaluates alone: a fetch and a forward, which begin no step and give it no samples."""
    (recorded,) = run(tmp_path, INSIDE)
    assert [(s.a, s.b) for s in recorded.spans("step")] == [(3, 0), (3, 1)]
    assert [recorded.stages(step).get("evaluate", 0) for step in range(3)] == [0, 2, 2]
    assert [recorded.stages(step)["forward"] for step in range(2)] == [1, 1]

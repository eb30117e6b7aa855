"""Groups of any kind, calls without tensors, other threads: each call is told once, with its own backend and number."""

from pathlib import Path

import pytest

from otel_dltrace.model.semconv import Source
from tests.support.torch_harness import run

pytest.importorskip("torch")


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
    assert [(s.name, s.descriptor.backend) for s in spans] == [
        (name, "gloo") for name in ("barrier", "barrier", "all_gather_object") * 2
    ]
    # Of the handle it is known to be done as exactly as the processor lets us look at it.
    assert {s.source for at, s in enumerate(spans) if at % 3 != 1} == {Source.HOST_DONE}
    assert {s.source for s in spans} <= {Source.HOST_DONE, Source.BOUND}


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
    spans = [
        (s.name, s.descriptor.backend, s.source in (Source.HOST_DONE, Source.BOUND))
        for s in recorded.spans("collective")
    ]
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

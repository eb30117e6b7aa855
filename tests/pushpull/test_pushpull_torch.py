"""push_pull under torch: equal to DistributedDataParallel, and what BytePS's plugin offers besides."""

import pytest

from tests.support.pushpull_jobs import run_job

pytest.importorskip("torch", reason="these are torch's own means and gradients")

START = """
import sys
import numpy as np
import torch
from torch import nn
import otel_dltrace.pushpull.torch as bps

def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.BatchNorm1d(60), nn.Linear(60, 3))

def batches(number):
    for step in range(number):
        generator = torch.Generator().manual_seed(100 * step + layout.rank)
        yield torch.randn(8, 20, generator=generator), torch.randint(3, (8,), generator=generator)

def train(model, optimizer, number=4):
    for points, labels in batches(number):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()

def distance(model, other):
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((one - two).abs().max()) for one, two in pairs)

bps.init()
"""

LIKE_DDP = """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", f"file://{OUT}/store", rank=layout.rank, world_size=layout.size)
ours, theirs = model_of(layout.rank), DistributedDataParallel(model_of(0))
bps.broadcast_parameters(ours.state_dict())
optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
optimizer = bps.DistributedOptimizer(optimizer, ours.named_parameters())
train(ours, optimizer)
train(theirs, torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9))
gradients = [(one.grad, two.grad) for one, two in zip(ours.parameters(), theirs.module.parameters(), strict=True)]
say(
    parameters=distance(ours, theirs.module),
    gradients=max(float((one - two).abs().max()) for one, two in gradients),
    is_sgd=isinstance(optimizer, torch.optim.SGD),
)
mean = bps.push_pull(torch.arange(5.0) * layout.rank, name="mean")
dist.all_reduce(reduced := torch.arange(5.0) * layout.rank)
say(mean=float((mean - reduced / layout.size).abs().max()))
bps.push_pull(torch.zeros(1), name="end")  # Gloo may abort a process whose peer leaves while it is in a collective
dist.destroy_process_group()
"""

SMALL = {"BYTEPS_PARTITION_BYTES": "4096", "BYTEPS_MIN_COMPRESS_BYTES": "0", "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param((2, 2, 2), id="two workers of two, two servers"),
        pytest.param((1, 3, 0), id="one of three, no server"),
        pytest.param((3, 1, 1), id="three of one, one server"),
        pytest.param((4, 1, 2), id="four of one, two servers"),
        pytest.param((2, 3, 1), id="two of three, one server"),
    ],
)
def test_training_is_that_of_ddp(counts, tmp_path):
    """The same parameters and gradients as DistributedDataParallel after some steps, and the same means."""
    done = run_job(tmp_path, START + LIKE_DDP, counts, SMALL, torch=True)
    assert done.code == 0, done.stderr
    size = counts[0] * counts[1]
    for field in ("parameters", "gradients", "mean"):
        assert len(done.each(field)) == size
        assert max(done.each(field).values()) < 1e-5
    assert all(done.each("is_sgd").values())


TIED = """
import time
from pathlib import Path
from otel_dltrace.pushpull.torch_ops import engine
push_pull, begun, both = engine().push_pull, [], Path(OUT, "both")

def in_turn(tensor, values, **how):
    while layout.rank == 0 and not both.exists():
        time.sleep(0.01)
    if layout.rank == 1 and begun:
        both.touch()
        engine().wait(begun[0])
    begun.append(push_pull(tensor, values, **how))
    return begun[-1]

engine().push_pull = in_turn
tied = torch.full((3,), 5.0 if layout.rank == 0 else 9.0)
bps.broadcast_parameters({"one": tied, "other": tied})
say(tied=tied.tolist())
"""


def test_tied_parameters_are_broadcast_once_each(tmp_path):
    """One memory under two names has the root's values, also where the first is there before the second is pushed."""
    done = run_job(tmp_path, START + TIED, (2, 1, 1), SMALL, torch=True)
    assert done.code == 0, done.stderr
    assert list(done.each("tied").values()) == [[5.0] * 3] * 2


NO_ROOT = """
said = []
for root in (2, -1):
    for broadcast in (lambda: bps.broadcast_parameters(model.state_dict(), root),
                      lambda: bps.broadcast_optimizer_state(torch.optim.SGD(model.parameters(), lr=1.0), root)):
        model = nn.Linear(1, 1)
        before = model.weight.item()
        try:
            broadcast()
        except bps.PushPullError as error:
            said.append((str(error), model.weight.item() == before))
say(said=said)
"""


def test_a_root_that_is_not_there_is_refused(tmp_path):
    """Nobody would give any values, and all would have zeros."""
    done = run_job(tmp_path, START + NO_ROOT, (2, 1, 1), SMALL, torch=True)
    assert done.code == 0, done.stderr
    sentences = [f"root_rank={root} is not a rank of this job: it has 2, counted from 0" for root in (2, -1)]
    assert list(done.each("said").values()) == [[[said, True] for said in sentences for _ in range(2)]] * 2


FORGETFUL = """
import atexit, threading
bps.push_pull(torch.ones(2), name="w")
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")  # as Python 3.12 does it
if layout.rank == 0:
    atexit.register(setattr, threading.Thread, "start", refuse)
    sys.exit()
try:
    bps.push_pull(torch.ones(2), name="w")
except bps.PushPullError as error:
    say(message=str(error))
"""


def test_a_program_may_end_without_a_goodbye(tmp_path):
    """It is said as the program ends, when no thread can be started any more: the others know that it has left."""
    done = run_job(tmp_path, START + FORGETFUL, (2, 1, 1), SMALL, torch=True)
    assert (done.code, done.stderr) == (0, "")
    assert done.each("message") == {"worker1": "worker 0 has left and never pushed round 1 of 'byteps.w'"}


UNNAMED = """
handles, seen = {}, []
class Observer:
    def push_pull_started(self, name, declared_key, round_, nbytes, dtype, start):
        seen.append(name)
trace.observe(Observer())
def begin(name, value, size=4):
    handles[name] = bps.push_pull_async(torch.full((size,), value + layout.rank), average=False)
def end(name):
    return bps.synchronize(handles.pop(name)).tolist()
begin("first", 1.0)
begin("second", 10.0)
begin("other size", 100.0, 2)
begin("third", 1000.0)
results = [end("second")]
begin("fourth", 5.0)  # while the first is under way, or done, as the case may be
while not bps.poll(handles["first"]):
    pass
begin("fifth", 7.0)
results += [end(name) for name in ("first", "third", "fourth", "fifth", "other size")]
begin("sixth", 9.0)
results.append(end("sixth"))
say(results=results, seen=seen)
"""


def test_tensors_without_a_name_may_be_under_way_together(tmp_path):
    """Those of one type and size have a number each, the first that nobody waits for: the same on all ranks."""
    done = run_job(tmp_path, START + UNNAMED, (2, 1, 1), SMALL, torch=True)
    assert done.code == 0, done.stderr
    sums = [[21.0] * 4, [3.0] * 4, [2001.0] * 4, [11.0] * 4, [15.0] * 4, [201.0] * 2, [19.0] * 4]
    names = [f"byteps.noname.float32.{which}" for which in ("4", "4.1", "2", "4.2", "4.1", "4.3", "4")]
    assert list(done.each("results").values()) == [sums] * 2
    assert list(done.each("seen").values()) == [names] * 2


ELSEWHERE = """
model = model_of(0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
if layout.rank == 0:
    train(model, optimizer)
    restored = lambda storage, location: storage if location == "the root's" else None
    torch.serialization.register_package(0, lambda storage: "the root's", restored)
bps.broadcast_optimizer_state(optimizer)
say(moments=sum(float(one["momentum_buffer"].double().sum()) for one in optimizer.state_dict()["state"].values()))
"""


def test_a_state_may_be_on_a_device_of_the_root_alone(tmp_path):
    """No other rank has to have it, or to have room on it: what it loads goes where its own parameters are."""
    done = run_job(tmp_path, START + ELSEWHERE, (2, 1, 1), SMALL, torch=True)
    assert done.code == 0, done.stderr
    assert done.each("moments")["worker0"] == done.each("moments")["worker1"] != 0


UNSENDABLE = """
model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
said, itself = [], []
itself.append(itself)
for scales in (np.ones(3), lambda: 1, itself, [0.5, 1.0]):
    if layout.rank == 1:
        optimizer.param_groups[0]["scales"] = scales
    try:
        bps.broadcast_optimizer_state(optimizer, 1)
        said.append(optimizer.param_groups[0]["scales"])
    except bps.PushPullError as error:
        said.append(str(error).partition(" depth")[0])
say(said=said)
"""


def test_a_state_that_nobody_would_read_is_not_sent(tmp_path):
    """The root says what is in it, the others where to look; all may go on."""
    done = run_job(tmp_path, START + UNSENDABLE, (2, 1, 1), SMALL, torch=True)
    assert done.code == 0, done.stderr
    told = "rank 1 cannot send its optimizer's state: it says what is in it"
    what = "the optimizer's state cannot be sent: its state_dict()['param_groups'][0]['scales'] is a"
    cure = "make it a tensor or a plain Python value"
    deep = "the optimizer's state cannot be sent: RecursionError: maximum recursion"
    assert done.each("said") == {
        "worker0": [told, told, told, [0.5, 1.0]],
        "worker1": [f"{what} numpy.ndarray; {cure}", f"{what} function; {cure}", deep, [0.5, 1.0]],
    }


HOOKED = """
model = model_of(layout.rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
ran = []
optimizer.register_step_pre_hook(lambda *_: ran.append("before"))
optimizer.register_step_post_hook(lambda *_: ran.append("after"))
bps.broadcast_optimizer_state(optimizer)
train(model, optimizer, 1)
optimizer.load_state_dict(optimizer.state_dict())
train(model, optimizer, 1)
say(ran=ran)
"""


def test_a_step_runs_its_hooks_once_whatever_state_it_was_given(tmp_path):
    """Those of the user, and so ours: all ranks but the root take over its state, any may load one."""
    done = run_job(tmp_path, START + HOOKED, (2, 1, 1), SMALL, torch=True)
    assert done.code == 0, done.stderr
    assert list(done.each("ran").values()) == [["before", "after"] * 2] * 2


OFFERED = """
tensors = {
    "half": nn.Parameter(torch.full((3,), layout.rank + 1.0, dtype=torch.bfloat16)),
    "turned": torch.arange(6.0).view(2, 3).t(),
    "flags": torch.tensor([layout.rank == 0, False]),
    "empty": torch.zeros(0),
}
handles = {name: bps.push_pull_async_inplace(tensor, average=False, name=name) for name, tensor in tensors.items()}
results = {name: bps.synchronize(handle) for name, handle in handles.items()}
say(results={name: result.float().flatten().tolist() for name, result in results.items()})
say(in_place=all(results[name] is tensor for name, tensor in tensors.items()))
own = torch.ones(2)
say(unnamed=bps.push_pull(own, average=False).tolist(), untouched=own.tolist())
handle = bps.push_pull_async(torch.ones(2), name="polled")
bps.synchronize(handle)
try:
    bps.poll(handle)
except bps.PushPullError as error:
    say(twice=str(error))

model = model_of(layout.rank)
rate = 0.01 * np.sqrt((layout.rank + 1) ** 2)
optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(np.float64(0.9), 0.999))
if layout.rank == 0:
    train(model, optimizer)
bps.broadcast_parameters(model.named_parameters())
bps.broadcast_optimizer_state(optimizer)
state = optimizer.state_dict()
say(rate=state["param_groups"][0]["lr"], steps=float(state["state"][0]["step"]))
say(moments=float(sum(one["exp_avg"].abs().sum() for one in state["state"].values())))

late = torch.optim.SGD(model.parameters(), lr=0.1)
torch.optim.lr_scheduler.StepLR(late, 1)
try:
    bps.DistributedOptimizer(late, model.named_parameters())
except bps.PushPullError as error:
    say(late=str(error))
optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters(), bps.Compression.fp16, 2)
for points, labels in batches(2):
    nn.functional.cross_entropy(model(points), labels).backward()
optimizer.synchronize()
norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
with optimizer.skip_synchronize():
    optimizer.step()
say(norm=float(norm), weights=float(sum(one.abs().sum() for one in model.parameters())))
try:
    for points, labels in batches(3):
        nn.functional.cross_entropy(model(points), labels).backward()
except bps.PushPullError as error:
    say(too_often=str(error))
optimizer.synchronize()
optimizer.zero_grad()
optimizer.set_backward_passes_per_step(3)
for points, labels in batches(3):
    nn.functional.cross_entropy(model(points), labels).backward()
optimizer.step()
say(three=float(sum(one.abs().sum() for one in model.parameters())))
"""


def test_what_the_plugin_of_byteps_offers(tmp_path):
    """Odd tensors, handles, the optimizer's state, clipping, and gradients that are added up."""
    done = run_job(tmp_path, START + OFFERED, (2, 1, 1), SMALL, torch=True)
    assert done.code == 0, done.stderr
    turned = [0.0, 6.0, 2.0, 8.0, 4.0, 10.0]
    results = {"half": [3.0] * 3, "turned": turned, "flags": [1.0, 0.0], "empty": []}
    for field, value in {
        "results": results,
        "in_place": True,
        "unnamed": [2.0, 2.0],
        "untouched": [1.0, 1.0],
        "rate": 0.01,
        "steps": 4.0,
    }.items():
        assert list(done.each(field).values()) == [value] * 2, field
    assert "create the scheduler after DistributedOptimizer" in done.each("late")["worker0"]
    assert "was it already synchronized?" in done.each("twice")["worker0"]
    assert "more than backward_passes_per_step=2 times" in done.each("too_often")["worker0"]
    for field in ("moments", "norm", "weights", "three"):
        assert len(set(done.each(field).values())) == 1, field


CLOSURES = """
def optimizer_of(kind, name, model, **how):
    named = [(f"{name}.{parameter}", one) for parameter, one in model.named_parameters()]
    return bps.DistributedOptimizer(kind(model.parameters(), **how), named)

def train_closed(model, optimizer):
    for points, labels in batches(4):
        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), labels)
            loss.backward()
            return loss
        optimizer.step(closure)

plain, closed, searched = model_of(0), model_of(0), model_of(0)
train(plain, optimizer_of(torch.optim.SGD, "plain", plain, lr=0.1))
train_closed(closed, optimizer_of(torch.optim.SGD, "closed", closed, lr=0.1))
say(distance=distance(plain, closed))
train_closed(searched, optimizer_of(torch.optim.LBFGS, "searched", searched, max_iter=3))
say(searched=[float(one.detach().double().sum()) for one in searched.parameters()])
"""


@pytest.mark.parametrize(
    "env", [pytest.param({}, id="together"), pytest.param({"BYTEPS_ENABLE_ASYNC": "1"}, id="asynchronously")]
)
def test_what_a_closure_computes_is_averaged(env, tmp_path):
    """As what is computed before the step; also where the step asks for it several times."""
    done = run_job(tmp_path, START + CLOSURES, (2, 1, 1), {**SMALL, **env}, torch=True)
    assert done.code == 0, done.stderr
    if not env:
        assert list(done.each("distance").values()) == [0.0] * 2
        assert done.each("searched")["worker0"] == done.each("searched")["worker1"]


LEFT_OUT = """
model = model_of(0)
optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
points, labels = next(batches(1))
def backward():
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(points), labels).backward()
backward()
optimizer.synchronize()  # and no step, as for a norm that is not finite
backward()
optimizer.step()
say(weights=[float(one.detach().double().sum()) for one in model.parameters()])
"""


def test_a_step_waits_for_its_own_gradients(tmp_path):
    """Also where the step before it was left out, after its gradients were averaged."""
    done = run_job(tmp_path, START + LEFT_OUT, (2, 1, 1), SMALL, torch=True)
    assert done.code == 0, done.stderr
    assert done.each("weights")["worker0"] == done.each("weights")["worker1"]


THAWED = """
model = model_of(0)
first, *others = model.parameters()
first.requires_grad_(False)
optimizer = torch.optim.SGD([first, *others[:-1]], lr=0.1, weight_decay=0.1)
optimizer = bps.DistributedOptimizer(optimizer, model.named_parameters())
def step():
    for points, labels in batches(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()
step()
first.requires_grad_(True)
optimizer.add_param_group({"params": others[-1:]})
others[0].grad = None
others[0].requires_grad_(False)
frozen = others[0].detach().clone()
step()
say(weights=[float(one.detach().double().sum()) for one in model.parameters()], kept=bool((frozen == others[0]).all()))
try:
    bps.push_pull(torch.ones(3).to_sparse(), name="sparse")
except bps.MismatchError as error:
    say(error=str(error))
"""


@pytest.mark.parametrize(
    "env", [pytest.param({}, id="together"), pytest.param({"BYTEPS_ENABLE_ASYNC": "1"}, id="asynchronously")]
)
def test_what_begins_to_train_later_is_averaged_too(env, tmp_path):
    """Parameters that are thawed or added; one that is frozen stays as it is, and what is sparse is refused."""
    done = run_job(tmp_path, START + THAWED, (2, 1, 1), {**SMALL, **env}, torch=True)
    assert done.code == 0, done.stderr
    assert "cannot be pushed; push what its to_dense() returns" in done.each("error")["worker0"]
    if not env:  # else each has, also of what it has frozen, what the other one added before
        assert list(done.each("kept").values()) == [True] * 2
        assert done.each("weights")["worker0"] == done.each("weights")["worker1"]


PRIORITIES = """
from otel_dltrace.pushpull.torch_ops import engine
bps.declare("weight", priority=1)
found = []
for said in ({}, {"priority": 5}, {}, {"priority": 0}):
    bps.push_pull(torch.ones(3), name="weight", **said)
    found.append(engine().declare("byteps.weight").priority)
say(found=found)
"""


def test_a_call_may_say_another_priority_than_the_declaration(tmp_path):
    """As in BytePS, where it is the call's; one that says none leaves it as it is."""
    done = run_job(tmp_path, START + PRIORITIES, (1, 1, 0), torch=True)
    assert done.code == 0, done.stderr
    assert done.each("found") == {"worker0": [1, 5, 5, 0]}


DIFFERENTIATED = """
own = torch.tensor([1.0, 2.0], requires_grad=True)
scale = layout.rank + 1.0
found = []
for average, name in ((True, "mean"), (False, "sum"), (True, None)):
    result = bps.push_pull(own * scale, average, name)
    (result * torch.tensor([3.0, 5.0]) * scale).sum().backward()
    found.append([result.tolist(), own.grad.tolist()])
    own.grad = None
say(found=found)
"""


def found_by_two(folder, program):
    """Run *program* on two workers; yield by how much each scales its values, and what it found."""
    done = run_job(folder, START + program, (2, 1, 1), SMALL, torch=True)
    assert done.code == 0, done.stderr
    yield 1.0, done.each("found")["worker0"]
    yield 2.0, done.each("found")["worker1"]


def test_gradients_go_through_a_push_pull(tmp_path):
    """That of a mean is the mean of all ranks' gradients, that of a sum their sum, as in BytePS."""
    for scale, found in found_by_two(tmp_path, DIFFERENTIATED):
        mean = [[1.5, 3.0], [4.5 * scale, 7.5 * scale]]
        total = [[3.0, 6.0], [9.0 * scale, 15.0 * scale]]
        assert found == [mean, total, mean]


LARGEST = """
half = bps.Compression.topk(0.5)
own = torch.tensor([1.0, 2.0], requires_grad=True)
bps.declare("declared", compression=half)
scale = layout.rank + 1.0
found = []
for name, compression in (("w", half), ("declared", None), (None, half)):
    result = bps.push_pull(own * scale, name=name, compression=compression)
    (result * torch.tensor([5.0, 3.0])).sum().backward()
    found.append([result.tolist(), own.grad.tolist()])
    own.grad = None
say(found=found)
"""


def test_gradients_are_without_what_was_left_out_of_values(tmp_path):
    """The values' first element is left out, and does not come with the gradient, whose second one is."""
    for scale, found in found_by_two(tmp_path, LARGEST):
        assert found == [[[0.0, 3.0], [5.0 * scale, 0.0]]] * 3


IN_ORDER = """
from otel_dltrace.pushpull.torch_ops import engine
half, ones = bps.Compression.fp16, torch.full((3,), 1.0)
results = [bps.push_pull(ones, False, "w", 3, 7, half), bps.push_pull_inplace(ones.clone(), False, "in place", 3, 7)]
begin = (bps.push_pull_async, bps.push_pull_async_inplace)
results += [bps.synchronize(one(ones.clone(), False, f"async {at}", 3, 7)) for at, one in enumerate(begin)]
declared = [engine().declare(f"byteps.{name}") for name in ("w", "in place", "async 0", "async 1")]
say(sums=[one.tolist() for one in results], priorities=[one.priority for one in declared])
say(compressed=[one.compressor is not None for one in declared])
try:
    bps.push_pull(ones, name="w", version=1, compression=bps.Compression.topk(0.5))
except bps.MismatchError as error:
    say(error=str(error))
"""


def test_arguments_come_in_the_order_of_byteps(tmp_path):
    """Tensor, average, name, version, priority, and for `push_pull` compression, which stays what it was."""
    done = run_job(tmp_path, START + IN_ORDER, (2, 1, 1), SMALL, torch=True)
    assert done.code == 0, done.stderr
    assert done.each("sums")["worker1"] == [[2.0] * 3] * 4
    assert done.each("priorities")["worker0"] == [7] * 4
    assert done.each("compressed")["worker0"] == [True, False, False, False]
    assert done.each("error")["worker0"] == "'byteps.w' was pushed with another compression; use another name"


NUMBERED = """
from otel_dltrace.pushpull.torch_ops import engine
model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("2", "10", "a")})
bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
bps.broadcast_parameters({"mean": torch.zeros(1), **model.state_dict()})
names = [f"{kind}.{name}" for kind in ("Gradient", "Parameter") for name in (*model.state_dict(), "mean")]
declared = {name: engine().declare(f"byteps.{name}") for name in names if name != "Gradient.mean"}
say(keys={name: (one.declared_key, one.priority) for name, one in declared.items()})
"""


def test_keys_are_numbered_as_by_the_plugin_of_byteps(tmp_path):
    """All gradients, then all parameters, by name; what the next forward pass needs first has priority all the same."""
    done = run_job(tmp_path, START + NUMBERED, (2, 1, 1), SMALL, torch=True)
    assert done.code == 0, done.stderr
    gradients = {"Gradient.10.weight": [0, -1], "Gradient.2.weight": [1, 0], "Gradient.a.weight": [2, -2]}
    parameters = {"Parameter.10.weight": [3, 0], "Parameter.2.weight": [4, 0], "Parameter.a.weight": [5, 0]}
    assert done.each("keys")["worker0"] == {**gradients, **parameters, "Parameter.mean": [6, 0]}


NAMELESS = """
torch.manual_seed(0)
makes, judges = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
before = makes.weight.detach().clone()
optimizers = [bps.DistributedOptimizer(torch.optim.SGD(one.parameters(), lr=0.0)) for one in (judges, makes)]
judges(makes(torch.full((2, 4), layout.rank + 1.0))).sum().backward()  # reaches both
for one in optimizers:
    one.step()
say(kept=bool((makes.weight == before).all()), means=[float(one.weight.grad.sum()) for one in (makes, judges)])
def refused(*parameters):
    try:
        for one in parameters:
            bps.DistributedOptimizer(torch.optim.SGD([one], lr=0.0), [("weight", one)])
    except bps.PushPullError as error:
        return str(error)
say(error=refused(nn.Linear(4, 4).weight, nn.Linear(4, 4).weight))
"""


@pytest.mark.parametrize(
    "env", [pytest.param({}, id="together"), pytest.param({"BYTEPS_ENABLE_ASYNC": "1"}, id="asynchronously")]
)
def test_parameters_of_two_optimizers_are_not_taken_for_each_other(env, tmp_path):
    """Those without a name have one each; where servers keep values, one name for two is refused."""
    done = run_job(tmp_path, START + NAMELESS, (2, 1, 1), {**SMALL, **env}, torch=True)
    assert done.code == 0, done.stderr
    assert done.each("kept") == {"worker0": True, "worker1": True}
    assert ("'weight' is a parameter of another" in (done.each("error")["worker0"] or "")) is bool(env)
    if not env:
        assert done.each("means")["worker0"] == done.each("means")["worker1"]


TWICE = """
ours, other = model_of(0), nn.Linear(3, 3)
first = bps.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours.named_parameters())
second = torch.optim.Adam([*other.parameters(), *ours.parameters()])
said = []
for optimizer in (first, second):
    try:
        bps.DistributedOptimizer(optimizer)
    except bps.PushPullError as error:
        said.append(str(error))
bps.DistributedOptimizer(torch.optim.SGD(other.parameters(), lr=0.1))
for points, labels in batches(2):
    second.zero_grad()
    nn.functional.cross_entropy(ours(points), labels).backward()
    first.synchronize()
    second.step()
say(said=said, weights=sum(one.double().sum().item() for one in ours.parameters()))
"""


def test_who_gives_an_optimizer_or_a_parameter_twice_is_told_what_to_do(tmp_path):
    """What it says works: the averaged gradients are there for another one; what was refused is still free."""
    done = run_job(tmp_path, START + TWICE, (2, 1, 1), torch=True)
    assert done.code == 0, done.stderr
    says = [
        "the optimizer is already a DistributedOptimizer; use it as it is",
        "a parameter of shape (60, 20) is in two DistributedOptimizers, and only one can average its gradient: give "
        "it to one of them, or, without BYTEPS_ENABLE_ASYNC, leave the second optimizer as it is and call "
        "synchronize() of the first before its step()",
    ]
    assert done.each("said") == {"worker0": says, "worker1": says}
    weights = done.each("weights")
    assert weights["worker0"] == weights["worker1"]


ASYNCHRONOUS = """
ours = model_of(0)
first = [one.detach().clone() for one in ours.parameters()]
optimizer = bps.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.1), ours.named_parameters())
train(ours, optimizer, 3)
bps.push_pull(torch.zeros(1), name="all have stepped")
for one in ours.parameters():
    one.grad = torch.zeros_like(one)
optimizer.step()
say(moved=max(float((one - old).abs().max()) for one, old in zip(ours.parameters(), first, strict=True)) > 0)
say(weights=[round(float(one.detach().abs().sum()), 3) for one in ours.parameters()])
"""


def test_asynchronous_training_meets_in_one_model(tmp_path):
    """When all have stepped, each finds the same weights at the servers."""
    done = run_job(tmp_path, START + ASYNCHRONOUS, (2, 1, 1), {**SMALL, "BYTEPS_ENABLE_ASYNC": "1"}, torch=True)
    assert done.code == 0, done.stderr
    assert all(done.each("moved").values())
    weights = list(done.each("weights").values())
    assert weights[0] == weights[1]


CLIPPED = """
model, norms = nn.Linear(1, 1, bias=False), []
optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for _ in range(1 + layout.rank):
    optimizer.zero_grad()
    model(torch.full((1, 1), layout.rank + 1.0)).sum().backward()
    optimizer.synchronize()
    norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 10.0)))
    with optimizer.skip_synchronize():
        optimizer.step()
say(norms=norms)
"""


def test_asynchronous_training_may_clip_its_own_gradients(tmp_path):
    """`synchronize` neither averages them nor waits for the others, who may be at any step."""
    done = run_job(tmp_path, START + CLIPPED, (2, 1, 1), {**SMALL, "BYTEPS_ENABLE_ASYNC": "1"}, torch=True)
    assert done.each("norms") == {"worker0": [1.0], "worker1": [2.0, 2.0]}, done.stderr


DESERTED = """
ours, like = model_of(0), model_of(0)
optimizer = bps.DistributedOptimizer(torch.optim.SGD(ours.parameters(), lr=0.0), ours.named_parameters())
try:
    train(ours, optimizer, 1)
    if layout.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        optimizer.step()
except bps.PeerLostError:
    say(moved=distance(ours, like))
"""


def test_asynchronous_training_that_fails_leaves_a_model(tmp_path):
    """The parameters are to be saved then; they are not what was on its way to the servers."""
    done = run_job(tmp_path, START + DESERTED, (2, 1, 1), {**SMALL, "BYTEPS_ENABLE_ASYNC": "1"}, torch=True)
    assert done.each("moved") == {"worker0": 0.0}, done.stderr


def test_a_name_that_is_there_twice_is_said(tmp_path):
    """Of a list of parameters: nobody could tell the two apart."""
    program = """
try:
    bps.broadcast_parameters([("w", torch.ones(2)), ("w", torch.zeros(2))])
except bps.PushPullError as error:
    say(message=str(error))
"""
    done = run_job(tmp_path, START + program, (1, 1, 0), torch=True)
    says = "'w' appears twice in what is broadcast; give each tensor its own name"
    assert done.each("message") == {"worker0": says}, done.stderr


def test_a_type_that_cannot_be_pushed_is_said_with_those_that_can(tmp_path):
    """Those that travel as a wider one are among them: what the sentence leaves out nobody would try."""
    program = """
wider = [torch.bfloat16, torch.bool, torch.int16]
say(pushed=[str(bps.push_pull(torch.ones(2, dtype=one), name=str(one)).dtype) for one in wider])
messages = []
for value in (torch.ones(2, dtype=torch.complex64), [1, 2], torch.ones(2, device="meta")):
    for push in (bps.push_pull, bps.push_pull_async, bps.push_pull_inplace):
        try:
            push(value, name="w")
        except bps.MismatchError as error:
            messages.append(str(error))
say(messages=messages)
"""
    done = run_job(tmp_path, START + program, (1, 1, 0), torch=True)
    assert done.each("pushed") == {"worker0": ["torch.bfloat16", "torch.bool", "torch.int16"]}, done.stderr
    says = "a tensor of dtype complex64 cannot be pushed; push it as one of float32, float64, float16, uint8, int32, "
    assert done.each("messages") == {
        "worker0": [
            *[f"{says}int8, int64, bfloat16, bool, int16"] * 3,
            *["a value of type list cannot be pushed; make it a tensor, as by torch.tensor(...)"] * 3,
            *["a tensor on the device meta has no values that can be pushed; materialize it first"] * 3,
        ]
    }


AGAIN = """
import time
bps.push_pull(torch.ones(2), name="w")
bps.shutdown()
begin = time.monotonic()
try:
    bps.init()
    say(sum=bps.push_pull(torch.ones(2), name="w", average=False).tolist())
except bps.PushPullError as error:
    say(message=str(error), at_once=time.monotonic() - begin < 10)
"""


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        pytest.param((1, 1, 0), {"sum": [1.0, 1.0]}, id="alone"),
        pytest.param((1, 2, 0), {"sum": [2.0, 2.0]}, id="one machine"),
        pytest.param(
            (2, 1, 1),
            {
                "message": "pushpull was shut down in this process, and its job has servers: "
                "those let a worker in only once",
                "at_once": True,
            },
            id="with servers",
        ),
    ],
)
def test_who_has_shut_down_joins_no_servers_again(counts, says, tmp_path):
    """They are gone by then, or hold the others' sums: said at once, not after the timeout."""
    done = run_job(tmp_path, START + AGAIN, counts, torch=True)
    assert {who: lines[-1] for who, lines in done.said.items() if "worker" in who} == {
        f"worker{rank}": says for rank in range(counts[0] * counts[1])
    }, done.stderr


FORKED = """
bps.push_pull(torch.ones(2), name="before")
under_way = bps.push_pull_async(torch.ones(2), name="under way")
def refused(does):
    try:
        return does()
    except bps.PushPullError as error:
        return str(error)
if child := os.fork():
    os.waitpid(child, 0)
    after = bps.push_pull(torch.ones(2), average=False, name="after")
    say(sum=after.tolist(), still=bps.synchronize(under_way).tolist())
    bps.shutdown()
else:
    bps.init()
    says = [
        refused(does)
        for does in (
            lambda: bps.push_pull(torch.ones(2), name="after"),
            lambda: bps.synchronize(under_way),
            lambda: bps.poll(under_way),
        )
    ]
    say(child=says, rank=[bps.rank(), bps.size(), bps.local_rank(), bps.local_size()])
    bps.shutdown()
    os._exit(0)
"""


@pytest.mark.parametrize("counts", [pytest.param((1, 2, 0), id="one machine"), pytest.param((2, 1, 1), id="servers")])
def test_a_fork_knows_its_rank_and_is_told_that_it_cannot_push(counts, tmp_path):
    """As a DataLoader's worker: it would wait for threads that it does not have, and then end its parent's job."""
    done = run_job(tmp_path, START + FORKED, counts, torch=True)
    says = "this process is a fork of one of the job's, which alone can push and pull: do it there"
    ranks = range(2)
    assert done.code == 0, done.stderr
    assert done.each("child") == {f"worker{rank}": [says] * 3 for rank in ranks}
    places = {rank: [rank, 2, rank % counts[1], counts[1]] for rank in ranks}
    assert done.each("rank") == {f"worker{rank}": places[rank] for rank in ranks}
    assert done.each("sum") == {f"worker{rank}": [2.0, 2.0] for rank in ranks}
    assert done.each("still") == {f"worker{rank}": [1.0, 1.0] for rank in ranks}

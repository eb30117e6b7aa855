"""How long an operation lasts: until its work is done, however the program finds that out, and `torch.compile`."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.torch_harness import Recorded, Span, counts, run

pytest.importorskip("torch")

HOST_DONE, HOST_ISSUE, BOUND = 0, 1, 4

ENDS = """
import gc, itertools, time, warnings
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

warnings.simplefilter("ignore")
if os.environ["RANK"] == "1":
    Path(os.environ["OUT"], "second").write_text(str(os.getpid()))
dist.init_process_group("gloo")
rank = dist.get_rank()
second = Path(os.environ["OUT"], "second").read_text()
size = iter(range(1, 100))
number = itertools.count()

def launched(launch, late=False):
    # On the first rank once the second one has launched; *late*: and waits for it.
    sign = Path(os.environ["OUT"], f"launched{next(number)}")
    while rank == 0 and not (sign.exists() and (not late or stands(second))):
        time.sleep(0.001)
    work = launch()
    if rank == 1:
        sign.touch()
    return work

start = lambda: launched(lambda: dist.all_reduce(torch.ones(next(size)), async_op=True))

looked = []

def look_away():
    time.sleep(1)  # longer than the work takes
    looked.append(time.monotonic_ns())

def case(name, action):
    dist.barrier()
    gc.freeze()  # what is there already makes no collection long
    begun = time.monotonic_ns()
    action()
    ended = time.monotonic_ns()
    say(case=name, begun=begun, ended=ended, until=looked.pop() if looked else ended)

def wait():
    start().wait()
    time.sleep(0.2)

def poll():
    work = start()
    while not work.is_completed():
        time.sleep(0.001)
    looked.append(time.monotonic_ns())
    time.sleep(0.2)

def forget():
    start()
    gc.collect()
    look_away()

def future():
    start().get_future().then(lambda f: f.value()).wait()
    time.sleep(0.2)

def overlap():
    work = start()
    look_away()
    work.wait()

def many():
    works = [start()] + [dist.all_reduce(torch.ones(next(size)), async_op=True) for _ in range(9)]
    look_away()
    for work in works:
        work.wait()

bare = getattr(dist.Work.is_completed, "__wrapped__", dist.Work.is_completed)  # what it says is not seen

def unseen():
    same = lambda: launched(lambda: dist.all_reduce(torch.ones(200), async_op=True))
    for _ in range(9):
        same().wait()
    for _ in range(9):
        work = same()
        while not bare(work):
            time.sleep(0.001)
        time.sleep(0.001)
        work.wait()

def object_of_future():
    launched(lambda: dist.all_reduce_coalesced([torch.ones(next(size))], async_op=True)).wait()
    time.sleep(0.2)

def message(wait):
    way = (lambda tensor: dist.isend(tensor, 1)) if rank == 0 else (lambda tensor: dist.irecv(tensor, 0))
    work = launched(lambda: way(torch.ones(next(size))), late=True)
    if wait:
        work.wait()
        time.sleep(0.2)
    else:
        look_away()
        del work

def result():
    tensor = launched(lambda: functional.all_reduce(torch.ones(next(size)), "sum", dist.group.WORLD), late=True)
    tensor = tensor + 1
    time.sleep(0.2)

result()  # the first one takes longest to get to its wait
for again in range(2):
    case("wait", wait)
    case("poll", poll)
    case("forget", forget)
    case("future", future)
    case("overlap", overlap)
case("many", many)
case("unseen", unseen)
case("object of future", object_of_future)
case("waited message", lambda: message(True))
case("forgotten message", lambda: message(False))
case("result", result)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> list[Recorded]:
    """Two ranks, of which the first begins every operation after the second."""
    return run(tmp_path_factory.mktemp("ends"), ENDS, 2)


def cases(recorded: Recorded) -> dict[str, list[tuple[list[Span], int]]]:
    """Return the operations of each case, each time it came, and until when nothing but they could tell their end."""
    spans = [s for s in recorded.spans("collective") + recorded.spans("p2p") if s.name != "barrier"]
    found: dict[str, list[tuple[list[Span], int]]] = {}
    for fields in recorded.said:
        inside = [s for s in spans if fields["begun"] <= s.start <= fields["ended"]]
        found.setdefault(fields["case"], []).append((inside, fields["until"]))
    return found


def begun(ended: list[Recorded], span: Span) -> int:
    """Return when the first rank launched what *span* is on the second one, which needs both."""
    (first,) = [s for s in ended[0].spans(span.descriptor.kind) if (s.seq, s.size) == (span.seq, span.size)]
    return first.start


@pytest.mark.parametrize(
    "case", ["wait", "forget", "future", "overlap", "object of future", "result", "waited message"]
)
def test_an_operation_ends_when_its_work_is_done(ended: list[Recorded], case: str) -> None:
    """Rank 1 waits for rank 0, and not longer, whether it waits, takes the future, or looks away for a second."""
    for (span,), until in cases(ended[1])[case]:
        assert (span.source, span.flags) == (HOST_DONE, 1)
        assert begun(ended, span) < span.end < until


def test_a_program_that_asks_learns_the_end_within_a_poll(ended: list[Recorded]) -> None:
    """What happened between two polls is a bound; it is the end if they are close."""
    for (span,), until in cases(ended[1])["poll"]:
        assert span.source in (HOST_DONE, BOUND)
        assert begun(ended, span) < span.end < until


def test_many_at_once_are_each_done_or_bound(ended: list[Recorded]) -> None:
    """Not every one has a callback; one without ends where it was seen to be over, and says so."""
    ((spans, until),) = cases(ended[1])["many"]
    assert len(spans) == 10
    assert {s.source for s in spans} == {HOST_DONE, BOUND}
    assert all(begun(ended, s) < s.end < until for s in spans if s.source == HOST_DONE)


def test_ends_that_come_unseen_are_soon_told_again(ended: list[Recorded]) -> None:
    """A kind that was waited for at once, and from then on is computed beside, has a few bounds and then its ends."""
    ((spans, _),) = cases(ended[1])["unseen"]
    assert len(spans) == 18
    assert {s.source for s in spans[9:-4]} <= {HOST_DONE, BOUND}
    assert [s.source for s in spans[-4:]] == [HOST_DONE] * 4


def test_a_message_that_nobody_waits_for_was_issued(ended: list[Recorded]) -> None:
    """Gloo does not say when a message has gone: the span ends where it was launched, and says so."""
    for recorded in ended:
        (((span,), _),) = cases(recorded)["forgotten message"]
        assert span.source == HOST_ISSUE
    (((span,), _),) = cases(ended[1])["forgotten message"]
    assert span.end < begun(ended, span)


def test_waits_are_children_of_what_they_wait_for(ended: list[Recorded]) -> None:
    """The time blocked is a phase of the operation; one that was over before has none to speak of."""
    for recorded in ended:
        spans = {s.number: s for s in recorded.spans("collective") + recorded.spans("p2p")}
        waits = recorded.spans("phase", "wait")
        assert waits
        assert all(spans[w.parent].flags & 1 and spans[w.parent].start <= w.start for w in waits)


ISSUED = """
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
tensor = torch.ones(4)
dist.all_reduce(tensor)
dist.all_reduce(tensor, async_op=True).wait()
work = dist.all_gather([torch.ones(4), torch.ones(4)], tensor, async_op=True)
functional.wait_tensor(functional.all_reduce(tensor, "sum", dist.group.WORLD))
dist.send(tensor, 1)
dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)])[0].wait()
"""


def test_where_done_means_enqueued_no_end_is_claimed(tmp_path: Path) -> None:
    """As on NCCL, whose `wait` and futures return once the work is enqueued; torch's fake backend stands for it."""
    (recorded,) = run(tmp_path, ISSUED)
    spans = sorted(recorded.spans("collective") + recorded.spans("p2p"), key=lambda span: span.start)

    assert [(span.name, span.source) for span in spans] == [
        (name, HOST_ISSUE) for name in ("all_reduce", "all_reduce", "all_gather", "all_reduce", "send", "isend")
    ]


CAPTURED = """
import torch
import torch.distributed as dist
from otel_dltrace.instrument import torch_distributed
from otel_dltrace.instrument._torch import comm

comm.HOST_BACKENDS = ("mpi",)  # Gloo stands for NCCL
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
asked = []
torch_distributed._here().works._is_completed = asked.append
dist.all_reduce(torch.ones(4), async_op=True).wait()
say(asked=len(asked))
dist.destroy_process_group()
"""


def test_a_wait_asks_no_work_whose_end_is_written(tmp_path: Path) -> None:
    """The question breaks the graph that the program may be capturing."""
    (recorded,) = run(tmp_path, CAPTURED)

    assert [span.name for span in recorded.spans("phase")] == ["wait"]
    assert recorded.said == [{"asked": 0}]


COALESCED = """
import torch
import torch.distributed as dist
from otel_dltrace.instrument._torch import comm

registry.uninstrument()
group, barrier, asked = dist.ProcessGroup, dist.ProcessGroup.barrier, []
group.send = group._start_coalescing = lambda self, *args: None  # as NCCL's, which send when the block ends
group._end_coalescing = lambda self, device: barrier(self)
registry.instrument()
comm.HOST_BACKENDS = ("mpi",)  # Gloo stands for NCCL

class Device:
    mark = lambda self, elsewhere=False: object()
    operation = lambda self, *args: asked.append("operation") or True
    waited = lambda self, *args: asked.append("waited") or True
    is_open = step_ends = lambda self: False

tracer.steps.device = Device()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as block:
    for _ in range(2):
        dist.isend(torch.ones(4), group_dst=0)
block.wait()
say(asked=asked)
dist.destroy_process_group()
"""


def test_a_block_that_is_launched_at_once_is_waited_for(tmp_path: Path) -> None:
    """Calls in it return nothing and have launched nothing: the wait for its work belongs to the last of them."""
    (recorded,) = run(tmp_path, COALESCED)
    sends, (wait,) = recorded.spans("p2p"), recorded.spans("phase", "wait")

    assert [(span.name, span.source) for span in sends] == [("isend", HOST_ISSUE)] * 2
    assert (wait.parent, recorded.said) == (sends[1].number, [{"asked": ["waited"]}])


OWN_CLASSES = """
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

called = []

class Group(dist.ProcessGroup):
    def allreduce(self, tensors, opts):
        called.append("allreduce")
        return super().allreduce(tensors, opts)

    def alltoall_base(self, *args):  # the old name of a function that C++ asks for by both
        called.append("alltoall_base")
        return super().alltoall_base(*args)

class Work(dist.Work):
    pass

def create(store, rank, size, timeout):
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group = Group(rank, size)
    group._set_default_backend(kind)  # torch's fake: a thread of gloo and a method of Python's wait for each other
    group._register_backend(torch.device("cpu"), kind, FakeProcessGroup._create_internal(rank, size))
    return group

dist.Backend.register_backend("own", create, devices=["cpu"])
dist.init_process_group("own", store=dist.HashStore(), rank=0, world_size=1)
group, tensor = dist.group.WORLD, torch.ones(4)
assert type(group) is Group
for _ in range(2):
    dist.all_reduce(tensor)
    group.allreduce([tensor], dist.AllreduceOptions()).wait()
    dist.broadcast(tensor, 0)
    dist.all_to_all_single(torch.empty(4), tensor)
    group.alltoall_base(torch.empty(4), tensor, [], [], dist.AllToAllOptions()).wait()
try:
    Work().get_future()
except RuntimeError as error:
    called.append(str(error))
say(called=called)
"""


def test_a_class_that_a_program_derives_from_a_group_calls_what_it_called(tmp_path: Path) -> None:
    """C++ asks its objects for their methods, and would take ours for theirs; the functions around them are traced."""
    (plain,), (traced,) = run(tmp_path / "off", OWN_CLASSES, level=0), run(tmp_path / "on", OWN_CLASSES)

    assert traced.said == plain.said
    assert counts(traced.spans("collective")) == {"all_reduce": 2, "broadcast": 2, "all_to_all_single": 2}


ERRORS = """
import functools
import torch
import torch.distributed as dist

theirs = dist.all_gather_object

@functools.wraps(theirs)
def patched(*args, **kwargs):
    patched.calls += 1
    return theirs(*args, **kwargs)

patched.calls = 0
dist.all_gather_object = patched
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    alone = dist.new_group([0])
else:
    alone = dist.new_group([0])

def attempt(call):
    try:
        call()
    except Exception as error:
        say(error=[type(error).__name__, str(error)])

attempt(lambda: dist.all_reduce("no tensor"))
attempt(lambda: dist.all_reduce(torch.ones(1), group="no group"))
attempt(lambda: dist.all_gather([torch.empty(2)], torch.ones(2)))
attempt(lambda: dist.all_to_all_single(torch.empty(2), torch.ones(2, dtype=torch.int64)))
attempt(lambda: dist.send(torch.ones(1), dst=dist.get_rank()))
attempt(lambda: dist.scatter_object_list([], None))
attempt(lambda: dist.broadcast_object_list([lambda: 0], src=dist.get_rank(), group=dist.group.WORLD))
attempt(lambda: dist.all_reduce(torch.ones(1), no_such=1))
attempt(lambda: dist.all_reduce())
dist.all_gather_object([None, None], "after")
dist.all_reduce(torch.ones(2), group=alone)
dist.barrier(group=alone)
say(calls=patched.calls)
dist.barrier()
dist.destroy_process_group()
"""


def test_errors_pass_unmodified_and_their_spans_say_them(tmp_path: Path) -> None:
    """The program sees what it sees untraced; the span has the error's class; a patch of somebody else's stays."""
    traced = run(tmp_path / "on", ERRORS, 2)
    run(tmp_path / "off", ERRORS, 2, 0)
    for rank, recorded in enumerate(traced):
        name = f"rank{rank}.jsonl"
        texts = [(tmp_path / mode / name).read_text() for mode in ("on", "off")]
        assert len({re.sub("0x[0-9a-f]+", "", text) for text in texts}) == 1, texts
        said = [fields["error"][0] for fields in recorded.said if "error" in fields]
        failed = [s for s in recorded.spans("collective") + recorded.spans("p2p") if s.flags & 2]
        failed.sort(key=lambda s: s.start)
        kinds = dict(recorded.errors)
        assert [kinds[s.number].rpartition(".")[2] for s in failed] == said
        assert {s.seq for s in failed} == {0}
        assert recorded.said[-1] == {"calls": 1}
        after = [s.name for s in recorded.spans("collective") if not s.flags & 2]
        assert after == ["all_gather_object", *(["all_reduce", "barrier"] if rank == 0 else []), "barrier"]


EXPIRED = """
import datetime
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
brief = dist.new_group()  # which may take longer than a second
dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=1), brief)
if dist.get_rank() == 0:
    try:
        dist.all_reduce(torch.ones(1), group=brief, async_op=True).wait()
    except RuntimeError:
        say(error=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_a_wait_that_fails_and_its_operation_say_the_error(tmp_path: Path) -> None:
    """Both have its class."""
    recorded = run(tmp_path, EXPIRED, 2)[0]
    failed = [s for s in recorded.spans("collective") + recorded.spans("phase") if s.flags & 2]
    kinds = dict(recorded.errors)

    assert {"error": True} in recorded.said
    assert [(s.name, kinds.get(s.number)) for s in failed] == [("all_reduce", "RuntimeError"), ("wait", "RuntimeError")]


COMPILED = """
import sys, warnings
import torch
if LATE:
    from otel_dltrace.instrument import registry
    registry.uninstrument()
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
if LATE:
    registry.instrument()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.group.WORLD

def program(x):
    x = functional.all_reduce(x * 2, "sum", world)
    dist.all_reduce(x)
    gathered = functional.all_gather_tensor(x, 0, world)
    return gathered.sum() + x

def broken(x):
    x = x + 1
    dist.broadcast(x, 0)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    return x * 2

warnings.simplefilter("ignore")
for backend in ("eager", "aot_eager"):
    whole = torch.compile(program, backend=backend, fullgraph=True)
    results = [whole(torch.ones(3) * (rank + 1)).tolist() for _ in range(2)]
    in_parts = torch.compile(broken, backend=backend)
    results += [in_parts(torch.ones(3) * (rank + 1)).tolist() for _ in range(2)]
    say(backend=backend, results=results)
registry = sys.modules.get("otel_dltrace.instrument.registry")
if registry is not None:
    registry.uninstrument()
torch._dynamo.reset()
say(after=torch.compile(program, backend="eager", fullgraph=True)(torch.ones(3)).tolist())
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "later"])
def test_compiled_graphs_stay_whole_and_their_collectives_are_seen(tmp_path: Path, late: bool) -> None:
    """``fullgraph=True`` compiles, results are the same, and each run of a graph records what it calls."""
    text = COMPILED.replace("LATE", str(late))
    traced = run(tmp_path / "on", text, 2, imported="import torch\n")  # without what is to come later
    if not late:
        run(tmp_path / "off", text.replace("LATE", "False"), 2, 0)
    calls = ["all_reduce", "all_reduce", "all_gather_into_tensor"] * 2 + ["broadcast", "all_reduce"] * 2
    for rank, recorded in enumerate(traced):
        assert [s.name for s in recorded.spans("collective")] == calls * 2
        assert [s.seq for s in recorded.spans("collective")] == list(range(1, 2 * len(calls) + 1))
        if not late:
            name = f"rank{rank}.jsonl"
            assert (tmp_path / "on" / name).read_text() == (tmp_path / "off" / name).read_text()


RESTORED = """
import sys, types
from otel_dltrace.instrument import registry
is_ours = lambda function: function.__globals__.get("__name__", "").startswith("otel_dltrace")
if not LATE:
    registry.instrument()
import torch, torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

namespace = torch.ops._c10d_functional
packets = [getattr(namespace, name) for name in ("all_reduce", "all_reduce_", "wait_tensor", "batch_p2p_ops")]
holders = [c10d, dist, functional, c10d.ProcessGroup, c10d.Work, *packets, *(packet.default for packet in packets)]
before = [dict(vars(holder)) for holder in holders]
hashes = [hash(holder) for holder in packets]
remaps = dict(functional.traceable_collective_remaps)
for _ in range(2):
    registry.instrument()
    assert c10d.all_reduce.__globals__["__name__"] == dist.all_reduce.__globals__["__name__"] != c10d.__name__
    assert type(packets[0]._op) is type(packets[0].default._op)
    assert [hash(holder) for holder in packets] == hashes
    assert dist.all_reduce in functional.traceable_collective_remaps
    registry.uninstrument()
    if LATE:
        for holder, attributes in zip(holders, before):
            changed = [name for name, value in attributes.items() if vars(holder).get(name) is not value]
            assert not changed, (holder, changed)
        assert dict(functional.traceable_collective_remaps) == remaps
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "torch":
            left = [n for n, v in [*vars(module).items()] if type(v) is types.FunctionType and is_ours(v)]
            assert not left, (name, left)
    assert dist.all_reduce in functional.traceable_collective_remaps
    assert "otel_dltrace" not in repr([type(holder._op) for holder in packets])
"""


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "later"])
def test_nothing_of_ours_is_left_behind(late: bool) -> None:
    """Functions, their aliases, methods, operators and the table of graphs are what they were, twice over."""
    program = RESTORED.replace("LATE", str(late))
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")

"""Calls of mpi4py, one by one: each row is a method, requests end as they are waited for, errors are told."""

import ast
import importlib.util
import re
import sys
from pathlib import Path

import pytest

from otel_dltrace.analysis.stops.failures import Failure, failures
from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.instrument._mpi.calls import CALLS
from otel_dltrace.model.semconv import Flag, Source
from tests.support.mpi import ALLOWED, MPIEXEC, RUN, joined, mpiexec, spans_of
from tests.support.processes import a_place

pytest.importorskip("mpi4py")


def signature(holder: str, name: str) -> list[str]:
    """Return the parameters that mpi4py's own stub gives a method."""
    stub = (Path(importlib.util.find_spec("mpi4py").origin).parent / "MPI.pyi").read_text()
    (body,) = re.findall(rf"^class {holder}\b.*?(?=^class |\Z)", stub, re.DOTALL | re.MULTILINE)
    (found,) = set(re.findall(rf"^    def {name}\((.*?)\)\s*->", body, re.DOTALL | re.MULTILINE))
    parameters = ast.parse(f"def method({found}): ...").body[0].args
    return [argument.arg for argument in parameters.args[1:]]


@pytest.mark.parametrize("holder", sorted({call.holder for call in CALLS}))
def test_every_row_is_a_method_of_mpi4py(holder: str) -> None:
    """The method is there, and its parameters are those of the row, in that order."""
    rows = {call.name: call.parameters.split() for call in CALLS if call.holder == holder}
    real = {name: signature(holder, name) for name in rows}
    assert rows == {name: parameters[: len(rows[name])] for name, parameters in real.items()}


OFF_AND_ON = """
import pickle
from mpi4py import MPI
from otel_dltrace.instrument import registry

def methods():
    return {(c, n): m for c in CLASSES for n, m in vars(getattr(MPI, c)).items()} | {"Init": MPI.Init}

CLASSES = ("Comm", "Intracomm", "Topocomm", "Cartcomm", "Intercomm", "Request", "Prequest", "Message", "Win", "File")
before, world = methods(), MPI.COMM_WORLD
registry.instrument(["mpi4py"])
assert MPI.COMM_WORLD is world and type(world) is MPI.Intracomm
assert pickle.loads(pickle.dumps(world)) == world
changed = {key for key, method in methods().items() if before[key] is not method}
assert ("Comm", "Send") in changed and ("Request", "Waitall") in changed, changed
assert world.Dup().allreduce(1) == 1
registry.uninstrument()
assert all(before[key] is method for key, method in methods().items())
print(len(changed))
"""


def test_uninstrument_puts_the_same_objects_back(tmp_path: Path) -> None:
    """While traced a communicator is the object, of the class, that it was; afterwards so is every method."""
    with a_place(tmp_path) as place:
        done = place.run(OFF_AND_ON)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) > len(CALLS)


UNCOUNTED = """
from contextlib import suppress
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
out = np.zeros(4)
if world.rank < 2:
    world.Create_group(world.group.Incl([0, 1]), tag=3).Barrier()
world.Barrier()
if world.rank == 0:
    for send in (world.send, world.isend, world.Send):
        with suppress(Exception):
            send(lambda: "neither pickled nor a buffer", 1, tag=7)
    with suppress(Exception):
        world.sendrecv(lambda: "not pickled", 1, 7, source=1, recvtag=7)
    for call in (world.bcast, world.gather):
        with suppress(Exception):
            call(lambda: "not pickled")
    with suppress(ValueError):
        world.scatter([1, 2])
    world.Barrier()
    for dest in (1, 2):
        world.Send(out, dest, tag=7)
        world.Send(out, dest, tag=7)
        world.Send(out[:1], dest, tag=7)
else:
    first, second = world.Irecv(out, 0, 7), world.Irecv(out.copy(), 0, 7)
    first.Cancel()
    first.Wait()
    world.Barrier()
    second.Wait()
    small = np.zeros(2)
    with suppress(MPI.Exception):
        world.Recv(small, 0, 7)
    with suppress(TypeError):
        world.Recv("no buffer", 0, 7)
    world.Recv(small, 0, 7)
"""


def test_what_was_not_to_be_and_what_others_do_not_hear_of_shifts_no_number(tmp_path: Path) -> None:
    """Messages that were never sent, receives that were cancelled, groups that only their members make."""
    whole = [
        *[[(name, 0), (name, 1)] for name in ("barrier", "create_group")],
        *[[("barrier", 0), ("barrier", 1), ("barrier", 2)]] * 2,
        *[[("irecv", rank), ("send", 0)] for rank in (1, 2)],
        *[[("recv", rank), ("send", 0)] for rank in (1, 1, 2, 2)],
    ]
    assert joined(spans_of(UNCOUNTED, 3, tmp_path)) == sorted(map(sorted, whole))


APART = """
from contextlib import suppress
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
out = np.zeros(4)
first, second = world.Allreduce_init(np.ones(4), out), world.Bcast_init(out.copy(), 0)
if world.rank == 0:
    with suppress(TypeError):
        world.Allreduce("no buffer", out)
    with suppress(TypeError):
        world.Iallreduce("no buffer", out)
    with suppress(MPI.Exception):
        world.Bcast(out, root=2)
    MPI.Prequest.Startall([first, second])
    world.Barrier()
else:
    second.Start()
    world.Barrier()
    first.Start()
MPI.Request.Waitall([first, second])
world.Split(world.rank == 0 or 1).Barrier()
if world.rank == 0:
    world.isend((), 1, tag=7).wait()
    world.Send(out, 1, tag=8)
    world.Send(out[:2], 1, tag=8)
else:
    assert world.irecv(source=0, tag=7).wait() == ()
    receive = world.Recv_init(np.zeros(2), 0, 8)
    for _ in range(2):
        receive.Start()
        with suppress(MPI.Exception):
            receive.Wait()
    receive.Free()
"""


def test_what_one_rank_starts_earlier_or_fails_to_begin_has_the_same_id_on_all(tmp_path: Path) -> None:
    """Persistent collectives in any order, refused ones, a bool as a colour; what failed, and what is empty, ends."""
    batches = spans_of(APART, 2, tmp_path)
    names = ["allreduce", "barrier", "barrier", "bcast", "split"]
    both = (
        [[(name, 0), (name, 1)] for name in names] + [[("irecv", 1), ("isend", 0)]] + [[("recv", 1), ("send", 0)]] * 2
    )
    assert joined(batches) == sorted(both)
    assert not any((batch["flags"] & Flag.TRUNCATED).any() for batch in batches)


UNWAITED = """
import gc
import numpy as np
from mpi4py import MPI

def say(request):
    request.Wait()

me = MPI.COMM_SELF
out = np.zeros(4)
receive = me.Irecv(out, MPI.ANY_SOURCE, MPI.ANY_TAG)
lost = me.Isend(out, 0, 3)
del lost
gc.collect()
say(receive)
try:
    me.Send(out, 5)
except MPI.Exception:
    pass
request = me.Isend(out, MPI.PROC_NULL)
request.Wait()
kept = me.Isend(out, 0, 9)
"""


def test_requests_end_as_they_are_waited_for(tmp_path: Path) -> None:
    """What is waited for is done then, what is not was issued; a receive learns who sent; an error is noted."""
    with a_place(tmp_path) as place:
        done = place.run(UNWAITED, OTEL_DLTRACE="1")
        assert done.returncode == 0, done.stderr
        place.wait_for_rings()
        (batch,) = place.spans()
    rows = [
        (
            batch.descriptor_of(row).name,
            int(batch["a"][row]),
            int(batch["b"][row]),
            int(batch["seq"][row]),
            bool(batch["flags"][row] & Flag.ERROR),
        )
        for row in range(len(batch))
        if batch.descriptor_of(row).kind == "p2p"
    ]
    assert rows == [
        ("isend", 0, 3, 1, False),
        ("irecv", 0, 3, 1, False),
        ("send", -1, 0, 0, True),
        ("isend", -1, 0, 0, False),
        ("isend", 0, 9, 1, False),
    ]
    sources = [int(batch["source"][row]) for row in range(len(batch)) if batch.descriptor_of(row).name == "isend"]
    assert (sources[0], sources[2]) == (Source.HOST_ISSUE, Source.HOST_ISSUE)
    assert not any(batch["flags"] & Flag.TRUNCATED)


NO_TYPES = """
import mpi4py
mpi4py.rc.errors = "fatal"
import numpy as np
from mpi4py import MPI

own = MPI.COMM_WORLD.Dup()
own.Set_errhandler(MPI.ERRORS_RETURN)
some, freed = np.ones(4), MPI.DOUBLE.Create_contiguous(2)
freed.Free()
calls = [
    lambda: own.Send([some, 1, MPI.DATATYPE_NULL], 0),
    lambda: own.Irecv([some, (None, 1), freed], 0),
    lambda: own.Sendrecv([some, 1, freed], 0, 0, some),
    lambda: own.Alltoallw([some, ([1], [0]), [freed]], [some.copy(), ([1], [0]), [MPI.DOUBLE]]),
]
for call in calls:
    try:
        call()
    except (MPI.Exception, ValueError) as error:
        print(type(error).__name__)
MPI.Finalize()
try:
    MPI.COMM_WORLD.Send([some, MPI.DOUBLE], "nobody")
except TypeError:
    print("all raised")
"""


def test_no_question_of_ours_ends_a_program_whose_call_raises(tmp_path: Path) -> None:
    """MPI has its own handler for what is asked about no type, and after the end; it may be the one that ends all."""
    if MPIEXEC is None:
        pytest.skip("there is no mpiexec")
    with a_place(tmp_path) as place:
        place.write(NO_TYPES)
        untraced, traced = (mpiexec(place, 1, ["program.py"], traced=traced).split() for traced in (False, True))
        (batch,) = place.spans()
    assert untraced[-2:] == ["all", "raised"]
    assert traced == untraced
    failed = [batch.descriptor_of(row).name for row in range(len(batch)) if batch["flags"][row] & Flag.ERROR]
    assert sorted(failed) == ["alltoallw", "irecv", "recv", "send", "send"]


WRONG = """
import sys
import numpy as np
from mpi4py import MPI

some, own = np.ones(3), MPI.COMM_WORLD.Dup()
under_way = own.Irecv(some.copy(), 0, 7)
calls = [
    lambda: own.Send(some, "a"),
    lambda: own.Send(some, [1]),
    lambda: own.Isend(some, 0, "a"),
    lambda: own.Recv(some, np.zeros(2)),
    lambda: own.Sendrecv([some, 1, MPI.DATATYPE_NULL], 0, 0, some),
    lambda: own.Bcast(some, "a"),
    lambda: own.gather(some, "a"),
    lambda: own.probe("a"),
    lambda: own.Create_group([0]),
    lambda: MPI.Comm.Send(),
    lambda: MPI.Request.Waitall(request for request in [under_way]),
    lambda: MPI.Prequest.Startall(5),
]
for call in calls:
    try:
        call()
        sys.exit("it is not wrong")
    except (TypeError, MPI.Exception):
        pass
own.Send(some, 0.0, 7)
under_way.Wait()
own.Barrier()
"""


def test_what_a_call_refuses_is_told_as_its_error_and_by_nobody_else(tmp_path: Path) -> None:
    """Ranks, tags, types and groups that are none: no peer, no number, and the next calls have theirs."""
    (batch,) = spans_of(WRONG, 1, tmp_path)
    rows = [
        (batch.descriptor_of(row).name, *(int(batch[name][row]) for name in ("a", "b", "size", "seq")))
        for row in batch["start"].argsort()
        if batch["flags"][row] & Flag.ERROR
    ]
    assert rows == [
        ("send", -1, 0, 24, 0),
        ("send", -1, 0, 24, 0),
        ("isend", 0, -1, 24, 0),
        ("recv", -1, -1, 24, 0),
        ("recv", -1, -1, 24, 0),
        ("send", 0, 0, 0, 0),
        ("bcast", 0, -1, 24, 0),
        ("gather", 0, -1, 24, 0),
        ("probe", -1, -1, 0, 0),
        ("create_group", 0, -1, 0, 0),
    ]
    assert {batch.errors[number][0] for number in batch["error"].tolist() if number} == {
        "TypeError",
        "mpi4py.MPI.Exception",
    }
    good = {batch.descriptor_of(row).name: int(batch["seq"][row]) for row in batch["start"].argsort()}
    assert {name: good[name] for name in ("irecv", "send", "barrier")} == {"irecv": 1, "send": 1, "barrier": 1}


ABORTING = """
import sys
import otel_dltrace
from mpi4py import MPI

world = MPI.COMM_WORLD
world.allreduce(1)
try:
    world.Abort("no code")
except TypeError:
    pass
if world.rank:
    {abort}
world.allreduce(1)
"""


@pytest.mark.parametrize(
    ("abort", "operation", "error"),
    [
        pytest.param("world.Abort(7)", "exit", ("mpi4py.MPI.Abort", "code 7"), id="outside any step"),
        pytest.param(
            "with otel_dltrace.step(): world.Abort(7)", "rank.step", ("mpi4py.MPI.Abort", "code 7"), id="in a step"
        ),
        pytest.param(
            "sys.excepthook = lambda *_: world.Abort(1); 1 / 0",
            "exit",
            ("ZeroDivisionError", "division by zero"),
            id="for an error",
        ),
    ],
)
def test_a_rank_that_aborts_has_the_first_error(
    tmp_path: Path, abort: str, operation: str, error: tuple[str, str]
) -> None:
    """MPI lets no line of the program follow, and ends the others."""
    if MPIEXEC is None:
        pytest.skip("there is no mpiexec")
    with a_place(tmp_path) as place:
        place.write(ABORTING.format(abort=abort))
        place.finish(place.popen([*RUN, str(MPIEXEC), "-n", "2", sys.executable, "program.py"], **ALLOWED))
        place.wait_for_rings()
        (run,) = place.runs()
        told = failures(read_run(run)).found
    step = 0 if operation == "rank.step" else None
    assert told == (Failure(*error, operation, "worker", (1,), 1, step, 1, 0),)

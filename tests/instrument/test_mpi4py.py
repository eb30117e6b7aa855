"""Programs that use mpi4py: every call is a span, all ranks know it by one id, and nothing else changes."""

import ast
import ctypes
import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from otel_dltrace.analysis.stops.failures import Failure, failures
from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.instrument._mpi import groups
from otel_dltrace.instrument._mpi.buffers import content_of, name_of
from otel_dltrace.instrument._mpi.calls import CALLS
from otel_dltrace.instrument._mpi.comm import Comm, current
from otel_dltrace.instrument._mpi.family import Call, Role
from otel_dltrace.instrument._mpi.groups import NOBODY, Group
from otel_dltrace.instrument._mpi.requests import Part
from otel_dltrace.instrument._mpi.usual import _learned, shortened
from otel_dltrace.model.attributes import collective_ids
from otel_dltrace.model.semconv import Flag, Source
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live
from tests.support.mpi import ALLOWED, MPIEXEC, RUN, mpiexec
from tests.support.paths import PROGRAMS
from tests.support.processes import Place, a_place
from tests.support.ring_files import SMALLEST, Interrupting, read_own

pytest.importorskip("mpi4py")

PROGRAM = PROGRAMS / "mpi_calls.py"
NOT_RUN = {"agree", "iagree", "shrink", "ishrink", "accept", "connect", "spawn", "spawn_multiple"}
NOT_RUN |= {"create_from_group", "create_from_groups"}
"""Calls for broken communicators, for other jobs, and for sessions."""


def spans_of(program: str, ranks: int, folder: Path) -> list[SpanBatch]:
    """Return what *program* recorded on *ranks* ranks."""
    if MPIEXEC is None:
        pytest.skip("there is no mpiexec")
    with a_place(folder) as place:
        place.write(program)
        mpiexec(place, ranks, ["program.py"], traced=True)
        return place.spans()


def joined(batches: list[SpanBatch]) -> list[list[tuple[str, int]]]:
    """Return name and rank of those that share an id, for each id."""
    by_id = defaultdict(list)
    for _, name, number, _, rank in [row for batch in batches for row in operations(batch) if row[2]]:
        by_id[number].append((name, rank))
    return sorted(map(sorted, by_id.values()))


def digests(printed: str) -> list[str]:
    """Return the lines of the ranks."""
    return sorted(line for line in printed.splitlines() if re.fullmatch(r"\d [0-9a-f]{64}", line))


@pytest.fixture(scope="module", params=[2, 3], ids=["two ranks", "three ranks"])
def ran(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[str], list[str], list[SpanBatch]]]:
    """What the ranks received untraced and traced, and their spans."""
    if MPIEXEC is None:
        pytest.skip("there is no mpiexec")
    with a_place(tmp_path_factory.mktemp("mpi")) as place:
        before = digests(mpiexec(place, request.param, [str(PROGRAM)], traced=False))
        after = digests(mpiexec(place, request.param, [str(PROGRAM)], traced=True))
        assert len(before) == request.param
        yield before, after, sorted(place.spans(), key=lambda batch: batch.process.bind.rank)


def operations(batch: SpanBatch) -> list[tuple[str, str, int, int, int]]:
    """Return kind, name, id, group size and rank of each operation."""
    ids = collective_ids(batch).tolist()
    rank = batch.process.bind.rank
    described = [batch.descriptor_of(row) for row in range(len(batch))]
    return [
        (d.kind, d.name, number, d.group_size, rank)
        for d, number in zip(described, ids, strict=True)
        if d.kind in ("collective", "p2p")
    ]


def test_the_ranks_receive_the_same_traced_and_untraced(ran: tuple[list[str], list[str], list[SpanBatch]]) -> None:
    """Every buffer and object that the program got is what it was without us."""
    before, after, _ = ran
    assert after == before


def test_every_call_of_the_table_is_a_span(ran: tuple[list[str], list[str], list[SpanBatch]]) -> None:
    """No row of the table is left without a span of its name."""
    written = {name for batch in ran[2] for _, name, *_ in operations(batch)}
    rows = {name for call in CALLS for name in names_of(call)}
    assert rows - NOT_RUN - written == set()


def names_of(call: Call) -> list[str]:
    """Return what the spans of *call* are named: a message each way is two spans."""
    if call.role is Role.SEND_RECEIVE:
        prefix = "i" if call.name.startswith("I") else ""
        return [f"{prefix}send", f"{prefix}recv"]
    return [call.span]


def test_a_collective_has_one_id_on_all_its_ranks(ran: tuple[list[str], list[str], list[SpanBatch]]) -> None:
    """Each id is found once on every rank of its group, under one name."""
    by_id = defaultdict(list)
    for batch in ran[2]:
        for kind, name, number, size, rank in operations(batch):
            if kind == "collective" and number:
                by_id[number].append((name, size, rank))
    assert len(by_id) > 100
    wrong = [
        seen for seen in by_id.values() if len({n for n, *_ in seen}) > 1 or len({r for *_, r in seen}) < len(seen)
    ]
    assert wrong == []
    # Windows and files do not say how many they are, but in their group's name.
    assert [seen for seen in by_id.values() if len(seen) != seen[0][1]] == []


def test_a_message_has_one_id_on_both_sides(ran: tuple[list[str], list[str], list[SpanBatch]]) -> None:
    """Each id is one send and one receive, on two ranks."""
    by_id = defaultdict(list)
    for batch in ran[2]:
        for kind, name, number, _, rank in operations(batch):
            if kind == "p2p" and number:
                by_id[number].append(("send" if "send" in name else "recv" if "recv" in name else name, rank))
    assert len(by_id) > 50
    assert Counter(tuple(sorted(way for way, _ in seen)) for seen in by_id.values()) == {("recv", "send"): len(by_id)}
    assert all(len({rank for _, rank in seen}) == 2 for seen in by_id.values())


def test_every_message_is_numbered(ran: tuple[list[str], list[str], list[SpanBatch]]) -> None:
    """No send or receive between the ranks of the program is left without an id."""
    unnumbered = [
        name
        for batch in ran[2]
        for kind, name, number, *_ in operations(batch)
        if kind == "p2p" and not number and re.fullmatch("i?[bsrp]?send|[ip]?recv", name)
    ]
    assert unnumbered == []


def test_the_ranks_are_bound_by_mpi(ran: tuple[list[str], list[str], list[SpanBatch]]) -> None:
    """They are ranks 0 to n - 1 of one generation of one job, which the launcher names."""
    binds = [batch.process.bind for batch in ran[2]]
    assert [(b.rank, b.world_size) for b in binds] == [(rank, len(binds)) for rank in range(len(binds))]
    assert len({(b.job, b.generation) for b in binds}) == 1
    assert binds[0].generation
    assert binds[0].job


def test_ranks_that_run_different_programs_are_one_run(tmp_path: Path) -> None:
    """`mpiexec ... : ...` is one job, with one run directory; a module behind mpi4py's runner has its own name."""
    if MPIEXEC is None:
        pytest.skip("there is no mpiexec")
    with a_place(tmp_path) as place:
        place.write("from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n", "ocean.py")
        place.write("from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n", "wind.py")
        mpiexec(place, 1, ["ocean.py", ":", "-n", "2", sys.executable, "-m", "mpi4py", "wind.py"], traced=True)
        binds = [batch.process.bind for batch in place.spans()]
    assert sorted((bind.rank, bind.world_size, bind.job_name) for bind in binds) == [
        (rank, 3, "ocean+wind") for rank in range(3)
    ]
    assert len(list(tmp_path.glob("dltrace-ocean_wind-*"))) == 1


BOTH = """
import os

if {mpi_first}:
    from mpi4py import MPI
import torch
import torch.distributed as dist

import otel_dltrace

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=rank, world_size=2)
from mpi4py import MPI

for _ in range(3):
    with otel_dltrace.step():
        dist.all_reduce(torch.ones(2))
        MPI.COMM_WORLD.allreduce(rank)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("mpi_first", [True, False], ids=["MPI first", "torch first"])
def test_a_program_of_mpi_and_torch_is_one_run(tmp_path: Path, mpi_first: bool) -> None:
    """Whichever begins first; and all its ranks take the same numbers for those of their steps."""
    pytest.importorskip("torch")
    if MPIEXEC is None:
        pytest.skip("there is no mpiexec")
    with a_place(tmp_path) as place:
        place.write(BOTH.format(mpi_first=mpi_first))
        mpiexec(place, 2, ["program.py"], traced=True)
        batches = sorted(place.spans(), key=lambda batch: batch.process.bind.rank)
        runs = len(place.runs())
    assert [(b.process.bind.rank, b.process.bind.world_size) for b in batches] == [(0, 2), (1, 2)]
    assert runs == 1
    numbers = [
        [int(b["seq"][row]) for row in b["start"].argsort() if b.descriptor_of(row).kind == "step"] for b in batches
    ]
    assert len(numbers[0]) == 3
    assert numbers[0] == numbers[1]


HYDRA = "PMI_RANK=0 PMI_SIZE=1"


@pytest.mark.parametrize(
    ("first", "second"),
    [("", ""), (HYDRA, f"{HYDRA} PMI_SPAWNED=1")],
    ids=["without a launcher", "spawned by Hydra"],
)
def test_what_a_run_s_id_does_not_tell_apart_is_a_run_of_its_own(tmp_path: Path, first: str, second: str) -> None:
    """Programs that a script starts each for itself, and what MPI spawns where it has no name: each has a rank 0."""
    with a_place(tmp_path) as place:
        place.write("from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n")
        script = f"env {first} {sys.executable} program.py; env {second} {sys.executable} program.py"
        done = place.finish(place.popen([*RUN, "sh", "-c", script]))
        assert done.returncode == 0, done.stderr
        barriers = [number for batch in place.spans() for _, name, number, *_ in operations(batch) if name == "barrier"]
        assert len(place.runs()) == 2
    assert len(set(barriers)) == 2


UNSEEN = """
from mpi4py import MPI
from mpi4py.util import pkl5

world = MPI.COMM_WORLD
for key in (world.rank, -world.rank) * 4:
    comm = world.Split(0, key)
    pkl5.Intracomm(comm).gather("an object", 0)
    comm.Free()
"""


def test_a_communicator_that_nobody_saw_go_leaves_its_ranks_to_no_other(tmp_path: Path) -> None:
    """What `pkl5` duplicates goes with the communicator, and its number comes again: ranks are another order's."""
    received = {
        batch.process.bind.rank: [
            (batch.descriptor_of(row).group_size, int(batch["a"][row]))
            for row in batch["start"].argsort()
            if batch.descriptor_of(row).name == "recv"
        ]
        for batch in spans_of(UNSEEN, 2, tmp_path)
    }
    root = [(2, 0)] * 2 + [(2, 1)] * 2  # a gather of one object is two messages
    assert received == {0: root * 4, 1: root[::-1] * 4}


SPAWNING = """
import sys
from mpi4py import MPI

parent = MPI.Comm.Get_parent()
between = parent or MPI.COMM_WORLD.Spawn(sys.executable, [__file__], maxprocs=1)
between.Barrier()
between.Disconnect()
"""


def test_both_sides_of_a_spawn_say_how_many_they_are(tmp_path: Path) -> None:
    """The side that was spawned did not make the communicator; each is a run, whose ids are its own."""
    seen = [
        (batch.descriptor_of(row).group_size, int(batch["seq"][row]))
        for batch in spans_of(SPAWNING, 1, tmp_path)
        for row in range(len(batch))
        if batch.descriptor_of(row).name == "barrier"
    ]
    assert seen == [(2, 0)] * 2
    assert len(list(tmp_path.glob("dltrace-*"))) == 2


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


class OnDevice:
    """An array that only says where it lies, as what is on a device may."""

    def __init__(self, array: Any, **more: Any) -> None:
        """Lie where *array* does."""
        said = {**array.__array_interface__, "version": 3, "strides": None, "keep": array}
        self.__cuda_array_interface__ = said | more


class Lent:
    """An array that only lends its memory, and only where it lies in one piece."""

    def __init__(self, array: Any) -> None:
        """Lend *array*."""
        self._array = array

    def __dlpack__(self, **asked: Any) -> Any:
        """Return what others read it by."""
        return self._array.__dlpack__(**asked)

    def __dlpack_device__(self) -> Any:
        """Return where it lies."""
        return self._array.__dlpack_device__()


def specifications() -> dict[str, tuple[object, tuple[int, str]]]:
    """Return what mpi4py takes as a buffer, and what it holds."""
    np = pytest.importorskip("numpy")
    six = np.zeros(6)
    return {
        "array": (six, (48, "float64")),
        "array of the program's type": (six.astype("i4"), (24, "int32")),
        "array with count": ([six, 4], (32, "float64")),
        "array with count of numpy": ([six, np.int64(4)], (32, "float64")),
        "array with count and displacement": ([six, [1, 2]], (8, "float64")),
        "array from a displacement on": ([six, (None, 2)], (32, "float64")),
        "array with type": ([six, "d"], (48, "d")),
        "bytes": (b"abc", (3, "")),
        "bytes with count": ([bytearray(8), 4], (4, "")),
        "memory of C with count": ([(ctypes.c_double * 6)(), 4], (32, "")),
        "array of a device": (OnDevice(six), (48, "")),
        "array of a device with count": ([OnDevice(six), 4], (32, "")),
        "array of a device with type": ([OnDevice(six), "d"], (48, "d")),
        "array of a device of which mpi4py warns": (OnDevice(six, descr=[("", "<f4"), ("", "<f4")]), (48, "")),
        "array that is lent": (Lent(six), (48, "")),
        "array with gaps that is lent": (Lent(six[::2]), (0, "")),
        "nothing": (None, (0, "")),
        "what is no buffer": ([object()], (0, "")),
    }


@pytest.mark.parametrize("name", specifications())
def test_a_buffer_says_its_bytes_and_type(name: str) -> None:
    """However it is written."""
    value, known = specifications()[name]
    size, kind = content_of(value, is_object=False)
    assert (size, name_of(kind) if kind != "" else "") == known


MOVED = """
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
six, out, first = np.zeros(6), np.zeros(64), world.rank == 0
column = MPI.DOUBLE.Create_vector(2, 1, 3).Create_resized(0, 48).Commit()
given = [[six, np.int64(4), MPI.DOUBLE], [six, (2, 3), "d"], [six, [2, 1]], [six, column], [six, (None, 2), MPI.DOUBLE]]
for message in given:
    world.Send(message, 1) if first else world.Recv(out, MPI.ANY_SOURCE)
world.send({"an": "object"}, 1) if first else world.mprobe().recv()
for nobody in (MPI.PROC_NULL, np.int32(MPI.PROC_NULL)):
    world.Send(six, nobody)
    world.Recv(six, nobody, 3)
    MPI.Request.Waitall([world.Isend(six, nobody), world.Irecv(six, nobody, 3), world.Irecv(six, nobody)])
    world.Sendrecv_replace(six, nobody, source=nobody)
world.Alltoall([six, 3, MPI.DOUBLE], [out, 3, MPI.DOUBLE])
world.Alltoallv([six, 1, "d"], [out, 1, "d"])
world.Alltoallw([six, [MPI.DOUBLE] * 2], [out, [MPI.DOUBLE] * 2])
world.Scatter([six, np.int32(2)] if first else None, [out, 2])
world.Scatterv([six, ([2, 1], [0, 3])] if first else None, [out, 2 - world.rank])
world.Allgatherv(MPI.IN_PLACE, [out, np.array([3, 4]), "d"])
world.Create_cart([2], [True]).Neighbor_alltoall([six, 2, "d"], [out, 2, "d"])
"""


ANEW = """
import otel_dltrace as d
from mpi4py import MPI

def probed(value):
    request = MPI.COMM_SELF.isend(value, 0)
    message = MPI.COMM_SELF.mprobe()
    request.wait()
    return message

d.start()
before = probed("before")
d.stop()
d.start()
for n in range(9):
    with d.operation(f"name {n}"):
        pass
after = probed("after")
before.recv(), after.recv()
d.stop()
"""


def test_what_was_probed_before_tracing_was_stopped_is_not_received_under_a_name_of_then(tmp_path: Path) -> None:
    """Its group's names have other numbers in the ring of now."""
    batches = spans_of(ANEW, 1, tmp_path)
    names = [[batch.descriptor_of(row).name for row in batch["start"].argsort()] for batch in batches]
    told = sorted([name for name in one if name in ("mprobe", "recv")] for one in names)
    assert told == [["mprobe"], ["mprobe", "recv"]]


def test_bytes_are_those_that_move(tmp_path: Path) -> None:
    """With counts of numpy's, with displacements, of types with gaps, a count for each rank: as the receiver says.

    To and from nobody, as at the edge of a grid, none.
    """
    batches = sorted(spans_of(MOVED, 2, tmp_path), key=lambda batch: batch.process.bind.rank)
    sizes: list[list[tuple[str, int]]] = []
    for batch in batches:
        rows = [(batch.descriptor_of(row), int(batch["size"][row])) for row in batch["start"].argsort()]
        sizes.append([(d.name, size) for d, size in rows if d.kind in ("collective", "p2p") and size])
    sent, received = ([size for name, size in rank if name in ("send", "recv")] for rank in sizes)
    assert sent == [32, 16, 16, 16, 32]
    assert received == [*sent, dict(sizes[1])["mprobe"]]
    parts = [[48, 16, 16, 32, 24, 56, 32], [48, 16, 16, 16, 8, 56, 32]]
    names = ["alltoall", "alltoallv", "alltoallw", "scatter", "scatterv", "allgatherv", "neighbor_alltoall"]
    assert [rank[-7:] for rank in sizes] == [list(zip(names, of_rank, strict=True)) for of_rank in parts]


def test_more_bytes_than_an_int_counts_are_received() -> None:
    """Of which Open MPI says that they are no count."""
    from mpi4py import MPI

    status = MPI.Status()
    status.Set_source(0)
    status.Set_tag(7)
    status.Set_elements(MPI.BYTE, 3 << 30)
    comm = cast("Comm", SimpleNamespace(module=MPI))
    operation: Any = SimpleNamespace(size=0, a=NOBODY, b=NOBODY)
    part = Part(operation)
    Comm.settle(comm, Group("world", 1), MPI.COMM_WORLD, "", part, status)
    assert (operation.size, operation.a, operation.b, part.seq) == (3 << 30, 0, 7, 1)
    assert _learned(comm, Group("world", 1), MPI.COMM_WORLD, status, 0, NOBODY, NOBODY) == (3 << 30, 0, 7, 1)


def test_who_is_alone_in_mpi_has_begun_nothing_with_anybody(place: Place) -> None:
    """Lightning imports it to see whether there are others: its launching process had a run directory for that."""
    done = place.run("from mpi4py import MPI\nprint(MPI.COMM_WORLD.Get_size())", OTEL_DLTRACE="1", **ALLOWED)

    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert place.runs() == []


IN_HALVES = """
import numpy as np
from mpi4py import MPI

data = np.zeros(6)
file = MPI.File.Open(MPI.COMM_WORLD, "halves.bin", MPI.MODE_CREATE | MPI.MODE_RDWR)
file.Write_at_all_begin(0, data)
file.Write_at_all_end(data)
file.Close()
"""


def test_bytes_to_a_file_in_two_halves_are_counted_once(tmp_path: Path) -> None:
    """Both calls are given the same memory."""
    (batch,) = spans_of(IN_HALVES, 1, tmp_path)
    sizes = {batch.descriptor_of(row).name: int(batch["size"][row]) for row in range(len(batch))}
    assert sizes == {"open": 0, "write_at_all_begin": 48, "write_at_all_end": 0, "close": 0}


def test_a_new_tag_for_each_message_takes_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many there are no more numbers; those that were counted go on."""
    monkeypatch.setattr(groups, "_MOST_NUMBERED", 3)
    group = Group("world", 2)
    assert [group.number_message("", 1, tag, sends=True) for tag in (0, 1, 2, 3, 4, 0, 2)] == [1, 1, 1, 0, 0, 2, 2]


def test_communicators_and_persistent_collectives_without_end_take_bounded_descriptors(tmp_path: Path) -> None:
    """Past so many, what a program makes has no id; its operations stay what they are, and the world's go on."""
    batches = spans_of(
        """
        import numpy as np
        from mpi4py import MPI
        from otel_dltrace.instrument._mpi import groups

        groups.MOST_DESCRIBED = 20
        world, some, room = MPI.COMM_WORLD, np.zeros(2), np.zeros(2)
        for _ in range(20):
            own = world.Dup()
            own.Allreduce(some, room)
            own.Free()
            request = world.Allreduce_init(some, room)
            request.Start()
            request.Wait()
            request.Free()
        world.Barrier()
        """,
        2,
        tmp_path,
    )
    expected = {("init", False): 1, ("dup", True): 20, ("allreduce", True): 12, ("allreduce", False): 28}
    expected |= {("free", True): 6, ("free", False): 14, ("barrier", True): 1}

    assert [Counter((name, bool(number)) for _, name, number, *_ in operations(batch)) for batch in batches] == (
        [expected] * 2
    )
    assert Counter(map(len, joined(batches))) == {2: 20 + 12 + 6 + 1}


def test_a_look_at_a_window_that_is_not_done_is_not_written(tmp_path: Path) -> None:
    """A program may look as often as it can."""
    batches = spans_of(
        """
        import numpy as np
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        window = MPI.Win.Allocate(8, comm=world)
        other = world.Get_group().Incl([1 - world.rank])
        if world.rank:
            window.Post(other)
            assert not any(window.Test() for _ in range(100))
            world.send(None, 0)
            while not window.Test():
                pass
        else:
            window.Start(other)
            world.recv()
            window.Complete()
        """,
        2,
        tmp_path,
    )

    names = [name for batch in batches for _, name, *_ in operations(batch)]
    assert [name for name in names if name in ("post", "test")] == ["post", "test"]


def test_the_short_way_of_usual_calls_says_what_the_way_of_all_calls_says(tmp_path: Path) -> None:
    """Arrays and objects, by position and by name, of any rank and tag, and what goes wrong: the same records."""
    said = [
        subprocess.run(
            [sys.executable, str(PROGRAM.with_name("mpi_usual.py")), str(tmp_path), way],
            env={**os.environ, **ALLOWED, "PYTHONPATH": str(Path(__file__).parent)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for way in ("usual", "general")
    ]

    assert said[0].splitlines() == said[1].splitlines()


@pytest.mark.parametrize("records", [1, 62, 63, 200, 16 * 63])
@pytest.mark.parametrize("half", ["begin", "end"])
def test_a_usual_call_interrupted_by_a_handler_that_records_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: str, records: int
) -> None:
    """Between drawing a slot and packing it, a handler may fill the chunk, even lap the whole ring."""
    recorder = Recorder(tmp_path, SMALLEST)
    tracer, group = Tracer(recorder), Group("world", 2)
    group.described["barrier"][""] = 0
    comm = SimpleNamespace(tracer=tracer, groups=SimpleNamespace(known={1: group}), in_place=None)
    monkeypatch.setattr(live, "tracer", tracer)
    monkeypatch.setattr(current, "comm", comm)

    def plain() -> None:
        recorder.span(0, 3, 1, 2, parent=2)

    def interrupt(here: str) -> None:
        if here == half:
            lane = recorder.local.lane
            slots, *rest = lane.chunk
            lane.chunk = (Interrupting(slots, records, plain), *rest)

    (barrier,) = (call for call in CALLS if call.name == "Barrier")
    plain()
    interrupt("begin")
    shortened(barrier, pytest.fail, lambda _handle: interrupt("end"))(SimpleNamespace(handle=1))
    plain()
    read = read_own(recorder)

    assert len(read.records) + read.lapped == records + 4
    assert [record["parent"] for record in read.records].count(2) >= len(read.records) - 2
    assert [record["seq"] for record in read.records].count(1) == 1

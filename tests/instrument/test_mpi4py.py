"""Programs that use mpi4py: every call is a span, all ranks know it by one id, and nothing else changes."""

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from otel_dltrace.instrument._mpi.calls import CALLS
from otel_dltrace.instrument._mpi.family import Call, Role
from otel_dltrace.model.spans import SpanBatch
from tests.support.mpi import MPIEXEC, RUN, mpiexec, operations, spans_of
from tests.support.paths import PROGRAMS
from tests.support.processes import a_place

pytest.importorskip("mpi4py")


PROGRAM = PROGRAMS / "mpi_calls.py"
NOT_RUN = {"agree", "iagree", "shrink", "ishrink", "accept", "connect", "spawn", "spawn_multiple"}
NOT_RUN |= {"create_from_group", "create_from_groups"}
"""Calls for broken communicators, for other jobs, and for sessions."""


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

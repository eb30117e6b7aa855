"""What calls of mpi4py move: bytes and types of buffers, in bounded memory, however a call is written."""

import ctypes
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from otel_dltrace.instrument._mpi import groups
from otel_dltrace.instrument._mpi.buffers import content_of, name_of
from otel_dltrace.instrument._mpi.calls import CALLS
from otel_dltrace.instrument._mpi.comm import Comm, current
from otel_dltrace.instrument._mpi.groups import NOBODY, Group
from otel_dltrace.instrument._mpi.requests import Part
from otel_dltrace.instrument._mpi.usual import _learned, shortened
from otel_dltrace.record.recorder import Recorder
from otel_dltrace.record.tracer import Tracer, live
from tests.support.mpi import ALLOWED, joined, operations, spans_of
from tests.support.paths import PROGRAMS
from tests.support.processes import Place
from tests.support.ring_files import SMALLEST, Interrupting, read_own

pytest.importorskip("mpi4py")


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
            [sys.executable, str(PROGRAMS / "mpi_usual.py"), str(tmp_path), way],
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

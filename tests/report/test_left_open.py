"""Where ranks stand still, or stood when they were cut off: who was in which operation, and who never came to it."""

import os
import signal
import sys
from dataclasses import replace

import pytest

from otel_dltrace.analysis.stops.left_open import Elsewhere, LeftOpen, Standing, left_open
from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import P2P, Flag, Level
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.report.left_open import left_open as in_words
from tests.support import servers
from tests.support.runs import MS, Rank

CUT = int(Flag.TRUNCATED)
NOW = int(Flag.TRUNCATED | Flag.OPEN)
HANG = """
    import os, pathlib, sys, time
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), pathlib.Path(sys.argv[1])
    ddp = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        ddp(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        stands = step == 3 and rank == 0
        if step == 3 and rank == 1:
            (folder / "pid.1").write_text(str(os.getpid()))
            time.sleep(600)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        if step == 3:
            (folder / "pid.0").write_text(str(os.getpid()))
        work.wait()
"""


def two_steps(rank: int, world_size: int = 3) -> Rank:
    """Return a rank that has done a step, and an all-reduce in it, and was cut off in the next."""
    done = Rank(rank, world_size).step(0, 0, 10).stage(0, "forward", 1, 4).collective(0, 5, 6, seq=7)
    return done.step(1, 10, 20, flags=CUT).stage(1, "forward", 11, 12)


def test_who_ended_by_itself_left_nothing_open():
    """No sentence, whatever was done last."""
    assert left_open([Rank(r, 2).step(0, 0, 10).collective(0, 5, 6, seq=7).batch() for r in range(2)]) == LeftOpen()


def test_nobody_stands_in_a_step_that_is_passed():
    """Where the ring overwrote the end of a step, and of what was in it, its process has gone on."""
    passed = two_steps(0, 1).collective(1, 13, 20, seq=0, flags=CUT).step(2, 20, 30)
    assert left_open([passed.batch()]) == LeftOpen()


def absent() -> list[SpanBatch]:
    """Return a run in which ranks 0 and 2 are in an all-reduce, and rank 1 never came."""
    standing = [two_steps(rank).collective(1, 13, 20, seq=0, flags=CUT) for rank in (0, 2)]
    return [rank.batch() for rank in (standing[0], two_steps(1).stage(1, "backward", 12, 14), standing[1])]


def test_who_never_came_is_named():
    """The number of what is open follows from what each rank had ended."""
    found = left_open(absent())

    assert found == LeftOpen(
        (Standing("all_reduce", "gloo", "0", "", 8, -1, (0, 2), (1,), ()),), (Elsewhere(1, "backward", (1,)),)
    )
    assert in_words(found) == [
        "When cut off, ranks 0, 2 were in all_reduce (number 8, of gloo 0); rank 1 had not come to it.",
        "When cut off, rank 1 was in step 1; what ended last was backward.",
    ]


def test_who_has_gone_through_is_not_waited_for():
    """A rank that has ended it, and by itself, is told as such."""
    through = Rank(1, 2).step(0, 0, 10).collective(0, 5, 6, seq=7).collective(0, 7, 8, seq=8)
    found = left_open([two_steps(0, 2).collective(1, 13, 20, seq=0, flags=CUT).batch(), through.batch()])

    assert found == LeftOpen((Standing("all_reduce", "gloo", "0", "", 8, -1, (0,), (), (1,)),))
    assert in_words(found) == ["When cut off, rank 0 was in all_reduce (number 8, of gloo 0); rank 1 had ended it."]


def test_who_is_not_of_the_group_is_not_waited_for():
    """Rank 1 is of the pair, in which it has done something; rank 2 has not."""
    pair = {"group": "1", "group_size": 2}
    ranks = [two_steps(rank) for rank in range(3)]
    for rank in ranks[:2]:
        rank.collective(0, 7, 8, 1, **pair)
    ranks[0].collective(1, 13, 20, 0, flags=CUT, **pair)

    assert in_words(left_open([rank.batch() for rank in ranks])) == [
        "When cut off, rank 0 was in all_reduce (number 2, of gloo 1); rank 1 had not come to it.",
        "When cut off, ranks 1-2 were in step 1; what ended last was forward.",
    ]


def test_who_failed_in_it_had_come_to_it():
    """As where the one that never came takes it along; what failed has no number."""
    standing = two_steps(0).collective(1, 13, 20, seq=0, flags=CUT)
    victim = two_steps(2).collective(1, 13, 15, seq=0, flags=int(Flag.ERROR))
    (found,) = left_open([rank.batch() for rank in (standing, two_steps(1), victim)]).standing

    assert (found.ranks, found.absent, found.past) == ((0,), (1,), (2,))


def test_ranks_that_stand_in_different_operations_are_seen():
    """The same number of one group, and not the same operation: each waits for the other for ever."""
    found = left_open(
        [
            two_steps(0, 2).collective(1, 13, 20, seq=0, flags=CUT).batch(),
            two_steps(1, 2).collective(1, 13, 20, seq=0, name="barrier", flags=CUT).batch(),
        ]
    )
    assert in_words(found) == [
        "When cut off, rank 0 was in all_reduce (number 8, of gloo 0).",
        "When cut off, rank 1 was in barrier (number 8, of gloo 0).",
    ]


def test_a_message_names_its_other_side_and_the_innermost_counts():
    """Of operations within each other the inner one is where the rank stands; sub-groups have their own members."""
    receive = Descriptor(P2P, "recv", group="0", backend="gloo")
    inner = two_steps(0, 2).collective(1, 13, 20, seq=0, name="all_gather_object", flags=CUT)
    inner.collective(1, 14, 20, seq=0, name="all_gather", flags=CUT, parent_no=len(inner.rows))
    receiver = two_steps(1, 2).add(receive, 1, 13, 20, a=0, b=5, flags=CUT, level=Level.COLLECTIVE)

    assert in_words(left_open([inner.batch(), receiver.batch()])) == [
        "When cut off, rank 1 was in recv with rank 0 (of gloo 0).",
        "When cut off, rank 0 was in all_gather (number 8, of gloo 0); rank 1 had not come to it.",
    ]


def test_what_the_program_does_not_number_has_no_number():
    """Operations of its own are open on a rank, and say nothing of others."""
    own = [two_steps(0, 2).collective(1, 1, 2, 0, "push", backend="", group="", tensor="a") for _ in range(1)]
    own[0].collective(1, 13, 20, 0, "push", backend="", group="", tensor="a", flags=CUT)

    assert in_words(left_open([own[0].batch(), two_steps(1, 2).batch()])) == [
        "When cut off, rank 0 was in push a.",
        "When cut off, rank 1 was in step 1; what ended last was forward.",
    ]


def of_horovod(rank: int, tensor: str, joins: bool, done: int) -> SpanBatch:
    """Return a rank that has ended operation *done* on *tensor* (and a join, if it *joins*), and is in another one."""
    horovod = {"backend": "horovod", "tensor": tensor}
    one = Rank(rank, 2).step(0, 0, 20, flags=CUT).collective(0, 1, 2, done, "allreduce", **horovod)
    if joins:
        one.collective(0, 3, 4, 1, "join", backend="horovod", tensor="")
    return one.collective(0, 5, 20, 0, "allreduce", flags=CUT, **horovod).batch()


@pytest.mark.parametrize(
    ("tensor", "joins"), [pytest.param("u", True, id="join"), pytest.param("allreduce.noname.N", False, id="unnamed")]
)
def test_what_horovod_numbers_otherwise_has_no_number(tensor, joins):
    """Behind a join, and of unnamed tensors, the next number is not the last one plus one."""
    elsewhere = Rank(2, 3).collective(0, 1, 2, 4, "allreduce", backend="horovod", tensor=tensor)
    standing = [of_horovod(r, tensor, joins, done=r + 2) for r in range(2)]
    assert in_words(left_open([*standing, elsewhere.step(0, 0, 20, flags=CUT).batch()])) == [
        f"When cut off, ranks 0-1 were in allreduce {tensor} (of horovod 0).",
        "When cut off, rank 2 was in step 0; what ended last was allreduce.",
    ]


def test_what_horovod_numbers_by_its_name_has_the_next_number():
    """Ranks that have not joined count alike."""
    assert in_words(left_open([of_horovod(r, "u", joins=False, done=2) for r in range(2)])) == [
        "When cut off, ranks 0-1 were in allreduce u (number 3, of horovod 0)."
    ]


def test_what_nobody_waited_for_comes_last():
    """An asynchronous operation may be over: the rank stands elsewhere."""
    ranks = [two_steps(rank, 2).collective(1, 14, 20, 9, name="barrier", flags=CUT) for rank in range(2)]
    ranks[0].collective(1, 12, 20, 8, flags=CUT | int(Flag.ASYNC))

    assert in_words(left_open([rank.batch() for rank in ranks])) == [
        "When cut off, ranks 0-1 were in barrier (number 9, of gloo 0).",
        "When cut off, rank 0 had all_reduce (number 8, of gloo 0) under way.",
    ]


def test_what_is_under_way_at_the_same_ranks_is_one_sentence():
    """A killed worker of a parameter server has a push_pull of each tensor under way; what others came to is apart."""
    at = {"name": "push_pull", "backend": "pushpull", "group": ""}
    ranks = [two_steps(rank, 2) for rank in range(2)]
    for i in range(5):
        ranks[1].collective(1, 12 + i, 20, 9, tensor=f"layer{i}", flags=CUT | int(Flag.ASYNC), **at)
    ranks[0].collective(1, 13, 14, 9, tensor="layer3", **at)

    assert in_words(left_open([rank.batch() for rank in ranks]))[:2] == [
        "When cut off, rank 1 had push_pull layer0 (number 9, of pushpull) and 3 more under way; rank 0 had not come to"
        " them.",
        "When cut off, rank 1 had push_pull layer3 (number 9, of pushpull) under way; rank 0 had ended it.",
    ]


def test_places_that_are_left_out_are_counted():
    """One is one place."""
    ranks = [two_steps(rank, 8).stage(1, f"stage{rank}", 12, 13) for rank in range(8)]
    said = [in_words(left_open([rank.batch() for rank in ranks[:number]]))[6:] for number in (7, 8)]

    left = "left open: --json has all."
    assert said == [[f"1 more place was {left}"], [f"2 more places were {left}"]]


def test_who_has_an_earlier_one_under_way_has_not_come_to_the_next():
    """An asynchronous operation that is open says nothing of where its rank is: that is told by its step."""
    ranks = [two_steps(rank, 2).collective(1, 12, 20, 0, flags=CUT | int(Flag.ASYNC)) for rank in range(2)]
    ranks[1].collective(1, 14, 20, 0, flags=CUT)

    assert in_words(left_open([rank.batch() for rank in ranks])) == [
        "When cut off, rank 1 was in all_reduce (number 9, of gloo 0); rank 0 had not come to it.",
        "When cut off, ranks 0-1 had all_reduce (number 8, of gloo 0) under way.",
        "When cut off, rank 0 was in step 1; what ended last was forward.",
    ]


def test_an_operation_that_has_just_begun_is_not_stood_in():
    """A step of half a minute with many operations in it has one open whenever its drain looks."""
    busy = in_a_collective(95_000)
    busy[0].rows["start"][-1] = busy[0].rows["end"][-1] - 5 * MS

    assert in_words(left_open(busy)) == ["Rank 1 has been in step 1 for 95 s; what ended last was forward."]


def test_many_places_are_told_in_part():
    """A report is no list of all ranks."""
    assert in_words(LeftOpen((), tuple(Elsewhere(n, "", (n,)) for n in range(9))))[5:] == [
        "When cut off, rank 5 was in step 5.",
        "3 more places were left open: --json has all.",
    ]


def in_a_collective(lasts: float) -> list[SpanBatch]:
    """Return a run whose ranks live, and of which rank 0 has been in an all-reduce for *lasts* ms; steps take 10 ms."""
    one, other = two_steps(0, 2), two_steps(1, 2)
    for rank in (one, other):
        rank.rows[-2] |= {"end": rank.rows[-2]["start"] + round(lasts * MS), "flags": NOW}
    one.collective(1, 10, 10 + lasts, seq=0, flags=NOW)
    return [one.batch(), other.batch()]


def test_ranks_that_live_and_stand_still_are_told_in_the_present():
    """With how long it has been so, which says that it is no longer usual."""
    assert in_words(left_open(in_a_collective(95_000))) == [
        "Rank 0 has been in all_reduce (number 8, of gloo 0) for 95 s; rank 1 has not come to it.",
        "Rank 1 has been in step 1 for 95 s; what ended last was forward.",
    ]


def test_what_is_open_no_longer_than_two_steps_is_what_ranks_are_at():
    """A job whose steps take half a minute has some open whenever one looks, and so has one that is awaited.

    What is asynchronous may be open for any time: who waits for it is in a step.
    """
    assert left_open(in_a_collective(20)) == LeftOpen()
    asynchronous = two_steps(0, 2).collective(1, -95_000, 20, 0, flags=NOW | int(Flag.ASYNC))
    asynchronous.rows[-3]["flags"] = NOW
    assert left_open([asynchronous.batch()]) == LeftOpen()


def test_who_is_in_no_step_while_others_wait_is_told():
    """It lives for all that is known: nothing says that it was cut off."""
    through = Rank(1, 2).step(0, 0, 10).collective(0, 5, 6, seq=7).batch()

    assert in_words(left_open([in_a_collective(95_000)[0], through]))[1:] == [
        "Rank 1 is in no step now; what ended last was all_reduce."
    ]


def test_a_hang_is_told_while_it_lasts_and_when_it_is_killed(place):
    """Two real ranks, one of which never comes to an all-reduce: the report says who, and to what."""
    pytest.importorskip("torch")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = [str(place.write(HANG)), str(place.folder)]
    place.popen([*launcher, *program], OTEL_DLTRACE="1", OMP_NUM_THREADS="1", OTEL_BSP_SCHEDULE_DELAY="500")
    pids = [place.folder / f"pid.{rank}" for rank in range(2)]
    servers.wait_until(lambda: all(pid.exists() and pid.read_text() for pid in pids), what="the hang")

    def found() -> LeftOpen:
        return left_open([batch for run in place.folder.glob("dltrace-*/") for batch in read_run(run)])

    servers.wait_until(lambda: len(found().elsewhere) == len(found().standing) == 1, what="that it lasts")
    now = found()
    assert now.standing[0].lasts > 10**10 < now.elsewhere[0].lasts
    for pid in pids:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    place.wait_for_rings()

    for told in (now, found()):
        (standing,), (elsewhere,) = told.standing, told.elsewhere
        assert (standing.operation, standing.ranks, standing.absent) == ("all_reduce", (0,), (1,))
        assert replace(elsewhere, lasts=None) == Elsewhere(3, "optimizer", (0, 1))
    assert (standing.lasts, elsewhere.lasts) == (None, None)

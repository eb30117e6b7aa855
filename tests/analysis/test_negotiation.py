"""The report by negotiation: its share, who was ready last, what computation hides; real files and planted times."""

import dataclasses
import io
import json

import numpy as np
import pytest
from rich.console import Console

from otel_dltrace.analysis.intervals import union, unions
from otel_dltrace.analysis.negotiation.coordinator import Negotiations, negotiations
from otel_dltrace.analysis.negotiation.hidden import UNBLOCKED, Overlap
from otel_dltrace.analysis.negotiation.phases import Activity, library_of
from otel_dltrace.analysis.negotiation.shares import FIRST_EPOCH, FIRST_STEP, Numbered, Share
from otel_dltrace.analysis.negotiation.tensors import ReadyRank, TensorNegotiation
from otel_dltrace.analysis.select import select
from otel_dltrace.analysis.spread import Spread
from otel_dltrace.cli.main import main
from otel_dltrace.model import semconv as s
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.plan import Window
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.model.time import Anchor
from otel_dltrace.report.negotiation import sentences, write_negotiations
from tests.support.horovod_files import truth, unpack
from tests.support.processes import a_place
from tests.support.runs import MS, Rank

STEPS, TENSORS = 10, ("allreduce.a", "allreduce.b")


def negotiated(late: float = 20.0, cached: int = 0, stages: bool = True) -> SpanBatch:
    """Return rank 0 of three: in each step of 100 ms two fused tensors are negotiated for 5 ms + *late*, reduced in 30.

    Rank 2 is ready *late* ms after rank 1; the last *cached* steps have no ticks. In the first step the
    negotiation begins 8 ms earlier.
    """
    rank = Rank(0, 3)
    for step in range(STEPS):
        begin, first = step * 100.0, step * 100.0 + (2 if step == 0 else 10)
        ready = begin + 15 + late
        rank.step(step, begin, begin + 100)
        if stages:
            rank.stage(step, "forward", begin, begin + 10).stage(step, "backward", begin + 10, ready + 20)
            rank.stage(step, "dataloader_next", ready + 20, ready + 40)
        for tensor in TENSORS:
            number = len(rank.rows) + 1
            _bar(rank, tensor, "NEGOTIATE_ALLREDUCE", step, first, ready)
            ticks = {0: first, 1: begin + 15, 2: ready} if step < STEPS - cached else {}
            for who, at in ticks.items():
                tick = Descriptor(s.TICK, "ready", backend="horovod", tensor=tensor)
                rank.add(tick, step, at, at, a=who, parent_no=number)
            _bar(rank, tensor, "ALLREDUCE", step, ready, ready + 30)
            _bar(rank, tensor, "MPI_ALLREDUCE", step, ready + 5, ready + 25)
    return rank.batch()


def _bar(rank: Rank, tensor: str, name: str, step: int, start: float, end: float) -> None:
    rank.add(Descriptor(s.PHASE, name, backend="horovod", tensor=tensor, activity=name), step, start, end)


FIRST, STEADY = (Share(1, 100 * MS, wait * MS, 30 * MS, (wait + 30) * MS) for wait in (33, 25))


def each(ms: float, count: int) -> Spread:
    ns = round(ms * MS)
    return Spread(count, count * ns, ns, ns, ns, ns)


def test_planted_times_are_found():
    """The share in the first step and the others, the rank planted late, tensors, activities, what is hidden."""
    found = negotiations([negotiated()])
    first = TensorNegotiation(
        "allreduce.a", "allreduce", Spread(10, 258 * MS, 25_800_000, 25 * MS, 29_400_000, 33 * MS), each(30, 10), 10, 2,
        10, 20 * MS,
    )  # fmt: skip

    assert found == Negotiations(
        whole=Share(10, 1000 * MS, 258 * MS, 300 * MS, 558 * MS),
        first=Share(1, 100 * MS, 33 * MS, 30 * MS, 63 * MS),
        others=Share(9, 900 * MS, 225 * MS, 270 * MS, 495 * MS),
        per_step=first.negotiation,
        overlap=Overlap(300 * MS, 550 * MS, 200 * MS),
        ticked=20,
        silent=0,
        ranks=(
            ReadyRank(0, 20, 0, Spread()),
            ReadyRank(1, 20, 0, Spread()),
            ReadyRank(2, 20, 20, each(20, 20)),
        ),
        tensors=(first, TensorNegotiation("allreduce.b", *list(_fields(first))[1:])),
        activities=(Activity("MPI_ALLREDUCE", each(20, 20), 200 * MS, "MPI"),),
        apart=FIRST_STEP,
        steps=tuple(Numbered(step, STEADY if step else FIRST) for step in range(STEPS)),
        libraries=(Activity("MPI", each(20, 20), 200 * MS, "MPI"),),
    )


def _fields(value):
    return (getattr(value, name) for name in value.__dataclass_fields__)


def test_the_first_epoch_is_told_apart_where_it_is_known():
    """And each epoch by itself, as the program told them."""
    batch = negotiated()
    own = batch.is_rank_step
    batch.rows["b"][own] = batch.rows["step"][own] // 5
    found = negotiations([batch])
    first, second = Share(5, 500 * MS, 133 * MS, 150 * MS, 283 * MS), Share(5, 500 * MS, 125 * MS, 150 * MS, 275 * MS)

    assert (found.apart, found.first, found.others) == (FIRST_EPOCH, first, second)
    assert found.epochs == (Numbered(0, first), Numbered(1, second))
    assert "Negotiation, by epoch (mean of its steps)" in text(found)
    assert "later epochs" in text(found)


@pytest.mark.parametrize(
    ("length", "part", "apart", "first"),
    [
        pytest.param(5, "2-9", FIRST_EPOCH, 3, id="what is there of the first epoch"),
        pytest.param(2, "4-9", FIRST_EPOCH, None, id="later epochs"),
        pytest.param(10, "4-9", FIRST_STEP, None, id="later steps"),
    ],
)
def test_a_part_of_a_run_that_begins_later_has_no_first(length, part, apart, first):
    """Its own first epoch or step is not the run's, which begins slowly; all of it is told."""
    batch = negotiated()
    own = batch.is_rank_step
    batch.rows["b"][own] = batch.rows["step"][own] // length
    found = negotiations(select([batch], Window.parse(part)))

    steps = [share and share.steps for share in (found.first, found.others)]
    assert (found.apart, steps) == (apart, [first, found.whole.steps - (first or 0)])
    assert ("the first" in text(found)) == (first is not None)
    assert "Negotiation, by step (mean)" in text(found)


@pytest.mark.parametrize(
    ("length", "apart"), [pytest.param(2, FIRST_EPOCH, id="epochs"), pytest.param(10, FIRST_STEP, id="steps")]
)
def test_a_timeline_that_begins_later_has_no_first(length, apart):
    """`hvd.start_timeline` in step 4: the steps before it were the run's first ones."""
    batch = negotiated()
    own = batch.is_rank_step
    batch.rows["b"][own] = batch.rows["step"][own] // length
    found = negotiations([batch.take(own | (batch["step"] >= 4))])

    assert (found.apart, found.first, found.others) == (apart, None, found.whole)
    assert "the first" not in text(found)


def solved(with_steps: bool = True) -> list[SpanBatch]:
    """Return two ranks of MPI: in each step of 100 ms an allreduce for which rank 0 waits 20 of its 30 ms.

    Then an iallreduce is under way for 40 ms, and waited for in the last 10 of them.
    """
    out = []
    for number in range(2):
        rank = Rank(number, 2)
        rank.collective(NO_STEP, 0, 5, 0, "init", backend="mpi", group="world")
        for step in range(4):
            which, begin, late = (step if with_steps else NO_STEP), 100 + step * 100.0, 20 * number
            if with_steps:
                rank.step(step, begin, begin + 100)
            ends = {"backend": "mpi", "group": "world", "source": s.Source.HOST_DONE}
            rank.collective(which, begin + 10 + late, begin + 40, 2 * step + 1, "allreduce", **ends)
            rank.collective(which, begin + 50, begin + 90, 2 * step + 2, "iallreduce", flags=s.Flag.ASYNC, **ends)
            rank.wait(which, begin + 80, begin + 90)
        out.append(rank.batch())
    return out


def test_ranks_of_mpi_negotiate_by_waiting():
    """The share of waiting, who is last and by how much, what is hidden behind nonblocking operations."""
    found = negotiations(solved())
    step = Share(2, 200 * MS, 20 * MS, 100 * MS, 120 * MS)
    reduced = Spread(8, 160 * MS, 20 * MS, 20 * MS, 30 * MS, 30 * MS)

    assert found == Negotiations(
        whole=Share(8, 800 * MS, 80 * MS, 400 * MS, 480 * MS),
        first=step,
        others=Share(6, 600 * MS, 60 * MS, 300 * MS, 360 * MS),
        per_step=Spread(8, 80 * MS, 10 * MS, 10 * MS, 20 * MS, 20 * MS),
        overlap=Overlap(480 * MS, 500 * MS, 240 * MS, UNBLOCKED),
        ticked=8,
        silent=0,
        ranks=(ReadyRank(0, 8, 0, Spread()), ReadyRank(1, 8, 4, each(20, 4))),
        tensors=(
            TensorNegotiation("allreduce world", "allreduce", each(20, 4), reduced, 4, 1, 4, 20 * MS),
            TensorNegotiation("iallreduce world", "iallreduce", each(0, 4), each(40, 8), 4, 0, 0, 0),
        ),
        activities=(
            Activity("iallreduce", each(40, 8), 320 * MS, "MPI"),
            Activity("allreduce", reduced, 160 * MS, "MPI"),
        ),
        called=True,
        coordinated=False,
        backend="mpi",
        apart=FIRST_STEP,
        steps=tuple(Numbered(number, step) for number in range(4)),
        libraries=(Activity("MPI", Spread(16, 480 * MS, 30 * MS, 35 * MS, 40 * MS, 40 * MS), 480 * MS, "MPI"),),
    )


def test_without_steps_the_share_is_that_of_all():
    """A program of MPI need not have any: nothing is told apart."""
    found = negotiations(solved(with_steps=False))

    assert found.whole == Share(0, 480 * MS, 80 * MS, 400 * MS, 480 * MS)
    assert (found.first, found.others, found.steps, found.epochs) == (None, None, (), ())
    assert "Negotiation takes 17% of the time in which the ranks communicate: 80.0 of 480.0 ms." in text(found)


SOLVER = """
import time
from mpi4py import MPI
import otel_dltrace
world = MPI.COMM_WORLD
for number in range(10):
    with otel_dltrace.step():
        time.sleep(0.05 * world.rank)
        world.allreduce(number)
"""


def test_a_real_straggler_of_mpi_is_named(tmp_path):
    """Rank 1 sleeps before each of ten collectives of a program that has no line for tracing but its steps."""
    pytest.importorskip("mpi4py")
    from tests.support.mpi import MPIEXEC, mpiexec

    if MPIEXEC is None:
        pytest.skip("there is no mpiexec")
    with a_place(tmp_path) as place:
        mpiexec(place, 2, [str(place.write(SOLVER))], traced=True)
        (run,) = place.folder.glob("dltrace-*")
        found = json.loads(place.command("report", str(run), "--by", "negotiation", "--json").stdout)
        said = place.command("report", str(run), "--by", "negotiation").stdout
    rank0, rank1 = found["ranks"]

    assert (found["backend"], found["ticked"], rank1["negotiations"], found["whole"]["steps"]) == ("mpi", 10, 10, 20)
    assert rank1["times"] > rank0["times"]
    assert [one["name"] for one in found["libraries"]] == ["MPI"]
    assert "Rank 1 is ready last most often: " in said


def trained(waits: bool = True) -> list[SpanBatch]:
    """Return two ranks of Horovod without its timeline: gradients are reduced in 60 ms of a step, waited for in 30.

    Rank 1 is ready 20 ms late; the wait is in the optimizer's step, as in that of `DistributedOptimizer`.
    """
    out = []
    for number in range(2):
        rank = Rank(number, 2)
        ours = {"backend": "horovod", "group": "0", "source": s.Source.HOST_DONE, "flags": s.Flag.ASYNC}
        rank.collective(NO_STEP, 0, 90, 1, "broadcast", tensor="broadcast.w", **ours)
        for step in range(4):
            begin = 100 + step * 100.0
            rank.step(step, begin, begin + 100)
            rank.stage(step, "backward", begin, begin + 50).stage(step, "optimizer", begin + 50, begin + 90)
            ready = begin + 20 + 20 * number
            rank.collective(step, ready, begin + 80, step + 1, "allreduce", tensor="allreduce.w", **ours)
            if waits:
                rank.wait(step, begin + 50, begin + 80)
        out.append(rank.batch())
    return out


def test_ranks_of_horovod_tell_without_its_timeline():
    """They negotiate until the last of them has called; what waits in a stage computes nothing meanwhile."""
    found = negotiations(trained())
    step = Share(2, 200 * MS, 20 * MS, 80 * MS, 100 * MS)

    assert found == Negotiations(
        whole=Share(8, 800 * MS, 80 * MS, 320 * MS, 400 * MS),
        first=step,
        others=Share(6, 600 * MS, 60 * MS, 240 * MS, 300 * MS),
        per_step=Spread(8, 80 * MS, 10 * MS, 10 * MS, 20 * MS, 20 * MS),
        overlap=Overlap(400 * MS, 480 * MS, 160 * MS),
        ticked=5,
        silent=0,
        ranks=(ReadyRank(0, 5, 0, Spread()), ReadyRank(1, 5, 4, each(20, 4))),
        tensors=(
            TensorNegotiation(
                "allreduce.w", "allreduce", each(20, 4), Spread(8, 400 * MS, 50 * MS, 50 * MS, 60 * MS, 60 * MS), 4, 1,
                4, 20 * MS,
            ),
            TensorNegotiation("broadcast.w", "broadcast", each(0, 1), each(90, 2), 1, 0, 0, 0),
        ),
        activities=(),
        called=True,
        coordinated=False,
        apart=FIRST_STEP,
        steps=tuple(Numbered(number, step) for number in range(4)),
    )  # fmt: skip
    assert "the ranks communicate" in text(found)
    said = " ".join(text(found).split())
    assert (
        "which this run does not have: HOROVOD_TIMELINE=timeline.json has rank 0 write it, and level phase reads it"
        in said
    )


def test_ranks_of_horovod_tell_of_the_steps_that_its_timeline_has_not():
    """It is switched on for some steps, or in a generation before: the process knows its bars' names ever after."""
    batches = trained()
    bar = Descriptor(s.PHASE, "NEGOTIATE_ALLREDUCE", backend="horovod", activity="NEGOTIATE_ALLREDUCE")
    elsewhere = dataclasses.replace(batches[0], descriptors=[*batches[0].descriptors, bar])

    assert negotiations([elsewhere, batches[1]]) == negotiations(batches)


def test_a_barrier_is_an_operation_and_a_join_is_none():
    """A rank joins once it has no more to do: the others are not kept waiting by that."""
    ours = {"backend": "horovod", "group": "0", "source": s.Source.HOST_DONE}
    ranks = [Rank(number, 2) for number in range(2)]
    for late, rank in zip((0, 7), ranks, strict=True):
        rank.collective(NO_STEP, late, 10, 1, "barrier", tensor="barrier.noname", **ours)
        rank.collective(NO_STEP, 20 + late, 90, 1, "join", tensor="join.noname", **ours)

    (told,) = negotiations([rank.batch() for rank in ranks]).tensors
    assert (told.tensor, told.negotiation) == ("barrier.noname", each(7, 1))


def test_operations_are_counted_not_the_ranks_calls():
    """Four operations on two ranks are four, as many as say who was last."""
    said = text(negotiations(trained()))
    (row,) = [line.split() for line in said.splitlines() if line.startswith("allreduce.w")]

    assert (row[2], row[row.index("rank") :]) == ("4", ["rank", "1:", "4", "of", "4,", "20.0", "ms"])


def test_one_rank_alone_does_not_tell_who_was_last():
    """As with --rank: its calls are there, those of the others are not, and that is what is said."""
    why = "it takes a collective with all its ranks here (messages do not tell, --rank leaves some out)."
    assert f"Who was ready last cannot be told: {why}" in " ".join(text(negotiations(trained()[1:])).split())


def test_without_waits_nothing_is_said_of_overlap():
    """At level collective nobody knows when the rank was blocked; to be in a stage is not taken for computing."""
    found = negotiations(trained(waits=False))

    assert (found.overlap, found.whole.negotiation) == (None, 80 * MS)
    assert "cannot be told" in text(found)


def test_messages_alone_are_told_as_well():
    """Nobody is last to one; what is hidden, and what the ranks do, is known."""
    sent = Descriptor(s.P2P, "send", backend="mpi", group="world")
    found = negotiations([Rank(0, 2).step(0, 0, 10).add(sent, 0, 1, 5).batch()])

    assert (found.whole, found.ranks, found.tensors) == (None, (), ())
    assert found.overlap == Overlap(4 * MS, 0, 0, UNBLOCKED)
    assert found.activities == (Activity("send", each(4, 1), 4 * MS, "MPI"),)
    assert "HOROVOD" not in text(found)


@pytest.mark.parametrize(
    ("activity", "library"),
    [
        ("MPI_ALLREDUCE", "MPI"),
        ("GLOO_BCAST", "Gloo"),
        ("NCCL_ALLGATHER", "NCCL"),
        ("INIT_NCCL", "NCCL"),
        ("CCL_ALLTOALL", "oneCCL"),
        ("MEMCPY_IN_FUSION_BUFFER", "copies"),
        ("INIT_FUSION_BUFFER", "copies"),
        ("ALLOCATE_OUTPUT", "copies"),
        ("WAIT_FOR_OTHER_TENSOR_DATA", "waiting"),
        ("QUEUE", "waiting"),
        ("SOMETHING_NEW", "other"),
    ],
)
def test_each_activity_has_its_library(activity, library):
    """By its name in Horovod's timeline."""
    assert library_of(activity) == library


def test_negotiations_without_ticks_are_counted_apart():
    """Horovod's cache says nothing of who was ready when; what was ticked is not mixed with it."""
    found = negotiations([negotiated(cached=4)])

    assert (found.ticked, found.silent) == (12, 8)
    assert found.ranks[2] == ReadyRank(2, 12, 12, each(20, 12))
    assert negotiations([negotiated(cached=STEPS)]).ranks == ()


def joined(spurious: bool) -> SpanBatch:
    """Return a run of cached operations, behind each of which Horovod marks one that was none, if *spurious*."""
    rank = Rank(0, 2)
    for step in range(3):
        at = step * 10.0
        rank.step(step, at, at + 10)
        _bar(rank, "allreduce.a", "NEGOTIATE_ALLREDUCE", step, at, at + 2)
        _bar(rank, "allreduce.a", "ALLREDUCE", step, at + 2, at + 5)
        if spurious:
            _bar(rank, "allreduce.a", "NEGOTIATE_ALLREDUCE", step, at + 6, at + 7)
    return rank.batch()


def test_what_horovod_marks_while_a_rank_has_joined_is_no_negotiation():
    """Of tensors in its cache, without ticks and without an operation."""
    found = negotiations([joined(spurious=True)])
    assert found == negotiations([joined(spurious=False)])
    assert found.tensors[0].negotiation == each(2, 3)


def test_without_computation_nothing_is_said_of_overlap():
    """A timeline of Horovod has none; it is not taken for 0 %."""
    assert negotiations([negotiated(stages=False)]).overlap is None
    assert "cannot be told" in text(negotiations([negotiated(stages=False)]))


@pytest.mark.parametrize(
    ("extents", "length"),
    [
        pytest.param([], 0, id="none"),
        pytest.param([(0, 5), (5, 9)], 9, id="touching"),
        pytest.param([(7, 9), (0, 5), (1, 3)], 7, id="nested"),
        pytest.param([(0, 4), (2, 6), (10, 10)], 6, id="overlapping"),
    ],
)
def test_what_extents_cover_together(extents, length):
    """Each moment counts once."""
    start, end = np.array(extents, np.int64).reshape(-1, 2).T

    assert union(start, end) == length


def test_groups_are_covered_apart():
    """What overlaps in time counts for each group, and one without extents has none."""
    group, start, end = np.array([2, 0, 2, 0]), np.array([5, 100, 0, 90]), np.array([9, 110, 6, 105])

    assert unions(group, start, end, 3).tolist() == [20, 0, 9]


def text(found: Negotiations) -> str:
    console = Console(file=io.StringIO(), width=120)
    write_negotiations(found, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_report_says_it_in_words():
    """The share, who is ready last and by how much, and what computation hides."""
    assert text(negotiations([negotiated()])).splitlines()[:3] == [
        "Negotiation takes 46% of the time in which Horovod communicates: 258.0 of 558.0 ms.",
        "Rank 2 is ready last most often: in 20 of 20 negotiations, by 20.0 ms (p50).",
        "Computation hides 67% of the operations' time: forward, backward or optimizer ran in 200.0 of 300.0 ms.",
    ]
    assert "overlap: of the time in which an operation runs, the part in which its rank computes too" in text(
        negotiations([negotiated()])
    )
    assert text(negotiations([])).startswith("This run has no operation of Horovod or MPI that ranks share")


def test_who_is_seldom_last_but_by_far_is_named_first():
    """A rank that is late to every gradient is not hidden behind one that is last, by little, to more of the rest."""
    ranks = (ReadyRank(0, 20, 13, each(0.2, 13)), ReadyRank(1, 20, 7, each(20, 7)), ReadyRank(2, 20, 0, Spread()))
    found = dataclasses.replace(negotiations([negotiated()]), ranks=ranks)
    most_often = "Rank 0 is ready last most often: in 13 of 20 negotiations, by 0.20 ms (p50)."

    assert sentences(found)[1:-1] == [
        "The others wait longest for rank 1: it is ready last in 7 of 20 negotiations, by 20.0 ms on average, 20.0 ms "
        "at most.",
        most_often,
    ]
    in_all = dataclasses.replace(found, ranks=(ranks[0], ReadyRank(1, 20, 7, each(0.7, 7))))
    assert sentences(in_all)[1:-1] == [most_often]


def test_nobody_is_named_where_all_are_ready_at_once():
    """As the microseconds of a timeline may have it."""
    ranks = [Rank(rank, 2).collective(0, 10, 11, 1, name="allreduce", backend="mpi", group="0") for rank in range(2)]
    said = sentences(negotiations([rank.batch() for rank in ranks]))
    why = "in each negotiation several ranks are ready last at the same time"
    assert f"Who was ready last cannot be told: {why}." in said


def test_a_real_straggler_is_named(tmp_path, capsys):
    """Rank 1 slept before each of 20 steps: it is last in all 252 negotiations, by about as long as it slept."""
    run = tmp_path / "RUN"
    name = "horovod_mpi_np2_straggler_nocache"
    assert main(["import", "horovod", str(unpack(name, tmp_path)), "-o", str(run)]) == 0
    capsys.readouterr()
    assert main(["report", str(run), "--by", "negotiation", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    slept = np.median([end - begin for _, begin, end in truth(name, 1)["sleeps"]]) * 1000
    rank0, rank1 = found["ranks"]

    assert (rank0["rank"], rank0["times"], rank1["rank"], rank1["times"], rank1["negotiations"]) == (0, 0, 1, 252, 252)
    assert (found["ticked"], found["silent"], found["whole"]["steps"]) == (252, 0, 20)
    assert abs(rank1["late"]["p50"] - slept) < 0.1 * slept


def test_the_command_reports_a_cached_run(tmp_path, capsys):
    """Most negotiations of a plain run do not say who was ready when, and the first step is told apart."""
    run = tmp_path / "RUN"
    assert main(["import", "horovod", str(unpack("horovod_mpi_np2", tmp_path)), "-o", str(run)]) == 0
    capsys.readouterr()
    assert main(["report", str(run), "--by", "negotiation"]) == 0
    said = capsys.readouterr().out

    assert "in 24 of 24 negotiations" in said
    assert "(228 more do not say who was ready when)" in said
    assert "the first " in said
    assert "later ones " in said
    assert "MPI_ALLREDUCE" in said


def test_nobody_is_ready_last_by_clocks_that_are_seen_to_be_wrong():
    """The second host's clock is 3 ms ahead, with collectives of 1 ms: they are off by what one lasts then, or less."""
    batches = [
        Rank(rank, 2, f"node-{rank}", anchor=Anchor(0, 3 * MS * rank, 1000))
        .collective(0, 10, 11, 1, name="allreduce", backend="mpi", group="world")
        .batch()
        for rank in range(2)
    ]
    found = negotiations(batches)
    assert ([rank.times for rank in found.ranks], found.uncertainty) == ([0, 0], 4 * MS)
    assert "Who was ready last cannot be told: the clocks of the hosts do not agree well enough." in sentences(found)

"""Stragglers and waits: who waits within its own stages, for handles, in a pipeline, is not taken for who is slow."""

import numpy as np
import pytest

from otel_dltrace.analysis.blame.judgement import Straggler
from otel_dltrace.analysis.collectives.joined import join
from otel_dltrace.analysis.collectives.lateness import in_a_row
from otel_dltrace.analysis.compose import analyse
from otel_dltrace.analysis.scaling import scaling
from otel_dltrace.analysis.steps.own import columns, own
from otel_dltrace.analysis.steps.table import step_tables
from otel_dltrace.analysis.steps.untold import steps_with_operations
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import P2P, Flag, Level, Source
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.report.words import verdict
from tests.support.runs import MS, Rank, ddp


@pytest.mark.parametrize("backend", ["horovod", "gloo", "mpi"])
def test_without_waits_nobody_knows_where_handles_block_a_rank(backend):
    """They last until they are waited for, be that a moment: level `collective` does not tell."""
    rank = Rank(0, 2).step(0, 0, 20).stage(0, "optimizer", 1, 20)
    handle = {"flags": int(Flag.ASYNC), "level": Level.COLLECTIVE}
    rank.collective(0, 2, 18, 1, "allreduce", backend=backend, tensor="w", **handle)
    without, (with_wait,) = rank.batch(), step_tables([rank.wait(0, 3, 18).batch()])
    blocking = Rank(0, 2).step(0, 0, 20).collective(0, 2, 18, 1, "allreduce", backend=backend, level=Level.COLLECTIVE)

    tables = *step_tables([without]), with_wait, *step_tables([blocking.batch()])
    assert [steps_with_operations(t).tolist() for t in tables] == [[False], [True], [True]]
    of_both = [scaling({"run": [batch]}).runs[0].steady.exposed for batch in (without, rank.batch())]
    assert of_both == [None, 0.75]


@pytest.mark.parametrize(("begun", "is_told"), [(6, True), (2, False)])
def test_ddp_waits_for_what_a_communication_hook_launches(begun, is_told):
    """The backward ends when that is done: only handles from before its buckets may be waited for in silence."""
    handle = {"flags": int(Flag.ASYNC), "level": Level.COLLECTIVE}
    rank = Rank(0, 2).step(0, 0, 20).stage(0, "backward", 1, 18)
    for n, launched in enumerate((5, 12)):
        rank.collective(0, launched, 18, 0, "comm_hook", tensor=f"bucket {n}", source=Source.BOUND, **handle)
        rank.collective(0, launched + 1 if n else begun, 17, n + 1, dtype="float16", **handle)

    assert steps_with_operations(*step_tables([rank.batch()])).tolist() == [is_told]


def test_a_longer_backward_alone_is_no_proof_without_buckets():
    """It may compute or wait; the reason says which level would tell."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            length = 40 + 20 * r
            rank.step(n, length * n, length * (n + 1)).stage(n, "backward", length * n, length * (n + 1))
    found = analyse([rank.batch() for rank in ranks]).stragglers
    assert (found.verdict, found.reason) == (
        "cannot tell",
        "rank 1's backward takes 20.0 ms longer than the others', but without its operations "
        "(OTEL_DLTRACE_LEVEL=collective) waiting cannot be told from computing",
    )


def test_a_longer_optimizer_alone_is_no_proof_without_operations():
    """Horovod's ranks wait in it; nothing tells a rank that computes longer there from one that waits."""
    found = analyse(ddp(3, slow={(1, "optimizer"): 20.0}, buckets=False)).stragglers
    assert (found.verdict, found.found) == ("cannot tell", ())
    assert "without its operations (OTEL_DLTRACE_LEVEL=collective) waiting cannot be told" in found.reason


def waiting_in_the_optimizer(slow: str, messages: bool = False) -> list[SpanBatch]:
    """Return two ranks of Horovod at level step: rank 1 is 20 ms slow in *slow*, rank 0 waits in its optimizer.

    With *messages* they are of MPI, at level collective.
    """
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            begin, late = 100 * n, 20 * r
            backward = begin + 10 + (late if slow in ("residual", "forward") else 0)
            forward = begin + (late if slow == "residual" else 0)
            optimizer = begin + 20 + late
            rank.step(n, begin, begin + 47).stage(n, "forward", forward, backward)
            rank.stage(n, "backward", backward, optimizer).stage(n, "optimizer", optimizer, begin + 47)
            if messages:
                handle = {"flags": Flag.ASYNC, "level": Level.COLLECTIVE}
                rank.add(Descriptor(P2P, "irecv", "world", backend="mpi"), n, optimizer, begin + 45, **handle)
    return [rank.batch() for rank in ranks]


@pytest.mark.parametrize("messages", [False, True])
@pytest.mark.parametrize("stage", ["residual", "forward"])
def test_a_rank_that_waits_in_its_optimizer_is_not_accused(stage, messages):
    """The one whose own time is longer where nobody waits is named, whichever comes first in the step."""
    batches = waiting_in_the_optimizer(stage, messages)
    (found,) = analyse(batches).stragglers.found
    assert (found.rank, found.stage, found.excess) == (1, stage, 20 * MS)
    named = [(slow.slow.rank, slow.slow.stage) for slow in analyse(batches).saturation.stages]
    assert named == [(1, stage)]


def test_who_waits_in_the_optimizer_for_a_backward_cannot_be_told():
    """One rank's backward is longer, the other's optimizer: either may be the wait."""
    found = analyse(waiting_in_the_optimizer("backward")).stragglers
    assert (found.verdict, found.found) == ("cannot tell", ())


def accumulating(numbered: bool, source: Source = Source.BOUND) -> list[SpanBatch]:
    """Return two ranks with four backwards a step, each after 30 ms on rank 1 that no stage covers: rank 0 waits.

    Moving the batches has pieces at both ends of the step, little in all. Where a backward is of two DDP models its
    collectives are not *numbered*.
    """
    ranks = [Rank(r, 2) for r in range(2)]
    bucket = {"tensor": "bucket 0", "source": source, "flags": Flag.ASYNC}
    for n in range(12):
        for r, rank in enumerate(ranks):
            begin = 1000 * n
            rank.step(n, begin, begin + 200, seq=4 * n + 1)
            rank.stage(n, "to_device", begin + 1, begin + 171, total=2, pieces=2)
            rank.stage(n, "forward", begin, begin + 155, total=20, pieces=4)
            for micro in range(4):
                ready, reduced = begin + 50 * micro + (40 if r else 10), begin + 50 * micro + 41
                rank.collective(n, ready, reduced, (4 * n + micro + 1) * numbered, **bucket)
            total = 4 * (6 if r else 36)
            rank.stage(n, "backward", begin + (35 if r else 5), begin + 191, total=total, pieces=4)
    return [rank.batch() for rank in ranks]


@pytest.mark.parametrize("source", [Source.BOUND, Source.HOST_DONE])
@pytest.mark.parametrize("numbered", [True, False])
def test_a_rank_waits_in_every_backward_of_its_step(numbered, source):
    """Not in the last one alone: it was named for waiting, and its backward told as slow."""
    report = analyse(accumulating(numbered, source))
    (found,) = report.stragglers.found
    assert (found.rank, found.stage, found.arrivals) == (1, "residual", 11 * numbered)
    assert [(slow.slow.rank, slow.slow.stage) for slow in report.saturation.stages] == [(1, "residual")]
    waited = {r.rank: r.mean for part in report.timings.stages if part.name == "grad_sync" for r in part.ranks}
    assert waited == {0: 4 * 31 * MS, 1: 4 * MS}


def through_two_models(backwards: int) -> list[SpanBatch]:
    """Return two ranks with a backward through two DDP models, as a GAN's, 30 ms slower on rank 1 in the first.

    Its buckets are done before the second's are launched. Of two *backwards* the first goes through that one alone.
    """
    ranks = [Rank(r, 2) for r in range(2)]
    bucket = {"tensor": "bucket 0", "source": Source.HOST_DONE, "flags": Flag.ASYNC}
    for n in range(12):
        for r, rank in enumerate(ranks):
            begin, slower = 1000 * n, 30 * r
            rank.step(n, begin, begin + 200)
            if backwards > 1:
                rank.collective(n, begin + 4, begin + 5, 3 * n + 3, **bucket)
            rank.collective(n, begin + 10 + slower, begin + 41, 3 * n + 1, **bucket)
            rank.collective(n, begin + 60 + slower, begin + 91, 3 * n + 2, **bucket)
            rank.stage(n, "backward", begin, begin + 92, pieces=backwards)
    return [rank.batch() for rank in ranks]


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_backward_through_two_models_waits_once(backwards):
    """While it goes on to the second it computes: that was told as waiting, and rank 1 as 60 ms slower."""
    (found,) = analyse(through_two_models(backwards)).stragglers.found
    assert (found.rank, found.stage, found.excess) == (1, "backward", 30 * MS)


def test_blocked_time_is_not_a_ranks_own():
    """A loop that reduces by hand: rank 0's long stage is a wait for rank 1, whose forward is slow."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        at = 100 * n
        for r, rank in enumerate(ranks):
            forward = 10 + 20 * r
            rank.step(n, at, at + 50).stage(n, "forward", at, at + forward)
            rank.stage(n, "reduce_metrics", at + forward, at + 45)
            rank.collective(n, at + forward + 1, at + 40, n + 1, flags=Flag.ASYNC).wait(n, at + forward + 2, at + 40)
    batches = [rank.batch() for rank in ranks]

    assert own(step_tables(batches)[0])[3].tolist() == [50 * MS, 10 * MS, 7 * MS, 5 * MS]
    assert analyse(batches).stragglers.found == (Straggler(1, "forward", 30 * MS, 10 * MS, 20 * MS, 9, 9, 9, 20 * MS),)


def test_what_a_program_launches_itself_in_the_backward_is_not_waited_for_at_its_end():
    """A layer's exchange is over early in the backward, and rank 1 computes for long behind it: that is its own."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            at, done = 100 * n, 100 * n + 12 + 20 * r
            rank.step(n, at, at + 40).stage(n, "forward", at, at + 2).stage(n, "backward", at + 2, done)
            rank.collective(n, at + 4, at + 6, 2 * n + 1, source=Source.BOUND, flags=Flag.ASYNC)
            rank.collective(n, done, at + 36, 2 * n + 2)
    report = analyse([rank.batch() for rank in ranks])

    (found,) = report.stragglers.found
    assert (found.rank, found.stage, found.excess) == (1, "backward", 20 * MS)
    (grad_sync,) = (stage for stage in report.timings.stages if stage.name == "grad_sync")
    assert [timing.mean for timing in grad_sync.ranks] == [24 * MS, 4 * MS]


def test_a_stage_inside_another_counts_once():
    """The copy to the device is not prepare_batch's own time."""
    rank = Rank().step(0, 0, 20).stage(0, "prepare_batch", 0, 10).stage(0, "to_device", 2, 9)
    table = step_tables([rank.batch()])[0]
    assert columns(table.stages) == ("between steps", "prepare_batch", "to_device", "residual")
    assert own(table).tolist() == [[0, 3 * MS, 7 * MS, 10 * MS]]


def test_an_accumulated_backward_is_told_by_its_last_piece():
    """Two forwards and backwards in a step; the buckets are launched in the second backward."""
    rank = Rank(0, 2).step(0, 0, 30)
    rank.stage(0, "forward", 0, 14, 8, 2).stage(0, "backward", 4, 28, 20, 2)
    rank.collective(0, 18, 28, 1, tensor="bucket 0", source=Source.BOUND, flags=Flag.ASYNC)
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, 8 * MS, 10 * MS, 2 * MS]]


@pytest.mark.parametrize(("seen", "blocked_ms"), [((False, False), 12), ((True, False), 12), ((True, True), 7)])
def test_buckets_that_are_all_seen_to_end_block_until_then(seen, blocked_ms):
    """At level `partition` a hook sees them; what backward does after the last of them is the rank's own."""
    rank = Rank(0, 2).step(0, 0, 40).stage(0, "backward", 10, 30)
    for n, (begin, end) in enumerate(((14, 25), (18, 23))):
        how = {"source": Source.HOST_DONE if seen[n] else Source.BOUND, "flags": Flag.ASYNC}
        rank.collective(0, begin, end if seen[n] else 30, n + 1, tensor=f"bucket {n}", **how)
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, (20 - blocked_ms) * MS, 20 * MS]]


def test_what_a_pipeline_waits_between_its_pieces_is_in_none_of_them():
    """Two micro-batches take 2 ms each in either stage: all it waits for messages lies in the gaps."""
    rank = Rank(0, 2).step(0, 0, 60)
    rank.stage(0, "forward", 0, 20, 4, 2).stage(0, "backward", 30, 55, 4, 2)
    for begin, end in ((2, 17), (20, 29), (32, 42)):
        rank.add(Descriptor(P2P, "recv"), 0, begin, end)
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, 4 * MS, 4 * MS, (60 - 8 - 15 - 9 - 10) * MS]]


def pipeline(
    ranks: int, slow: float = 0.0, where: tuple[int, str] = (1, "forward"), **of_message: int
) -> list[SpanBatch]:
    """Return a pipeline of four micro-batches, forwards of 4 ms, then backwards of 8, with a collective at its end.

    A rank is *slow* ms longer in a stage, *where*.
    """
    out = [Rank(r, ranks) for r in range(ranks)]
    begin = 0.0
    for n in range(10):
        before, now, pieces = begin, [begin] * ranks, [dict[str, list[tuple[float, float]]]() for _ in range(ranks)]
        for stage, order, length in (("forward", [*range(ranks)], 4.0), ("backward", [*range(ranks)][::-1], 8.0)):
            sent = [begin] * 4
            for r in order:
                for batch in range(4):
                    if r != order[0]:
                        came, now[r] = now[r], max(now[r], sent[batch])
                        out[r].add(Descriptor(P2P, "recv"), n, came, now[r], a=order[order.index(r) - 1], **of_message)
                    piece = now[r], now[r] + length + (slow / 4 if (r, stage) == where else 0)
                    sent[batch] = now[r] = piece[1]
                    pieces[r].setdefault(stage, []).append(piece)
        begin = max(now) + 1
        for r, rank in enumerate(out):
            rank.step(n, before, begin).collective(n, now[r], begin, n + 1, level=of_message.get("level", Level.PHASE))
            for stage, of in pieces[r].items():
                rank.stage(n, stage, of[0][0], of[-1][1], sum(end - start for start, end in of), 4)
    return [rank.batch() for rank in out]


def test_in_a_pipeline_the_slow_rank_alone_is_named_with_its_own_time():
    """The others' waits for messages would fit into their pieces, and are between them, on all ranks."""
    (found,) = analyse(pipeline(4, slow=16.0)).stragglers.found
    assert found == Straggler(1, "forward", 32 * MS, 16 * MS, 16 * MS, 9, 9, 9, 8 * MS)


def test_what_a_sharded_model_waits_for_is_in_its_pieces_whatever_else_is_between_them():
    """5 ms of the program's own between two pieces of 10 ms each, in either of which 3 ms are waited."""
    rank = Rank(0, 2).step(0, 0, 30).stage(0, "forward", 0, 25, 20, 2)
    for seq, begin in enumerate((1, 16), 1):
        rank.collective(0, begin, begin + 3, seq, "all_gather_into_tensor")
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, 14 * MS, 10 * MS]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_an_even_pipeline_nobody_is_named(ranks):
    """Rank 0 comes last to what follows the backwards, in each step, since the others' gradients come to it last."""
    report = analyse(pipeline(ranks))
    assert report.stragglers.verdict == "none"
    assert [rank.last for rank in report.waits.ranks] == [10, *[0] * (ranks - 1)]


def test_a_wait_in_a_stage_of_several_pieces_is_not_taken_for_the_one_around_it():
    """Metrics are gathered before and, for 40 of its 60 ms, while a batch is prepared: there a rank waits for 36 ms."""
    rank = Rank(0, 2).step(0, 0, 100).stage(0, "prepare_batch", 30, 90, 20).stage(0, "reduce_metrics", 10, 85, 48, 3)
    rank.collective(0, 32, 68, 1)
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, (48 - 36) * MS, 20 * MS, (100 - 20 - 48) * MS]]


def test_what_may_be_in_an_evaluation_or_in_sharing_its_metrics_is_in_the_latter():
    """It is, until its pieces are full: a gather of 30 ms does not fit, and is one of a sharded model's."""
    rank = Rank(0, 2).step(0, 0, 130).stage(0, "evaluate", 0, 110, 60, 4).stage(0, "reduce_metrics", 10, 110, 27, 3)
    for seq, (begin, end) in enumerate(((10, 18), (30, 38), (45, 75), (101, 110)), 1):
        rank.collective(0, begin, end, seq, "all_gather")
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, (60 - 30) * MS, 2 * MS, (130 - 60 - 27) * MS]]


def test_a_rank_without_steps_is_told_beside_one_that_shares_metrics():
    """It was killed in its first step, in which it communicates as the other does."""
    ranks = [Rank(r, 2).stage(0, "reduce_metrics", 0, 5).collective(0, 1, 2, 1) for r in range(2)]
    ranks[0].step(0, 0, 10)
    ranks[1].step(0, 0, 10, flags=Flag.TRUNCATED)
    report = analyse([rank.batch() for rank in ranks])
    assert report.stragglers.reason == "1 of 2 ranks have no step in the part looked at: 1"
    assert [rank.step.count for rank in report.breakdown.steady] == [1, 0]


HANDLES = {"flags": Flag.ASYNC, "level": Level.COLLECTIVE}


@pytest.mark.parametrize(("ranks", "waited"), [(2, 8), (4, 16)])
def test_who_may_have_waited_for_handles_is_not_named_for_coming_late(ranks, waited):
    """Rank 0 waits for the others' gradients, and nobody recorded it: that it comes last confirms nothing."""
    report = analyse(pipeline(ranks, **HANDLES))
    assert (report.stragglers.verdict, report.stragglers.reason) == (
        "cannot tell",
        f"rank 0's time outside any stage takes {waited}.0 ms longer than the others', but without its waits "
        "(OTEL_DLTRACE_LEVEL=phase) waiting cannot be told from computing",
    )
    assert report.saturation.stages == ()


@pytest.mark.parametrize("where", [(1, "forward"), (0, "backward")])
def test_who_is_slow_between_two_ranks_with_handles_is_named_rather_than_who_waits(where):
    """Rank 0 is longer outside any stage as well, where it waits."""
    (found,) = analyse(pipeline(2, 16.0, where, **HANDLES)).stragglers.found
    assert (found.rank, found.stage, found.excess) == (*where, 16 * MS)


@pytest.mark.parametrize("message", [0, 10])
def test_who_is_a_little_slow_in_several_stages_is_named_though_it_has_messages(message):
    """3 ms longer in either of two stages are below the threshold each, and what it was in messages rank 0 was too."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(20):
        for r, rank in enumerate(ranks):
            begin, each = 100 * n, 40 + 3 * r
            rank.stage(n, "forward", begin, begin + each).stage(n, "backward", begin + each, begin + 2 * each)
            rank.add(Descriptor(P2P, "send", backend="gloo"), n, begin + 2, begin + 2 + message, a=1 - r)
            rank.collective(n, begin + 2 * each, begin + 88, n + 1).step(n, begin, begin + 92)
    (found,) = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert found == Straggler(1, "", 0, 0, 0, 0, 19, 19, 6 * MS)


@pytest.mark.parametrize("how", [0, int(Flag.ASYNC)], ids=["blocking", "handles"])
def test_who_is_a_little_late_to_each_layer_of_a_sharded_model_is_late_by_all_of_it(how):
    """Rank 1 is 1 ms late to each of 16 in which all wait: too little for one alone."""
    ranks = [Rank(r, 4) for r in range(4)]
    for n in range(12):
        for r, rank in enumerate(ranks):
            begin = 100 * n
            for layer in range(16):
                at = begin + 3.5 * layer
                called, over = at + (3 if r == 1 else 2), at + 3.5
                rank.collective(n, called, over, 16 * n + layer + 1, "all_gather_into_tensor", flags=how)
                if how:
                    rank.wait(n, called + 0.01, over)
                    rank.rows[-1]["parent_no"] = rank.rows[-2]["span_no"]
            rank.step(n, begin, begin + 57).stage(n, "forward", begin, begin + 56)
    (found,) = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert (found.rank, found.stage, found.excess) == (1, "forward", 16 * MS)
    assert (found.late, found.arrivals, found.lateness) == (11, 11, 16 * MS)


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        pytest.param("broadcast", ["node"] * 4, id="nobody waits for all"),
        pytest.param("all_gather_into_tensor", [f"node-{r}" for r in range(4)], id="several clocks"),
    ],
)
def test_lateness_that_may_not_add_up_is_not_added_up(name, hosts):
    """Who is late to a broadcast meets nobody there, and of several hosts' clocks the errors would add up as well."""
    ranks = [Rank(r, 4, host) for r, host in enumerate(hosts)]
    for r, rank in enumerate(ranks):
        for layer in range(16):
            rank.collective(0, 10 * layer + (r == 1), 10 * layer + 5, layer + 1, name)
    joined = join([rank.batch() for rank in ranks])
    assert len(in_a_row(joined, np.ones(len(joined), bool))) == 0


def test_what_ranks_come_late_by_chance_to_many_layers_makes_nobody_late():
    """Each is late to some, by more than it is early to others; beside what the others are late by in all, none is."""
    rng = np.random.default_rng(0)
    ranks = [Rank(r, 8) for r in range(8)]
    now = 0.0
    for n in range(20):
        begin = now
        for layer in range(40):
            called = now + 1 + rng.gamma(0.5, 0.6, 8)
            now = called.max() + 0.3
            for rank, at in zip(ranks, called.tolist(), strict=True):
                rank.collective(n, at, now, 40 * n + layer + 1, "all_gather_into_tensor")
        for rank in ranks:
            rank.step(n, begin, now).stage(n, "forward", begin, now)
    assert analyse([rank.batch() for rank in ranks]).stragglers.verdict == "none"


@pytest.mark.parametrize("turns", [2, 3])
def test_a_wait_is_in_the_stage_whose_turn_it_is(turns):
    """A sharded model that accumulates: 10 ms of each forward and 8 of each backward are waited, the last longer."""
    rank, now = Rank(0, 2).step(0, 0, 40 * turns + 20), 0
    for turn in range(turns):
        backward = 40 if turn == turns - 1 else 20
        for begin, end in ((now + 1, now + 11), (now + 21, now + 13 + backward)):
            rank.collective(0, begin, end, len(rank.rows) + 1, "all_gather_into_tensor")
        now += 20 + backward
    rank.stage(0, "forward", 0, now - 40, 20 * turns, turns)
    rank.stage(0, "backward", 20, now, 20 * turns + 20, turns)
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, 10 * turns * MS, 8 * turns * MS, 0]]


def test_what_does_not_fit_into_a_stage_was_in_the_one_it_alternates_with():
    """Turns may be of unequal length: whoever is told to hold more than it lasted did not."""
    rank = Rank(0, 2).step(0, 0, 100)
    rank.stage(0, "forward", 0, 80, 60, 3).stage(0, "backward", 10, 100, 40, 3)
    for begin, end in ((12, 36), (50, 76)):
        rank.collective(0, begin, end, len(rank.rows) + 1)
    assert own(step_tables([rank.batch()])[0]).tolist() == [[0, 50 * MS, 0, 0]]


def test_few_collectives_beside_messages_name_nobody_without_a_stage():
    """Rank 0 came late to the collectives of a quarter of the steps, and nothing else tells of it."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(40):
        for r, rank in enumerate(ranks):
            rank.step(n, 100 * n, 100 * n + 60).stage(n, "forward", 100 * n, 100 * n + 20)
            rank.add(Descriptor(P2P, "recv"), n, 100 * n + 20, 100 * n + 30)
            if n % 4 == 0:
                rank.collective(n, 100 * n + (35 if r else 50), 100 * n + 52, n // 4 + 1)
    assert [one.rank for one in analyse([rank.batch() for rank in ranks]).stragglers.found] == []


@pytest.mark.parametrize("late", [0, 1])
def test_one_collective_beside_messages_accuses_nobody_and_confirms_nothing(late):
    """Ranks send each other messages in each step, and meet once: rank 1 is slow, whoever came late to that alone."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(12):
        for r, rank in enumerate(ranks):
            begin, forward = 100 * n, 40 if r else 10
            rank.step(n, begin, begin + 60).stage(n, "forward", begin, begin + forward)
            rank.stage(n, "optimizer", begin + 50, begin + (52 if r else 58))
            rank.add(Descriptor(P2P, "recv"), n, begin + forward, begin + 48)
    for r, rank in enumerate(ranks):
        rank.collective(11, 1158 if r == late else 1152, 1160, 1)
    found = analyse([rank.batch() for rank in ranks]).stragglers
    assert [(one.rank, one.stage, one.excess) for one in found.found] == [(1, "forward", 30 * MS)]
    assert verdict(found)[1:] == ["Nothing confirms it: no collective shows who came late."]

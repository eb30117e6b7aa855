"""Stragglers of programs without steps, and of runs without operations: what can be told, and what cannot."""

import pytest

from otel_dltrace.analysis.compose import analyse
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import ASYNC_PARAM, P2P, Flag, Source
from otel_dltrace.model.spans import SpanBatch
from tests.support.runs import MS, Rank, rendered

STEPLESS_BUCKETS = {"source": Source.BOUND, "flags": Flag.ASYNC, "tensor": "bucket 0"}


def without_steps(case: str) -> list[SpanBatch]:
    """Return ranks without steps, rank 1 of which comes 5 ms late to each collective, and nobody knows why.

    It is by its host's clock, with or without another rank beside it, or not much as others are under way, or it waited
    for a message, or others are not here. In what sets MPI up, and what servers answer at once, it waited for nobody.
    """
    of_host = {"clocks": "ab", "clocks, as beside it": "abb", "its own": "abb"}
    hosts = [f"node-{host}" for host in of_host.get(case, "aa")]
    world = {"missing": 4}.get(case, 2)
    ranks = [Rank(r, world, host) for r, host in enumerate(hosts)]
    many = 25 if case == "at once" else 1
    late = 0.3 if case == "at once" else 5
    for n in range(20):
        for rank in ranks[1:] if len(hosts) > 2 else ():
            begin = 100 * n + 91 + (rank is ranks[1]) * (0.1 if "clocks" in case else 4)
            rank.collective(NO_STEP, begin, 100 * n + 98, n + 1, group="of one host", group_size=2)
        for r, rank in enumerate(ranks):
            begin = 100 * n + 20 + late * r
            for one in range(many):
                extra = STEPLESS_BUCKETS | ({"source": Source.HOST_ISSUE} if case == "issued" else {})
                if r < 2:
                    rank.collective(NO_STEP, begin, 100 * n + 90, many * n + one + 1, **extra)
            if case == "message" and r == 1:
                message = Descriptor(P2P, "recv", backend="gloo", group="0")
                rank.add(message, NO_STEP, 100 * n + 19, begin, seq=n + 1, a=2)
    if case == "set up":
        ranks[1].collective(NO_STEP, 0, 90, 0, "init", backend="mpi")
    if case == "answered at once":
        ranks[1].collective(NO_STEP, 0, 90, 0, "push_pull", backend="byteps", tensor=f"{ASYNC_PARAM}w")
    return [rank.batch() for rank in ranks]


@pytest.mark.parametrize(
    ("case", "verdict"),
    [
        *[
            (case, "cannot tell")
            for case in ("clocks", "clocks, as beside it", "issued", "at once", "message", "missing")
        ],
        *[(case, "straggler") for case in ("", "its own", "set up", "answered at once")],
    ],
)
def test_without_steps_nobody_is_named_for_what_others_may_have_done(case, verdict):
    """Without any of it rank 1 is named."""
    assert analyse(without_steps(case)).stragglers.verdict == verdict


@pytest.mark.parametrize(
    ("late", "who"),
    [
        pytest.param(lambda _: (1, 5.0), 1, id="always the same"),
        pytest.param(lambda n: (n % 2, 5.0), None, id="in turn"),
        pytest.param(lambda n: (1 if n % 2 else 0, 5.0 if n % 2 else 0.1), 1, id="by far"),
        pytest.param(lambda _: (1, 0.1), None, id="hardly"),
        pytest.param(lambda n: (1, 500.0 if n == 7 else 0.01), None, id="once"),
        pytest.param(lambda n: (1, 300.0 if n % 4 == 1 else 0.1), 1, id="each fourth turn"),
        pytest.param(lambda n: (1, 300.0 if n in (3, 7, 9, 11) else 0.1), None, id="four times"),
    ],
)
def test_without_steps_the_collectives_tell_who_makes_the_others_wait(late, who):
    """The one that comes last to them, time and again, and alone costs the others a part of the time that counts."""
    ranks, now = [Rank(r, 2) for r in range(2)], 0.0
    for n in range(20):
        last, by = late(n)
        for r, rank in enumerate(ranks):
            rank.collective(NO_STEP, now + (by if r == last else 0), now + by + 0.1, n + 1)
        now += by + 20
    report = analyse([rank.batch() for rank in ranks])
    told = [(one.rank, one.stage) for one in report.stragglers.found]
    assert (report.stragglers.verdict, told) == (("cannot tell", []) if who is None else ("straggler", [(who, "")]))
    assert "Steps from" not in rendered(report)


@pytest.mark.parametrize(("computes", "verdict"), [(0, "none"), (6, "straggler")])
def test_who_is_done_later_with_a_collective_is_not_named_for_coming_later_to_the_next(computes, verdict):
    """Rank 0 has the sum 5 ms after the others, as MPI's algorithm has it: only what it does itself counts."""
    ranks, begins = [Rank(r, 3) for r in range(3)], [0, 0, 0]
    for n in range(12):
        done = max(begins) + 30
        for r, rank in enumerate(ranks):
            end = done + 5 * (r == 0)
            rank.step(n, begins[r], end).collective(n, begins[r] + 8, end, n + 1, backend="mpi", group="world")
            begins[r] = end + (computes if r == 0 else 0)
    assert analyse([rank.batch() for rank in ranks]).stragglers.verdict == verdict


def test_where_no_operations_are_recorded_all_that_no_stage_covers_may_be_waiting():
    """At level step a program of MPI has nothing but steps, each as long as the slowest rank's."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for rank in ranks:
            rank.step(n, 100 * n, 100 * n + 25)
    found = analyse([rank.batch() for rank in ranks]).stragglers
    assert (found.verdict, found.reason) == (
        "cannot tell",
        "no rank takes longer than the others by itself, but without its operations (OTEL_DLTRACE_LEVEL=collective) "
        "waiting cannot be told from computing in the part of the step outside any stage",
    )


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("awaited_in", "stage"), [("residual", "backward"), ("residual", "optimizer"), ("forward", "optimizer")]
)
def test_who_waits_where_no_operations_are_recorded_is_not_accused(ranks, awaited_in, stage):
    """A loop that reduces by hand, or a sharded model: rank 1 computes for longer, the others are as long in a wait."""
    out = [Rank(r, ranks) for r in range(ranks)]
    now = [0] * ranks
    for n in range(10):
        took = [{"backward": 10, "optimizer": 10} | ({stage: 30} if r == 1 else {}) for r in range(ranks)]
        forward = [max(now) + 10] * ranks if awaited_in == "forward" else [begin + 10 for begin in now]
        backward = [begin + mine["backward"] for begin, mine in zip(forward, took, strict=True)]
        reduced = [max(backward) + 1] * ranks if awaited_in == "residual" else backward
        for r, rank in enumerate(out):
            end = reduced[r] + took[r]["optimizer"]
            rank.step(n, now[r], end).stage(n, "forward", now[r], forward[r])
            rank.stage(n, "backward", forward[r], backward[r]).stage(n, "optimizer", reduced[r], end)
            now[r] = end
    found = analyse([rank.batch() for rank in out]).stragglers
    assert (found.verdict, found.reason) == (
        "cannot tell",
        f"rank 1's {stage} takes 20.0 ms longer than the others', but without its operations "
        "(OTEL_DLTRACE_LEVEL=collective) waiting cannot be told from computing",
    )


def test_who_waits_where_no_operations_are_recorded_may_do_so_in_a_stage_that_the_slow_rank_lacks():
    """Rank 0 takes part in a backward that rank 1 has not, as one whose part of the model is frozen."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            begin, ready = 40 * n, 40 * n + 10 + 20 * r
            rank.step(n, begin, begin + 40).stage(n, "forward", begin, ready)
            rank.stage(n, "optimizer", begin + 31, begin + 40)
        ranks[0].stage(n, "backward", 40 * n + 10, 40 * n + 31)
    (found,) = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert (found.rank, found.stage, found.excess) == (1, "forward", 20 * MS)


def test_who_has_a_stage_that_the_others_lack_may_be_who_they_wait_for():
    """Rank 0 alone does something before its optimizer, and rank 1 waits for it in the next forward."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(10):
        begin = 40 * n
        ranks[0].step(n, begin, begin + 40).stage(n, "forward", begin, begin + 10)
        ranks[0].stage(n, "backward", begin + 10, begin + 30).stage(n, "optimizer", begin + 30, begin + 40)
        ranks[1].step(n, begin - 20, begin + 20).stage(n, "forward", begin - 20, begin + 10)
        ranks[1].stage(n, "optimizer", begin + 10, begin + 20)
    found = analyse([rank.batch() for rank in ranks]).stragglers
    assert (found.verdict, found.found) == ("cannot tell", ())

"""Errors of a run: which came first, on whom, and where."""

import sys
from dataclasses import replace

import pytest

from otel_dltrace.analysis.compose import analyse
from otel_dltrace.analysis.stops.failures import Failure, Failures, Missing, failures
from otel_dltrace.export.rundir.reader import read_run
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import EXIT, PHASE, WAIT, Flag
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.model.time import Anchor
from otel_dltrace.report.failures import failures as in_words
from otel_dltrace.report.words import rests_on
from tests.support.runs import MS, Rank

FAILED = {"flags": int(Flag.ERROR), "error": 1}
CRASH = """
    import sys
    import torch, torch.distributed as dist

    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/rendezvous", rank=rank, world_size=2)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(9):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        if step == 6 and rank == 1:
            raise FloatingPointError("the loss of this step is not finite any more")
        dist.all_reduce(torch.ones(1))
        optimizer.step()
"""

STEPLESS = """
    import sys
    import torch, torch.distributed as dist

    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}/rendezvous", rank=rank, world_size=2)
    for call in range(9):
        if call == 6 and rank == 1:
            raise FloatingPointError("the loss of this step is not finite any more")
        dist.all_reduce(torch.ones(1))
"""


def failing(rank: Rank, kind: str = "ValueError", message: str = "planted") -> SpanBatch:
    """Return what *rank* did; its first error is of *kind*."""
    return replace(rank.batch(), errors=(("", ""), (kind, message)))


def test_who_ended_well_had_no_error():
    """Nothing, and no sentence."""
    assert failures([Rank(r, 2).step(0, 0, 10).batch() for r in range(2)]) == Failures()
    assert in_words(Failures()) == []


def test_the_first_error_is_first_and_the_innermost_span_has_it():
    """It passes through the step, which is where nobody looks; the others' come later."""
    first = Rank(1, 3).step(0, 0, 8, **FAILED).collective(0, 5, 8, seq=0, **FAILED)
    others = [Rank(r, 3).step(0, 0, 20 + r).collective(0, 6, 20 + r, seq=0, **FAILED) for r in (2, 0)]
    batches = [failing(first), *(failing(other, "RuntimeError", "closed") for other in others)]
    found = failures(batches)

    assert found.found == (
        Failure("ValueError", "planted", "all_reduce", "worker", (1,), 1, 0, 1, 0),
        Failure("RuntimeError", "closed", "all_reduce", "worker", (0, 2), 0, 0, 2, 12 * MS),
    )
    assert in_words(found) == [
        "Rank 1 had the first error: ValueError: planted (in all_reduce of step 0).",
        "Ranks 0, 2 had RuntimeError: closed (in all_reduce of step 0), 12.0 ms later.",
    ]


def test_an_operation_says_more_than_the_wait_for_it():
    """Both end with the error; where the operation was over before, the wait alone has it."""
    wait = Descriptor(PHASE, WAIT)
    rank = Rank(0, 2).step(0, 0, 8, **FAILED).collective(0, 1, 8, seq=0, **FAILED)
    assert in_words(failures([failing(rank.add(wait, 0, 2, 8, parent_no=2, **FAILED))])) == [
        "Rank 0 had the first error: ValueError: planted (in all_reduce of step 0)."
    ]

    rank = Rank(0, 2).step(0, 0, 8, **FAILED).collective(0, 1, 4, seq=1)
    assert in_words(failures([failing(rank.add(wait, 0, 5, 8, parent_no=2, **FAILED))])) == [
        "Rank 0 had the first error: ValueError: planted (in wait of step 0)."
    ]


def test_one_that_all_have_says_who_had_it_first_and_how_often():
    """Such as a shape that nobody can use; with steps, outside of them, on a server."""
    everybody = [Rank(r, 2).step(0, 0, 8 - r, **FAILED).step(1, 10, 12, **FAILED) for r in range(2)]
    server = Rank(0, 2, role="server").collective(NO_STEP, 1, 4_000, seq=0, name="push", **FAILED)
    found = failures([*map(failing, everybody), failing(server, "", "")])

    assert in_words(found) == [
        "Ranks 0-1 had the first error, rank 1 before the others: ValueError: planted (in step 0, 4 times in all).",
        "Server 0 had an error (in push outside any step), 4.0 s later.",
    ]


def test_of_two_hosts_whose_clocks_are_not_known_that_well_neither_is_called_later():
    """What lies within the uncertainty is no order; on one host everything is one."""
    hosts = [("node-0", Anchor(0, 0, 3 * MS)), ("node-1", Anchor(0, 0, 3 * MS))]
    ranks = [Rank(r, 2, host, anchor=anchor) for r, (host, anchor) in enumerate(hosts)]
    found = failures([failing(rank.step(0, 0, 10 + 5 * r, **FAILED), f"E{r}") for r, rank in enumerate(ranks)])

    assert in_words(found)[1:] == ["Rank 1 had E1: planted (in step 0), at about the same time."]


@pytest.mark.parametrize("ahead", [3_000, -3_000], ids=["ahead", "behind"])
def test_of_hosts_whose_clocks_are_off_the_ends_of_collectives_tell_who_failed_first(ahead):
    """All ranks are done with one at about the same time, so the clocks are 3 s apart, and rank 1 failed first."""
    ranks = [Rank(r, 2, f"node-{r}", anchor=Anchor(0, r * ahead * MS, 50)) for r in range(2)]
    for n in range(5):
        for rank in ranks:
            rank.collective(n, 10 * n + 5, 10 * n + 6, n + 1)
    failed = [failing(rank.step(5, 60, 90 - 20 * r, **FAILED), f"E{r}") for r, rank in enumerate(ranks)]
    report = analyse(failed)

    assert in_words(report.failures) == [
        "Rank 1 had the first error: E1: planted (in step 5).",
        "Rank 0 had E0: planted (in step 5), 20.0 ms later.",
    ]
    assert rests_on(report.guards).endswith(
        "wall clocks of several hosts (2, read to +-0.1 us, and 3,000.0 ms apart, as the ends of collectives show). "
        "All times are host times."
    )


def test_a_host_of_servers_alone_keeps_its_clock_where_others_are_put_right():
    """It has no rank in any collective, and those that have are in order all the same."""
    ranks = [Rank(r, 2, f"node-{r}", anchor=Anchor(0, r * 3_000 * MS, 50)) for r in range(2)]
    for rank in ranks:
        rank.collective(0, 5, 6, 1)
    server = Rank(0, 2, "node-2", anchor=Anchor(0, 0, 50), role="server").collective(NO_STEP, 1, 2, seq=0, name="push")
    failed = [failing(rank.step(1, 60, 90 - 20 * r, **FAILED), f"E{r}") for r, rank in enumerate(ranks)]

    found = analyse([*failed, server.batch()]).failures

    assert in_words(found)[1] == "Rank 0 had E0: planted (in step 1), 20.0 ms later."


def test_hosts_that_no_collective_has_together_are_in_no_order_by_clocks_that_are_off():
    """Each host meets the next one alone, and the clock in the middle is off."""
    anchors = [Anchor(0, wall * MS, 50) for wall in (0, 3_000, 0)]
    ranks = [Rank(r, 3, f"node-{r}", anchor=anchor) for r, anchor in enumerate(anchors)]
    for n, (left, right) in enumerate([(0, 1), (1, 2)]):
        for r in (left, right):
            ranks[r].collective(0, 5, 6, 1, group=f"gloo {n}", group_size=2)
    failed = [failing(rank.step(1, 60, 62 - 0.4 * r, **FAILED), f"E{r}") for r, rank in enumerate(ranks)]

    assert in_words(analyse(failed).failures)[1:] == [
        "Rank 0 had E0: planted (in step 1), at about the same time.",
        "Rank 1 had E1: planted (in step 1), at about the same time.",
    ]


@pytest.mark.parametrize(
    ("hosts", "ends", "before"),
    [
        pytest.param("ab", (10, 15), "", id="within what the clocks tell"),
        pytest.param("ab", (10, 17), ", rank 0 before the others", id="beyond it"),
        pytest.param("aa", (10, 15), ", rank 0 before the others", id="one clock"),
        pytest.param("aab", (10, 11, 15), "", id="another host's was about as early"),
        pytest.param("baa", (15, 11, 10), "", id="the first one is read last"),
        pytest.param("aab", (10, 15, 30), ", rank 0 before the others", id="another of its host's was"),
    ],
)
def test_who_had_an_error_of_all_first_is_told_as_well_as_the_clocks_know(hosts, ends, before):
    """Else any rank of a job that failed everywhere would be called its cause."""
    ranks = [Rank(r, len(hosts), host, anchor=Anchor(0, 0, 3 * MS)) for r, host in enumerate(hosts)]
    failed = [failing(rank.step(0, 0, end, **FAILED)) for rank, end in zip(ranks, ends, strict=True)]
    (said,) = in_words(failures([*failed, Rank(9, 9, "c", anchor=Anchor(0, 0, 0)).step(0, 0, 1).batch()]))
    members = f"Ranks 0-{len(hosts) - 1}"
    assert said == f"{members} had the first error{before}: ValueError: planted (in step 0)."


def test_an_error_that_a_damaged_run_does_not_hold_is_told_without_its_class():
    """That there was one is known all the same."""
    assert in_words(failures([Rank(1, 2).step(0, 0, 10, **FAILED).batch()])) == [
        "Rank 1 had the first error: an error (in step 0)."
    ]


def test_who_was_gone_by_then_is_named():
    """A rank that was killed between two steps has no error, and nothing open: it just never came to the next."""
    gone = Rank(1, 4).step(0, 0, 10).step(1, 10, 20).batch()
    cut = Rank(2, 4).step(0, 0, 10, flags=int(Flag.TRUNCATED)).batch()
    failed = [failing(Rank(r, 4).step(0, 0, 10).step(2, 20, 30 + r, **FAILED), "E") for r in (0, 3)]
    found = failures([gone, cut, *failed])

    assert found.missing == (Missing((1,), 1),)
    assert in_words(found)[1:] == [
        "Rank 1 never began step 2 and recorded nothing after step 1, and no error: ended or killed by then, perhaps."
    ]


def test_who_was_gone_by_then_is_named_where_there_are_no_steps():
    """By time alone: who has records after the error, or something open, was there."""
    gone, there = (Rank(r, 3).collective(NO_STEP, 1, 4 + 9 * r, seq=1).batch() for r in (0, 1))
    found = failures([gone, there, failing(Rank(2, 3).collective(NO_STEP, 6, 8, seq=0, **FAILED), "E")])

    assert in_words(found) == [
        "Rank 2 had the first error: E: planted (in all_reduce outside any step).",
        "Rank 0 recorded nothing after that, and no error: ended or killed by then, perhaps.",
    ]


def test_what_ends_a_program_outside_any_step_is_told_once():
    """Where a call had the error first it is told by that; who has ended by then may have ended well."""
    ended = Descriptor(PHASE, EXIT)
    other = Rank(0, 2).collective(NO_STEP, 1, 4, seq=1).batch()
    uncaught = failing(Rank(1, 2).add(ended, NO_STEP, 9, 9, **FAILED))
    assert in_words(failures([other, uncaught])) == [
        "Rank 1 had the first error: ValueError: planted (in exit outside any step)."
    ]

    called = failing(Rank(1, 2).collective(NO_STEP, 5, 6, seq=0, **FAILED).add(ended, NO_STEP, 9, 9, **FAILED))
    assert [one.operation for one in failures([called]).found] == ["all_reduce"]


def test_many_errors_are_told_in_part():
    """Four, and how many more."""
    ranks = [failing(Rank(r, 6).step(0, 0, 10 + r, **FAILED), f"E{r}") for r in range(6)]
    assert in_words(failures(ranks))[4:] == ["2 more errors: --json has all."]
    assert in_words(failures(ranks[:5]))[4:] == ["1 more error: --json has all."]


@pytest.mark.parametrize(
    ("code", "operation", "step"),
    [pytest.param(CRASH, "rank.step", 6, id="in a step"), pytest.param(STEPLESS, "exit", None, id="without steps")],
)
def test_a_rank_that_crashes_is_told_before_those_that_it_takes_along(code, operation, step, place):
    """Two real ranks: nobody catches the one's error, and the other's all-reduce fails by it."""
    pytest.importorskip("torch")
    program = str(place.write(code))
    ranks = [
        place.popen([sys.executable, program, str(rank), str(place.folder)], OTEL_DLTRACE="1", OMP_NUM_THREADS="1")
        for rank in range(2)
    ]
    assert [rank.wait(120) for rank in ranks] == [1, 1]
    place.wait_for_rings()
    (run,) = place.folder.glob("dltrace-*/")
    crash, victim = failures(read_run(run)).found

    kind, message = "FloatingPointError", "the loss of this step is not fini..."
    assert crash == Failure(kind, message, operation, "worker", (1,), 1, step, 1, 0)
    assert replace(victim, kind="", message="", after=0) == Failure("", "", "all_reduce", "worker", (0,), 0, step, 1, 0)
    assert victim.after > 0 < len(victim.message)

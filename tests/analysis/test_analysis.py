"""The whole report: what it rests on, of which processes and worlds it is, and figures that all analyses use."""

from dataclasses import replace

import numpy as np

from otel_dltrace.analysis.compose import MOST_LISTED, Guards, analyse
from otel_dltrace.analysis.intervals import unions
from otel_dltrace.analysis.select import by_world
from otel_dltrace.analysis.spread import Spread, spread
from otel_dltrace.analysis.steps.own import columns, own
from otel_dltrace.analysis.steps.table import step_tables
from otel_dltrace.model.semconv import Flag
from otel_dltrace.model.spans import SpanBatch
from otel_dltrace.model.time import Anchor
from otel_dltrace.report.words import rests_on
from tests.support.runs import MS, Rank, ddp


def test_a_spread_tells_sum_mean_and_quantiles():
    """Quantiles are interpolated, and nothing of nothing is zero."""
    assert spread(np.arange(1, 101)) == Spread(100, 5050, 50, 50, 95, 100)
    assert spread(np.zeros(0)) == Spread()


def test_a_report_says_what_it_rests_on():
    """Ranks, steps, losses of all drains, clocks."""
    hosts = {0: ("a", Anchor(0, 0, 30)), 1: ("b", Anchor(0, 0, 50))}
    drains = [
        {"summary": {"lapped_phase": 7, "spans": 9, "truncated": 1}, "ended": True},
        {"summary": {"lapped_phase": 1, "dropped_by_quota": 3, "unrecorded": 2, "removed": 5, "otlp": {"sent": 4}}},
    ]
    batches = ddp(3, steps=10, hosts={**hosts, 2: hosts[1]})[:2]
    batches.append(Rank(0, 3, "a", role="server", nonce=99, anchor=hosts[0][1]).wait(0, 0, 1).batch())

    assert analyse(batches, drains).guards == Guards(
        ranks=(0, 1),
        missing=(2,),
        expected=3,
        hosts=2,
        steps=(0, 9),
        common_steps=10,
        spans=141,
        truncated=0,
        lost=(("dropped_by_quota", 3), ("lapped_phase", 8), ("removed", 5), ("unrecorded", 2)),
        clock="wall clocks of several hosts",
        uncertainty=80,
        unused=0,
    )
    begun = analyse(batches, [*drains, {"ended": False}]).guards
    assert (begun.is_over, "more may come: a drain has not ended" in rests_on(begun)) == (False, True)


def test_what_a_report_rests_on_costs_the_ranks_that_are_there():
    """How many there should be is only said, and may be nonsense."""
    report = analyse([Rank(rank, 1 << 31).step(0, 0, 1).batch() for rank in (0, 2, 3)])
    assert report.guards.missing == (1, *range(4, MOST_LISTED + 3))
    assert rests_on(report.guards).startswith("Rests on: ranks 0, 2-3 of 2147483648, missing 1, 4-2147483647; ")


def test_of_two_processes_of_a_rank_the_one_with_the_steps_speaks():
    """A forked child has the rank of its parent, and no steps, or a few."""
    parent = Rank(0).step(0, 0, 10).step(1, 10, 20)
    child = Rank(0, nonce=77).step(0, 5, 6)
    batches = [child.batch(), parent.batch()]
    assert [(t.rank, t.steps.tolist()) for t in step_tables(batches)] == [(0, [0, 1])]
    assert analyse(batches).guards.unused == 1


def test_processes_of_a_rank_whose_steps_go_on_are_one_table():
    """As timelines in several files are: what lies between them is no time of a step, whatever their clocks say."""
    first = Rank(0).step(0, 100, 110).step(1, 110, 120).stage(1, "forward", 112, 118)
    first.step(2, 120, 999, flags=Flag.TRUNCATED).stage(2, "forward", 120, 990)
    then = Rank(0, nonce=77).stage(3, "optimizer", 20, 24).wait(3, 21, 22)
    then.step(2, 5, 15).stage(2, "backward", 6, 14).step(3, 18, 28)
    batches = [then.batch(), first.batch()]
    (table,) = step_tables(batches)

    assert (table.steps.tolist(), table.part.tolist()) == ([0, 1, 2, 3], [0, 0, 1, 1])
    assert (table.duration // MS).tolist() == [10, 10, 10, 10]
    assert (table.between // MS).tolist() == [0, 0, 0, 3]
    assert dict(zip(table.stages, (table.total // MS).T.tolist(), strict=True)) == {
        "forward": [0, 6, 0, 0],
        "backward": [0, 0, 8, 0],
        "optimizer": [0, 0, 0, 4],
    }
    assert (own(table)[:, columns(table.stages).index("optimizer")] // MS).tolist() == [0, 0, 0, 3]
    assert analyse(batches).guards.unused == 0


def test_nothing_recorded_is_a_report_too():
    """No batch, or an empty one, is no error."""
    assert analyse([]).guards.steps is None
    assert analyse([Rank(0, 2).batch()]).guards.ranks == (0,)


def test_time_that_ranks_cover_is_told_of_runs_of_any_length():
    """One rank's step of hours, as an evaluation is, beside hundreds of thousands of short ones."""
    group = np.arange(640_000)
    start = np.zeros(len(group), np.int64)
    end = np.where(group == 7, 5 * 3600 * 1000 * MS, 10 * MS)
    assert unions(group, start, end, len(group)).tolist() == end.tolist()


def worlds() -> list[SpanBatch]:
    """Return two ranks of one world, and two of another whose steps are numbered alike and take longer."""
    fast, slow = ddp(2), ddp(2, slow={(0, "forward"): 30.0, (1, "forward"): 30.0})
    bound = [replace(b.process, bind=replace(b.process.bind, world="rollout"), nonce=r + 9) for r, b in enumerate(slow)]
    return fast + [replace(batch, process=process) for batch, process in zip(slow, bound, strict=True)]


def test_worlds_of_one_job_are_looked_at_apart():
    """Rank 1 of one is not rank 1 of the other."""
    found = {name: analyse(batches) for name, batches in by_world(worlds()).items()}
    assert {name: (r.guards.ranks, r.guards.unused, r.stragglers.verdict) for name, r in found.items()} == {
        "default": ((0, 1), 0, "none"),
        "rollout": ((0, 1), 0, "none"),
    }


def test_a_step_that_was_cut_off_hides_no_process():
    """Both ranks were killed in their first step: nobody else has steps of theirs."""
    cut = [Rank(r, 2).step(0, 0, 10, flags=Flag.TRUNCATED).batch() for r in range(2)]
    assert analyse(cut).guards.unused == 0

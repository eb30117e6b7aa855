"""Stragglers by the times of devices: whose stages and collectives they tell, and when they tell nothing."""

import pytest

from otel_dltrace.analysis.collectives.aligned import is_aligned, telling
from otel_dltrace.analysis.collectives.joined import join
from otel_dltrace.analysis.compose import analyse
from otel_dltrace.analysis.steps.own import columns, mixed
from otel_dltrace.analysis.steps.table import step_tables
from otel_dltrace.model.identity import NO_STEP
from otel_dltrace.model.semconv import Source
from otel_dltrace.model.time import Anchor
from tests.support.runs import MS, Rank, ddp_on_devices


@pytest.mark.parametrize("lag", [0.0, 350.0])
@pytest.mark.parametrize("stage", ["forward", "backward"])
def test_devices_that_tell_their_buckets_tell_the_straggler(stage, lag):
    """Also where they are steps behind their hosts: what a device did is compared with what it did."""
    report = analyse(ddp_on_devices(3, {(1, stage): 20.0}, timed=True, lag=lag))
    (found,) = report.stragglers.found
    assert (found.rank, found.stage, found.excess, found.late) == (1, stage, 20 * MS, 19)
    waited = {r.rank: r.mean for part in report.timings.stages if part.name == "grad_sync" for r in part.ranks}
    assert waited == {0: 21 * MS, 1: MS, 2: 21 * MS}


def test_a_batch_is_worked_on_from_when_the_device_is_free():
    """Not for as long as it lay there while the device, some steps behind its host, was at those before."""
    rank = Rank()
    for n in range(10):
        rank.step(n, 20 * n, 20 * n + 20, seq=n + 1).stage(n, "prepare_batch", 20 * n, 20 * n + 1)
        rank.stage(n, "forward", 500 + 20 * n, 508 + 20 * n, source=Source.DEVICE)
        rank.stage(n, "backward", 508 + 20 * n, 518 + 20 * n, source=Source.DEVICE)
    (batch,) = (part for part in analyse([rank.batch()]).timings.stages if part.name == "train_batch")
    assert [(r.p50, r.mean) for r in batch.ranks] == [(20 * MS, 20 * MS)]


@pytest.mark.parametrize("hosts", ["ab", "aa"])
def test_who_comes_last_on_a_device_is_told_by_how_long_it_is_at_it(hosts):
    """Not by when it is assumed to begin, nor by the clocks of the hosts, which are 40 ms apart; all end together."""
    batches = []
    for rank, host in enumerate(hosts):
        one = Rank(rank, 2, host, anchor=Anchor(0, 40 * MS * (host == "b"), 1000))
        one.collective(NO_STEP, 0, 0, 20, "broadcast_coalesced", source=Source.HOST_ISSUE, backend="nccl")
        for n in range(10):
            begin = 100.0 * n
            one.step(n, begin, begin + 90, seq=n + 1)
            took = 3 if rank else 33
            one.collective(n, begin + 5, begin + 5 + took, n + 1, source=Source.RECORDER, backend="nccl")
        batches.append(one.batch())
    report = analyse(batches)
    (found,) = report.stragglers.found
    assert (found.rank, found.stage, found.arrivals, found.lateness) == (1, "", 9, 30 * MS)
    assert [(r.wait, r.core, r.completion, r.last) for r in report.waits.ranks] == [
        (300 * MS, 30 * MS, 0, 0),
        (None, None, None, 10 + (hosts == "ab")),  # of what hosts have asked for their clocks tell
    ]
    assert report.waits.violations == 0


@pytest.mark.parametrize(
    ("sources", "hosts", "name", "aligned"),
    [
        ((Source.RECORDER, Source.RECORDER), "aa", "all_reduce", True),
        ((Source.DEVICE, Source.RECORDER), "aa", "all_reduce", True),
        ((Source.DEVICE, Source.DEVICE), "ab", "all_reduce", True),
        ((Source.DEVICE, Source.DEVICE), "aa", "all_reduce", False),
        ((Source.RECORDER, Source.HOST_DONE), "ab", "all_reduce", False),
        ((Source.HOST_DONE, Source.HOST_DONE), "ab", "all_reduce", False),
        ((Source.RECORDER, Source.RECORDER), "ab", "broadcast", False),
    ],
)
def test_what_all_devices_tell_is_compared_by_its_end_where_begins_are_vague(sources, hosts, name, aligned):
    """If all wait for all in it; where it is compared so, across hosts, what the hosts tell is not."""
    ranks = [Rank(r, 2, host) for r, host in enumerate(hosts)]
    for rank, source in zip(ranks, sources, strict=True):
        rank.collective(0, 0, 5, 1, name, source=source).collective(0, 10, 15, 1, "barrier", group="1")
    joined = join([rank.batch() for rank in ranks])
    assert [d.name for d in joined.take(is_aligned(joined)).descriptors] == [name] * aligned
    told = {d.name for d in telling(joined).descriptors}
    assert told == ({name} if aligned and hosts == "ab" else {name, "barrier"})


def without_device(batch, stages, steps):
    """Have the *stages* of a batch's first *steps* the times of the host alone, which only asks."""
    told = (batch["step"] < steps) & (batch["source"] == Source.DEVICE) & batch.lookup(lambda d: d.name in stages, bool)
    batch.rows["source"][told] = Source.HOST_DONE
    batch.rows["end"][told] = batch.rows["start"][told] + 100
    batch.rows["size"][told] = 100


@pytest.mark.parametrize("steps", [10, 20])
def test_a_device_s_times_are_not_compared_with_those_of_asking_it(steps):
    """Where one rank's device tells nothing, its forward is how long it took to ask it: nobody is slower for that."""
    first, second = ddp_on_devices(2, {(0, "forward"): 2.0, (1, "forward"): 2.0}, timed=True)
    without_device(second, ("forward", "backward", "optimizer"), steps)
    report = analyse([first, second])
    assert report.stragglers.verdict == ("none" if steps == 10 else "cannot tell")
    assert ("without the times of all ranks' devices" in report.stragglers.reason) == (steps == 20)
    assert {one.slow.against for one in report.saturation.stages} <= {"usual"}


def test_one_stage_without_a_device_s_times_leaves_the_others_to_be_compared():
    """A captured piece, or an optimizer that is offloaded, is no reason to say nothing of the forward."""
    first, second = ddp_on_devices(2, {(1, "forward"): 20.0}, timed=True)
    without_device(first, ("optimizer",), 20)
    report = analyse([first, second])
    (found,) = report.stragglers.found
    assert (found.rank, found.stage, found.slow, found.late) == (1, "forward", 19, 19)
    assert len(report.stragglers.frontier) > 0
    tables = step_tables([first, second])
    of_both = mixed(tables, tables[0].steps).any(axis=0)
    assert [name for name, is_mixed in zip(columns(tables[0].stages), of_both, strict=True) if is_mixed] == [
        "optimizer",
        "residual",
    ]


def test_a_small_collective_behind_a_large_one_does_not_acquit():
    """Whoever came late made all wait at the large one, which may hide it; to the small one all come at once."""
    ranks = [Rank(r, 3) for r in range(3)]
    for n in range(20):
        begin = 120.0 * n
        for r, rank in enumerate(ranks):
            ready = begin + 40 + 7 * (r == 1)
            end = begin + 117
            rank.step(n, begin, begin + 120, seq=2 * n + 1).stage(n, "forward", begin, ready, source=Source.DEVICE)
            rank.collective(n, ready, end, 2 * n + 1, source=Source.RECORDER, backend="nccl")
            rank.collective(n, end, end + 0.05, 2 * n + 2, source=Source.RECORDER, backend="nccl")
    (found,) = analyse([rank.batch() for rank in ranks]).stragglers.found
    assert (found.rank, found.stage, found.arrivals) == (1, "forward", 0)


def test_a_device_s_clock_that_is_tied_loosely_accuses_nobody():
    """The ranks share a host; one's device seems 12 ms later than it is, and says that it may be 24."""
    first, second = ddp_on_devices(2, {}, timed=False)
    for batch, later in ((first, 0), (second, 12 * MS)):
        of_device = batch["source"] == Source.DEVICE
        batch.rows["b"][of_device] = 2 * later
        buckets = batch.lookup(lambda d: d.is_bucket, bool)
        batch.rows["source"][buckets] = Source.DEVICE
        batch.rows["end"][buckets] += 3 * MS
        for name in ("start", "end"):
            batch.rows[name][of_device | buckets] += later
    assert analyse([first, second]).stragglers.found == ()


def test_launches_by_the_hosts_of_devices_say_nothing_of_waiting():
    """Hosts launch all at once: who waits for whom inside backward nobody knows, and no figure pretends to."""
    report = analyse(ddp_on_devices(2, {(1, "backward"): 20.0}))
    assert (report.stragglers.verdict, report.stragglers.reason) == (
        "cannot tell",
        "no rank takes longer than the others by itself, but without its device's times of the buckets "
        "(TORCH_NCCL_ENABLE_TIMING=1) waiting cannot be told from computing in backward",
    )
    assert "grad_sync" not in {part.name for part in report.timings.stages}
    assert report.saturation.stages == ()


def test_a_slow_forward_of_a_device_is_told_without_its_buckets_times():
    """Nobody waits in the forward of a model that is whole on every rank; of a sharded one who knows."""
    (found,) = analyse(ddp_on_devices(2, {(1, "forward"): 20.0})).stragglers.found
    assert (found.rank, found.stage, found.arrivals) == (1, "forward", 0)
    sharded = analyse(ddp_on_devices(2, {(1, "forward"): 20.0}, gathers=True)).stragglers
    assert (sharded.verdict, "without the waits between its streams" in sharded.reason) == ("cannot tell", True)

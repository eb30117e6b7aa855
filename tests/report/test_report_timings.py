"""Throughput, timings, and slow stages beside what the machine did: by hand, under exact times."""

import json
from dataclasses import replace

import numpy as np
import pytest
from rich.text import Text

from otel_dltrace.analysis.blame.slow import SlowStage
from otel_dltrace.analysis.compose import RunReport, analyse, slow_stages_of
from otel_dltrace.analysis.saturation import Sign, value_while
from otel_dltrace.analysis.select import select_metrics
from otel_dltrace.analysis.steps.table import step_tables
from otel_dltrace.analysis.steps.throughput import Rates, throughput
from otel_dltrace.analysis.steps.timings import StageTimings, Timing, Timings, timings
from otel_dltrace.analysis.utilisation import UtilisationRow, utilisation
from otel_dltrace.model import metrics as m
from otel_dltrace.model import semconv as s
from otel_dltrace.model.metric_batch import MetricBatch, Point, batch_of
from otel_dltrace.model.operation import Descriptor
from otel_dltrace.model.semconv import Level
from otel_dltrace.model.usage import CPU, DISK_WRITE, Usage, usages
from otel_dltrace.report.json import to_json
from otel_dltrace.report.machine import figure, sentence
from otel_dltrace.report.timings import timing_parts
from tests.support.runs import MS, Rank, ddp, rendered

# -- throughput ----------------------------------------------------------------------------------


def test_throughput_counts_batches_and_samples_of_all_ranks():
    """All ranks' batches and samples, the slowest rank's steps; the time between steps counts."""
    ranks = [Rank(r, 2) for r in (0, 1)]
    for r, rank in enumerate(ranks):
        for n in range(4):
            start = n * (200 + 50 * r)
            rank.step(n, start, start + 180, a=64).stage(n, "dataloader_next", start, start + 9, 8, pieces=2)

    found = throughput(step_tables([rank.batch() for rank in ranks]), warm_up=1)

    assert [(r.rank, r.steps, r.batches, r.samples, r.rates) for r in found.ranks] == [
        (0, 3, 6, 192, Rates(0.6, 5.0, 10.0, 320.0)),
        (1, 3, 6, 192, Rates(0.75, 4.0, 8.0, 256.0)),
    ]
    assert found.overall == Rates(0.75, 4.0, 18.0, 576.0)


def test_what_is_not_known_of_the_throughput_is_not_said():
    """Without a DataLoader no batches, without sizes on every rank no samples."""
    with_sizes = Rank(0, 2).step(0, 0, 100, a=8).stage(0, "dataloader_next", 0, 1).step(1, 100, 200, a=0)
    found = throughput(step_tables([with_sizes.batch(), Rank(1, 2).step(0, 0, 100, a=8).batch()]))
    assert [(r.batches, r.samples) for r in found.ranks] == [(1, None), (None, 8)]
    assert found.overall == Rates(0.2, 10.0, None, None)
    assert throughput(step_tables([])).overall is None


# -- timings -------------------------------------------------------------------------------------


def by_name(found) -> dict[str, list[tuple[int, float, float]]]:
    """Return (rank, mean, p99) in ms of each part."""
    return {part.name: [(t.rank, t.mean / MS, t.p99 / MS) for t in part.ranks] for part in found.stages}


def test_timings_tell_each_stage_of_each_rank():
    """Stages in order, the whole batch, the exposed communication, and always the residual."""
    found = timings(step_tables(ddp(2, steps=6, slow={(1, "forward"): 20.0, (0, "residual"): 3.0})), warm_up=1)

    assert by_name(found) == {
        "dataloader_next": [(0, 2.0, 2.0), (1, 2.0, 2.0)],
        "forward": [(0, 4.0, 4.0), (1, 24.0, 24.0)],
        "backward": [(0, 29.0 - 3.0, 29.0 - 3.0), (1, 9.0, 9.0)],
        "optimizer": [(0, 1.0, 1.0), (1, 1.0, 1.0)],
        "train_batch": [(0, 31.0, 31.0), (1, 34.0, 34.0)],
        "grad_sync": [(0, 18.0, 18.0), (1, 1.0, 1.0)],
        "residual": [(0, 3.0, 3.0), (1, 0.0, 0.0)],
    }
    assert {part.name: part.slowest for part in found.stages if part.stands_out} == {
        "forward": 1,
        "backward": 0,
        "train_batch": 1,
        "grad_sync": 0,
        "residual": 0,
    }


def test_a_stage_that_comes_now_and_then_is_told_of_its_own_steps():
    """A checkpoint of one rank in two of ten steps: its times are those of the two, its share that of all."""
    ranks = [Rank(r, 2) for r in (0, 1)]
    for n in range(10):
        for r, rank in enumerate(ranks):
            rank.step(n, 100 * n, 100 * n + 100)
            if r == 0 and n in (3, 7):
                rank.stage(n, "checkpoint", 100 * n, 100 * n + (20 if n == 3 else 40))

    found = timings(step_tables([rank.batch() for rank in ranks]))

    part = next(part for part in found.stages if part.name == "checkpoint")
    p99 = round(39.8 * MS)
    assert part.ranks == (Timing(0, 2, 2, 60 * MS, 30 * MS, 30 * MS, p99, 0.06),)
    assert (part.slowest, part.excess, part.stands_out) == (0, 6 * MS, True)


def test_what_comes_after_the_last_step_counts():
    """The last evaluation, and the only checkpoint, are of a step that never begins, and in no step's time."""
    rank = Rank().step(0, 0, 100).step(1, 150, 250).stage(1, "evaluate", 100, 150).stage(1, "forward", 150, 250)
    rank.stage(2, "evaluate", 250, 270, total=15, pieces=3).stage(2, "checkpoint", 270, 300)

    found = timings(step_tables([rank.batch()]))

    assert {part.name: part.ranks for part in found.stages if part.name in ("evaluate", "checkpoint")} == {
        "evaluate": (Timing(0, 2, 4, 65 * MS, round(32.5 * MS), round(32.5 * MS), round(49.65 * MS), 0.25),),
        "checkpoint": (Timing(0, 1, 1, 30 * MS, 30 * MS, 30 * MS, 30 * MS, 0.0),),
    }


def test_communication_of_the_program_is_no_residual():
    """Gradients that the program itself averages are exposed communication, and the residual is what is left."""
    rank = Rank().step(0, 0, 100).stage(0, "forward", 0, 30).stage(0, "backward", 30, 60)
    rank.stage(0, "optimizer", 90, 100).collective(0, 61, 89, 1)

    report = analyse([rank.batch()])

    assert {k: v for k, v in by_name(report.timings).items() if k in ("grad_sync", "residual")} == {
        "grad_sync": [(0, 28.0, 28.0)],
        "residual": [(0, 2.0, 2.0)],
    }
    mine = report.breakdown.steady[0]
    assert (mine.operations.mean, mine.residual.mean) == (28 * MS, 2 * MS)


def test_what_is_fetched_between_the_pieces_of_a_batch_is_no_work_on_it():
    """Three batches make a step: the first one is fetched before it, the other two while it is under way."""
    rank = Rank().step(0, 0, 60).stage(0, "dataloader_next", 0, 38, 9, pieces=3)
    rank.stage(0, "forward", 3, 45, 21, pieces=3).stage(0, "optimizer", 45, 50)
    assert by_name(analyse([rank.batch()]).timings)["train_batch"] == [(0, 41.0, 41.0)]


@pytest.mark.parametrize("inclusive", [True, False], ids=["by extents", "as recorded live"])
@pytest.mark.parametrize("inside", [(1, 8), (1, 4), (0, 10)], ids=["most of it", "some of it", "all of it"])
def test_a_stage_inside_another_counts_once(inclusive, inside):
    """The copy to the device in `prepare_batch` is taken out of it, whether the recording did that or not."""
    copied = inside[1] - inside[0]
    rank = Rank().step(0, 0, 30).stage(0, "prepare_batch", 0, 10, 10 if inclusive else 10 - copied)
    rank.stage(0, "to_device", *inside).stage(0, "forward", 10, 30)
    stages = {row.name: row.exposed / MS for row in analyse([rank.batch()]).stragglers.frontier}
    del stages["between steps"], stages["residual"]
    if inclusive and copied == 10:  # which one is in the other nobody knows
        assert sorted(stages.values()) == [0.0, 10.0, 20.0]
    else:
        assert stages == {"prepare_batch": 10.0 - copied, "to_device": copied, "forward": 20.0}


def test_a_device_that_is_behind_leaves_no_residual():
    """The host goes on to the next step while the device is at the last one: the device's times cover both."""
    device = {"source": s.Source.DEVICE, "b": 2_500}
    rank = Rank()
    for n in range(4):
        rank.step(n, 20 * n, 20 * n + 20).stage(n, "dataloader_next", 20 * n, 20 * n + 2)
        rank.stage(n, "step_lr_schedulers", 20 * n + 9, 20 * n + 10)
        for name, start, end in (("forward", 12, 20), ("backward", 20, 31)):
            rank.stage(n, name, 20 * n + start, 20 * n + end)
            rank.rows[-1] |= device

    report = analyse([rank.batch()])

    assert by_name(report.timings) == {
        "dataloader_next": [(0, 2.0, 2.0)],
        "step_lr_schedulers": [(0, 1.0, 1.0)],
        "forward": [(0, 8.0, 8.0)],
        "backward": [(0, 11.0, 11.0)],
        "train_batch": [(0, 19.0, 19.0)],
        "residual": [(0, 1.0, 1.0)],
    }
    assert rendered(report, 400).endswith(
        "The times of 8 spans are their device's, tied to the host's clock to within 2.5 us; "
        "all others are host times.\n"
    )


def test_buckets_that_the_recorder_has_measured_are_exposed_from_the_last_one_s_begin():
    """The device reduces the last one behind what it has computed; their times are the device's, and known."""
    rank = Rank()
    for n in range(4):
        rank.step(n, 20 * n, 20 * n + 20).stage(n, "backward", 20 * n, 20 * n + 12)
        rank.rows[-1] |= {"source": s.Source.DEVICE, "b": 2_500}
        for seq, (start, end) in enumerate(((3, 5), (9, 12)), 2 * n + 1):
            bucket = {"tensor": f"bucket {seq}", "source": s.Source.RECORDER, "flags": s.Flag.ASYNC}
            rank.collective(n, 20 * n + start, 20 * n + end, seq, **bucket)

    report = analyse([rank.batch()])

    assert by_name(report.timings)["grad_sync"] == [(0, 3.0, 3.0)]
    assert [(row.source, row.time.mean / MS) for row in report.operations] == [("recorder", 2.5)]
    text = rendered(report, 400)
    assert "recorder: the device measured how long it took" in text
    assert "The times of 12 spans are their device's, " in text


# -- what the machine did ------------------------------------------------------------------------


def host_metrics(*series: tuple[str, int, dict[str, str | int], list[tuple[float, float]]]) -> MetricBatch:
    """Return the metrics of node-0: metric, rank, attributes, and (ms, value) of each series."""
    rows = [
        (round(at * MS), -1, Point(name, value, m.attributes_text(attributes), rank))
        for name, rank, attributes, points in series
        for at, value in points
    ]
    return batch_of(rows, "node-0", "boot-node-0")


def usage(*intervals: tuple[float, float, float]) -> Usage:
    """Return a usage of (begin, end, value)."""
    begin, end, value = (np.array(column) for column in zip(*intervals, strict=True))
    return Usage(-1, "", begin, end, value)


@pytest.mark.parametrize(
    ("intervals", "windows", "value"),
    [
        pytest.param([(0, 10, 0.5)], [(2, 8)], 0.5, id="one sample"),
        pytest.param(
            [(0, 10, 0.1), (10, 20, 0.5), (20, 30, 0.1)], [(12, 17)], 0.9, id="above the usual is the stage's"
        ),
        pytest.param([(0, 10, 0.5), (10, 20, 0.1), (20, 30, 0.5)], [(12, 17)], 0.0, id="never below nothing"),
        pytest.param([(0, 10, 0.1), (10, 20, 0.5)], [(10, 12)], None, id="too short for its samples"),
        pytest.param([(0, 10, 0.1), (10, 20, 0.5)], [(18, 60)], None, id="mostly not sampled"),
        pytest.param([(0, 10, 0.4), (10, 20, 0.8)], [(0, 10), (10, 20)], 0.6, id="several windows"),
        pytest.param([(0, 30, 0.4), (30, 40, 0.8), (40, 50, 0.4)], [(0, 40)], 0.5, id="samples of unequal length"),
        pytest.param([(0, 10, 0.4)], [(30, 40)], None, id="at another time"),
        pytest.param([(0, 10, 0.4)], np.zeros((0, 2), int), None, id="at no time"),
        pytest.param(
            [(0, 10, 0.0), (10, 20, 0.0), (20, 30, 0.9), (30, 40, 0.0)],
            [(2, 8), (12, 18), (22, 28), (32, 38)],
            0.0,
            id="one of many",
        ),
    ],
)
def test_what_was_used_while_a_stage_ran(intervals, windows, value):
    """The samples that touch it, less what is usual outside; None where they are too coarse."""
    found = value_while(usage(*intervals), np.array(windows))
    assert found == (None if value is None else pytest.approx(value))


def test_a_counter_that_began_anew_says_nothing_of_that_interval():
    """A rate is between two samples; a counter that fell is another one's."""
    written = {m.DEVICE: "sda", m.DISK_DIRECTION: "write"}
    points = [(0.0, 5.0), (1000.0, 7.0), (2000.0, 1.0), (3000.0, 4.0)]
    (found,) = usages(host_metrics((m.SYSTEM_DISK_IO, -1, written, points)), DISK_WRITE)
    assert (found.of, found.begin.tolist(), found.value.tolist()) == ("sda", [0, 2000 * MS], [2.0, 3.0])


def test_the_modes_of_the_cpu_are_added_up():
    """Busy is all but idle and waiting for a disk; what one mode lacks is left out."""
    series = [
        (m.SYSTEM_CPU_UTILIZATION, -1, {m.CPU_MODE: mode}, points)
        for mode, points in {
            "user": [(0.0, 0.2), (500.0, 0.6), (1000.0, 0.1)],
            "system": [(0.0, 0.1), (500.0, 0.3)],
            "idle": [(0.0, 0.7), (500.0, 0.1), (1000.0, 0.9)],
            "iowait": [(500.0, 0.4)],
        }.items()
    ]
    (found,) = usages(host_metrics(*series), CPU)
    assert found.end.tolist() == [0, 500 * MS]
    assert found.value == pytest.approx([0.3, 0.9])


def planted() -> list[Rank]:
    """Return 2 ranks, 20 steps of 100 ms: rank 1's data is late, rank 0 writes a checkpoint of 400 ms in step 9."""
    ranks, now = [Rank(0, 2), Rank(1, 2)], 0.0
    for n in range(20):
        extra = 400.0 if n == 9 else 0.0
        for r, rank in enumerate(ranks):
            data = 45.0 if r else 5.0
            own = extra if r == 0 else 0.0
            end = now + 100 + extra
            rank.step(n, now, end, a=8).stage(n, "dataloader_next", now, now + data)
            launch = now + data + 15
            rank.stage(n, "forward", now + data, launch - 5)
            rank.stage(n, "backward", launch - 5, end - 5 - own).stage(n, "optimizer", end - 5 - own, end - own)
            rank.collective(
                n, launch, end - 5 - own, n + 1, tensor="bucket 0", flags=s.Flag.ASYNC, source=s.Source.BOUND
            )
            if own:
                rank.stage(n, "checkpoint", end - own, end)
        now += 100 + extra
    return ranks


def disk(busy: tuple[float, float]) -> MetricBatch:
    """Return a disk that is busy for that time, in ms, and CPUs at a half, sampled every 500 ms."""
    times = [500.0 * n for n in range(6)]
    seconds = [(at, max(0.0, min(at, busy[1]) - busy[0]) / 1000) for at in times]
    return host_metrics(
        (m.SYSTEM_DISK_IO_TIME, -1, {m.DEVICE: "sda"}, seconds),
        (m.SYSTEM_CPU_UTILIZATION, -1, {m.CPU_MODE: "user"}, [(at, 0.5) for at in times]),
    )


def slow_stages(report: RunReport) -> list[tuple[SlowStage, tuple[Sign, ...]]]:
    """Return the slow stages of a report, and their signs."""
    return [(one.slow, one.signs) for one in report.saturation.stages]


def test_slow_stages_are_told_with_what_the_host_did():
    """The late data of rank 1, in all steps, and the checkpoint of rank 0, in one, while the disk was busy."""
    report = analyse([rank.batch() for rank in planted()], metrics=[disk((1000, 1360))])

    assert slow_stages(report) == [
        (
            SlowStage(
                1, "dataloader_next", "others", 45 * MS, 5 * MS, 40 * MS, tuple(range(1, 20)), 19, 40 * MS, 1, 760 * MS
            ),
            (),
        ),
        (
            SlowStage(0, "checkpoint", "usual", 400 * MS, 0, 400 * MS, (9,), 19, 400 * MS, 9, 400 * MS),
            (Sign("disk", "sda", pytest.approx(0.9), 0.5),),
        ),
    ]
    assert [sentence(one) for one in report.saturation.stages] == [
        "Rank 1's dataloader_next took 45.0 ms, 40.0 ms longer than the others' (in 19 of 19 steps); "
        "nothing that was sampled then is above its threshold.",
        "Rank 0's checkpoint took 400.0 ms, 400.0 ms longer than its median (in step 9), "
        "while disk sda of node-0 was 90% busy.",
    ]


def test_the_worst_of_many_slow_steps_is_told():
    """Both ranks are slow in every fifth step; that rank 1 stood still for a second in one of them was told nowhere."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(60):
        for r, rank in enumerate(ranks):
            took = 1000 if (r, n) == (1, 25) else 30 if n % 5 == 0 else 3
            rank.step(n, 2000 * n, 2000 * n + took).stage(n, "forward", 2000 * n, 2000 * n + took)
    worst, usual = analyse([rank.batch() for rank in ranks]).saturation.stages

    assert (worst.slow.most, worst.slow.worst, worst.slow.total) == (997 * MS, 25, (10 * 27 + 997) * MS)
    assert [sentence(one).rstrip(".") for one in (worst, usual)] == [
        "Rank 1's forward took 30.0 ms, 27.0 ms longer than its median (in 11 of 59 steps, 997.0 ms in step 25)",
        "Rank 0's forward took 30.0 ms, 27.0 ms longer than its median (in 11 of 59 steps)",
    ]


@pytest.mark.parametrize(
    ("is_slow", "steps"),
    [
        pytest.param(lambda r, n: r == 1 and n >= 10, {1: 11}, id="from the middle on"),
        pytest.param(lambda r, n: r == n % 2, {0: 10, 1: 10}, id="in turn"),
        pytest.param(lambda r, n: r == n % 2 or n == 7, {0: 10, 1: 9}, id="in turn, and once both"),
    ],
)
def test_a_rank_that_is_slow_in_half_of_the_steps_is_told_beside_the_others(is_slow, steps):
    """In too few for a straggler; its own median is that of the slow ones, or lies in the middle."""
    ranks, now = [Rank(r, 2) for r in range(2)], [0, 0]
    for n in range(21):
        for r, rank in enumerate(ranks):
            begin, now[r] = now[r], now[r] + (50 if is_slow(r, n) else 20)
            rank.step(n, begin, now[r]).stage(n, "forward", begin, now[r])
    report = analyse([rank.batch() for rank in ranks])

    assert report.stragglers.verdict == "none"
    told = [(slow.rank, slow.against, slow.excess, len(slow.steps)) for slow, _ in slow_stages(report)]
    assert sorted(told) == [(rank, "others", 30 * MS, count) for rank, count in steps.items()]


def test_a_few_slow_steps_are_told_by_their_numbers():
    """One word says whether they are several."""
    rank = Rank()
    for n in range(20):
        rank.step(n, 100 * n, 100 * n + 50).stage(n, "checkpoint", 100 * n, 100 * n + (40 if n in (4, 5, 9) else 1))
    (slow,) = analyse([rank.batch()]).saturation.stages

    assert sentence(slow) == ("Rank 0's checkpoint took 40.0 ms, 39.0 ms longer than its median (in steps 4-5, 9).")


@pytest.mark.parametrize(
    ("stage", "tensor", "steps"),
    [
        pytest.param("forward", "bucket 0", (9,), id="ddp"),
        pytest.param("forward", "grads", (1, 9), id="something else"),
        pytest.param("dataloader_next", "bucket 0", (1, 9), id="another stage"),
    ],
)
def test_a_forward_in_which_ddp_rebuilds_its_buckets_is_not_told_as_slow(stage, tensor, steps):
    """In that of step 1 its ranks wait for each other; in a later one, or without DDP, somebody is slow."""
    rank = Rank()
    for n in range(20):
        begin, ready = 100 * n, 100 * n + (40 if n in (1, 9) else 20)
        rank.step(n, begin, ready + 40).stage(n, stage, begin, ready).stage(n, "backward", ready, ready + 10)
        rank.collective(n, ready + 5, ready + 10, n + 1, tensor=tensor)
    assert [(one.stage, one.steps) for one, _ in slow_stages(analyse([rank.batch()]))] == [(stage, steps)]


def test_where_no_operation_is_recorded_the_forward_of_step_1_may_be_one_in_which_ddp_rebuilds_its_buckets():
    """At level step nothing tells of buckets; a rank alone rebuilds none."""
    ranks = [Rank(r, 2) for r in range(2)]
    for n in range(20):
        for rank in ranks:
            begin, ready = 100 * n, 100 * n + (40 if n in (1, 9) else 20)
            rank.step(n, begin, ready + 20).stage(n, "forward", begin, ready)
    both, alone = (analyse([rank.batch() for rank in some]) for some in (ranks, ranks[:1]))
    assert [(one.rank, one.steps) for one, _ in slow_stages(both)] == [(0, (9,)), (1, (9,))]
    assert [(one.rank, one.steps) for one, _ in slow_stages(alone)] == [(0, (1, 9))]


def test_time_between_steps_is_slow_when_it_was():
    """From the end of the step before to the begin of the one that it is told of."""
    rank = Rank()
    for n in range(20):
        rank.step(n, 100 * n + 40 * (n == 9), 100 * n + 90)
    found, windows = slow_stages_of([rank.batch()], [])
    assert [(one.slow.stage, one.slow.steps) for one in found.stages] == [("between steps", (9,))]
    assert [one.tolist() for one in windows] == [[[890 * MS, 940 * MS]]]


def test_what_stays_below_its_threshold_is_not_told():
    """The same disk, less busy."""
    report = analyse([rank.batch() for rank in planted()], metrics=[disk((1000, 1120))])
    assert [one.signs for one in report.saturation.stages] == [(), ()]


def test_garbage_collection_is_told_from_its_spans():
    """No metrics are needed for it; only the part of it in the slow stage counts, and only that rank's."""
    ranks = planted()
    for n in range(1, 20):
        at = 100 * n + (400 if n > 9 else 0)
        ranks[1].add(Descriptor(s.PHASE, s.GC), n, at + 30, at + 60, level=Level.PHASE)
    report = analyse([rank.batch() for rank in ranks])
    assert slow_stages(report)[0][1] == (Sign("gc", "", pytest.approx(15 / 45), 0.1),)
    assert "garbage collection took" in sentence(report.saturation.stages[0])


@pytest.mark.parametrize(
    ("series", "words"),
    [
        pytest.param(
            [(m.SYSTEM_CPU_UTILIZATION, -1, {m.CPU_MODE: "user"}, 0.97)], "the CPUs of node-0 were 97% busy", id="cpu"
        ),
        pytest.param(
            [(m.DL_GPU_THROTTLED, -1, {m.HW_ID: "GPU-1", m.THROTTLE_REASON: "thermal"}, 1.0)],
            "GPU-1 of node-0 was throttled 100% of the time (thermal)",
            id="gpu",
        ),
        pytest.param(
            [(m.PROCESS_DISK_IO, 1, {m.DISK_DIRECTION: "write"}, 2.0**27)],
            "its process wrote 128.0 MiB/s to disks",
            id="written",
        ),
        pytest.param(
            [(m.PROCESS_DISK_IO, 1, {m.DISK_DIRECTION: "read"}, 2.0**27)],
            "its process read 128.0 MiB/s from disks",
            id="read",
        ),
        pytest.param(
            [(m.PROCESS_PAGING_FAULTS, 1, {m.FAULT_TYPE: "major"}, 400.0)],
            "its process waited for the disk in 400 page faults a second",
            id="major faults",
        ),
        pytest.param(
            [(m.PROCESS_PAGING_FAULTS, 1, {m.FAULT_TYPE: "minor"}, 150_000.0)],
            "its process had 150,000 page faults a second",
            id="minor faults",
        ),
        pytest.param(
            [(m.PROCESS_CONTEXT_SWITCHES, 1, {m.SWITCH_TYPE: "involuntary"}, 250.0)],
            "its process was taken off the CPU 250 times a second",
            id="switches",
        ),
        pytest.param(
            [
                (m.SYSTEM_NETWORK_IO, -1, {m.INTERFACE: "eth0", m.NETWORK_DIRECTION: "transmit"}, 9e8),
                (m.HW_NETWORK_BANDWIDTH_LIMIT, -1, {m.HW_ID: "eth0", m.HW_TYPE: "network"}, 1e9),
            ],
            "eth0 of node-0 sent at 90% of its line rate",
            id="network",
        ),
        pytest.param(
            [(m.PROCESS_CONTEXT_SWITCHES, 0, {m.SWITCH_TYPE: "involuntary"}, 250.0)], None, id="another rank's process"
        ),
    ],
)
def test_every_sign_has_its_words(series, words):
    """Each kind, above its threshold; a counter grows by that much a second."""
    times = [500.0 * n for n in range(6)]
    points = [
        (
            name,
            rank,
            attributes,
            [(at, level * (at / 1000 if m.METRICS[name].instrument == m.COUNTER else 1)) for at in times],
        )
        for name, rank, attributes, level in series
    ]
    report = analyse([rank.batch() for rank in planted()], metrics=[host_metrics(*points)])
    told = sentence(report.saturation.stages[0])
    slow = "Rank 1's dataloader_next took 45.0 ms, 40.0 ms longer than the others' (in 19 of 19 steps)"
    assert told == f"{slow}, while {words}." if words else told == f"{slow}."


def test_the_report_shows_what_was_used():
    """Mean over time, 95th percentile and maximum; hosts before their processes, what stayed at 0 in JSON alone."""
    metrics = host_metrics(
        (m.PROCESS_MEMORY_USAGE, 1, {}, [(0.0, 2**20), (500.0, 2**30)]),
        (m.SYSTEM_CPU_UTILIZATION, -1, {m.CPU_MODE: "user"}, [(0.0, 0.5), (500.0, 0.5), (2500.0, 1.0)]),
        (m.SYSTEM_DISK_IO_TIME, -1, {m.DEVICE: "loop0"}, [(0.0, 3.0), (500.0, 3.0)]),
    )
    cpu, idle, memory = utilisation([metrics])
    assert cpu == UtilisationRow("node-0", -1, "CPU busy", "", "1", 3, 0.9, pytest.approx(0.95), 1.0)
    assert (idle.of, idle.max) == ("loop0", 0.0)
    assert memory == UtilisationRow(
        "node-0", 1, "resident memory", "", "By", 2, 2.0**30, pytest.approx(2**30, rel=0.1), 2.0**30
    )

    report = analyse([rank.batch() for rank in planted()], metrics=[metrics])
    table = rendered(report, 120).split("What was used")[1]
    assert "rank 1  resident memory        2  1.0 GiB" in table
    assert "loop0" not in table.split("Rests on")[0]
    assert [row["of"] for row in json.loads(to_json(report))["utilisation"]] == ["", "loop0", ""]


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.973, "1", "97%"),
        (2**21, "By/s", "2.0 MiB/s"),
        (31.25, "/s", "31.2/s"),
        (250.0, "W", "250 W"),
        (7, "{cpu}", "7.0"),
    ],
)
def test_figures_are_told_in_their_unit(value, unit, text):
    """As people read them."""
    assert figure(value, unit) == text


def test_metrics_are_cut_to_what_is_looked_at():
    """The time of the spans with the next sample around it; no other rank's process, no other host."""
    cpu = (m.SYSTEM_CPU_UTILIZATION, -1, {m.CPU_MODE: "user"}, [(500.0 * n, float(n)) for n in range(9)])
    threads = [(m.PROCESS_THREAD_COUNT, rank, {}, [(1500.0, 1.0 + rank)]) for rank in (0, 1)]
    metrics = host_metrics(cpu, *threads)
    batch = Rank(1, 2).step(3, 1200, 1600).batch()

    (found,) = select_metrics([metrics, replace(metrics, boot_id="another")], [batch])

    assert sorted(found.value.tolist()) == [2.0, 2.0, 3.0, 4.0]
    assert select_metrics([metrics], [Rank(0).batch()]) == []


@pytest.mark.parametrize(
    ("stages", "note"),
    [
        pytest.param(
            ["train_batch", "grad_sync"],
            "train_batch and grad_sync (communication that a rank is blocked in) overlap other rows",
            id="both",
        ),
        pytest.param(["train_batch", "forward"], "train_batch overlaps other rows", id="one"),
        pytest.param(["forward"], "", id="none"),
    ],
)
def test_what_lies_over_other_rows_has_a_row(stages, note):
    """At level `step` nothing tells of `grad_sync`."""
    *_, part = timing_parts(Timings(1, tuple(StageTimings(name, False, (), None, 0, False) for name in stages)), 1)

    assert (part.plain if isinstance(part, Text) else "") == note

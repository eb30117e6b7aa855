"""The drain's metering, run by hand: who is sampled for which run, and what is written when all ends."""

import os
import sys
import threading
from dataclasses import replace
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult

from otel_dltrace.export.metrics import gpu, host, metering, pipeline
from otel_dltrace.export.metrics.gpu import NoGpuError
from otel_dltrace.export.metrics.metering import Metering
from otel_dltrace.export.metrics.run import RunMetrics
from otel_dltrace.export.metrics.sampler import IN_WINDOW_S, OUTSIDE_S
from otel_dltrace.export.metrics.settings import MetricSettings
from otel_dltrace.export.otlp.settings import OtlpSettings
from otel_dltrace.export.rundir.metric_reader import read_host_metrics
from otel_dltrace.model import metrics as m
from otel_dltrace.model.descriptors import Descriptors
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.metric_batch import HOST, Point
from otel_dltrace.model.plan import Window
from otel_dltrace.model.spans import Process
from otel_dltrace.model.summary import summary_line
from otel_dltrace.record import guard
from otel_dltrace.record.process_id import pid_namespace
from tests.support.runs import Rank
from tests.support.servers import wait_until

WINDOW = Window.parse("10-12")


def member(folder: Path, rank: int, pid: int = 0, namespace: int = -1, generation: str = "1.00") -> Any:
    """Return a member of the drain, as far as metering looks at it: this process is every rank."""
    path = folder / generation / "hosts" / "node-0"
    path.mkdir(parents=True, exist_ok=True)
    bind = Bind("job", generation, "demo", rank=rank, world_size=2)
    header = SimpleNamespace(pid=pid or os.getpid(), pid_namespace=pid_namespace() if namespace < 0 else namespace)
    return SimpleNamespace(
        writer=SimpleNamespace(root=folder / generation, folder=path),
        process=Process(hash((rank, generation)), bind, "node-0", "boot"),
        bind=bind,
        source=SimpleNamespace(reader=SimpleNamespace(header=header)),
    )


@pytest.fixture
def made() -> Metering:
    """Give a metering that samples, and writes at every turn."""
    return Metering(None, samples=True, window=WINDOW, quota=1 << 30)


def ranks_in(folder: Path, metric: str) -> set[int]:
    """Return whose values of *metric* are in a folder."""
    return set(read_host_metrics(folder).of(metric).rank.tolist())


def test_each_run_gets_the_host_and_its_own_ranks(made, monkeypatch, tmp_path):
    """Two generations on one host, one after the other, and both for a while; the last sample is not lost."""
    monkeypatch.setattr(metering, "WRITE_S", 0.0)
    first, second = member(tmp_path, 0), member(tmp_path, 1, generation="2.00")
    for one in (first, second):
        made.rank_of(one)
    made.tick([first, second])
    made.finish(30)

    for one, rank in ((first, 0), (second, 1)):
        assert ranks_in(one.writer.folder, m.SYSTEM_MEMORY_LIMIT) == {HOST}
        assert ranks_in(one.writer.folder, m.PROCESS_MEMORY_USAGE) == {rank}
    made.close(monotonic() + 30)
    assert made.trouble_of(first.writer.root) == made.trouble


def test_a_run_that_has_ended_gets_one_more_sample_and_its_file_is_closed(made, monkeypatch, tmp_path):
    """However long the period is; the next run has its own."""
    monkeypatch.setattr(metering, "WRITE_S", 0.0)
    one = member(tmp_path, 0)
    made.rank_of(one)
    made.tick([one])
    wait_until(lambda: made.tick([one]) or len(read_host_metrics(one.writer.folder)))
    samples = len(read_host_metrics(one.writer.folder).of(m.SYSTEM_MEMORY_LIMIT))
    wait_until(lambda: made.tick([]) or not made._runs)

    assert len(read_host_metrics(one.writer.folder).of(m.SYSTEM_MEMORY_LIMIT)) > samples
    made.finish(30)


def test_a_process_that_is_bound_anew_is_watched_as_who_it_is_now(made, monkeypatch, tmp_path):
    """A second process group, in another generation: the same ring, another run and rank."""
    monkeypatch.setattr(metering, "WRITE_S", 0.0)
    monkeypatch.setattr(metering, "OUTSIDE_S", 0.01)
    first, second = member(tmp_path, 0), member(tmp_path, 3, generation="2.00")
    second.process = replace(second.process, nonce=first.process.nonce)
    made.rank_of(first)
    wait_until(lambda: made.tick([first]) or ranks_in(first.writer.folder, m.PROCESS_MEMORY_USAGE))
    made.rank_of(second)
    wait_until(lambda: made.tick([first, second]) or ranks_in(second.writer.folder, m.PROCESS_MEMORY_USAGE))
    made.finish(30)

    assert [ranks_in(one.writer.folder, m.PROCESS_MEMORY_USAGE) for one in (first, second)] == [{0}, {3}]


class Hanging(MetricExporter):
    """Takes what it is given only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.lets = threading.Event()

    def export(self, *_given: Any, **_more: Any) -> MetricExportResult:
        """Wait."""
        self.lets.wait(30)
        return MetricExportResult.SUCCESS

    def force_flush(self, *_given: Any) -> bool:
        """Have nothing to deliver."""
        return True

    def shutdown(self, *_given: Any, **_more: Any) -> None:
        """End."""


SENT = MetricSettings(OtlpSettings("http://h:1/v1/metrics"), (), 1e9, 30_000)


def test_what_did_not_get_out_in_time_is_told_of_that_run(monkeypatch, tmp_path):
    """A sidecar lets go of the runs whose last export has ended; of what hangs at its own end there is a sentence."""
    exporter = Hanging()
    monkeypatch.setattr(metering, "LAST_SAMPLE_S", 0.0)
    monkeypatch.setattr(pipeline, "_otlp", lambda _: exporter)
    made = Metering(SENT, samples=False, window=WINDOW, quota=1 << 30)
    members = [member(tmp_path, 0, generation=f"{i}.00") for i in range(2)]
    for one in members:
        made.rank_of(one).run.observe([Point(m.DL_TRAIN_BATCHES, 1.0, rank=0)])
        monkeypatch.setattr(exporter, "lets", threading.Event())
        wait_until(lambda: made.tick([]) or not made._runs)
        if one is members[0]:
            exporter.lets.set()
            wait_until(lambda: made.tick([]) or not made._closing)
    made.finish(0.0)
    made.close(monotonic())
    exporter.lets.set()

    told = [made.trouble_of(one.writer.root) for one in members]
    assert told == [
        [],
        ["the last metrics did not get to http://h:1/v1/metrics in time, and are lost to it"],
    ]


def test_where_the_sdk_cannot_be_loaded_nothing_waits_for_it(capsys, monkeypatch, tmp_path):
    """One sentence; what is sampled goes into the run directory all the same."""
    monkeypatch.setattr(guard, "_said", set())
    monkeypatch.setitem(sys.modules, "otel_dltrace.export.metrics.pipeline", None)
    one = member(tmp_path, 0)
    run = RunMetrics(one.writer.folder, one.process, SENT, 1 << 30)
    wait_until(lambda: run.is_loaded)
    run.write([(1, -1, Point(m.SYSTEM_MEMORY_LIMIT, 64.0))])
    run.finish(monotonic())

    assert (run.goes_out, len(run._waiting), run.wait(monotonic())) == (False, 0, True)
    assert len(read_host_metrics(one.writer.folder)) == 1
    assert (
        capsys.readouterr().err.count("no metrics are sent, since the SDK cannot be loaded (ModuleNotFoundError") == 1
    )


def test_pids_of_another_namespace_are_nobody_here(made, monkeypatch, tmp_path):
    """A sidecar samples the host alone."""
    monkeypatch.setattr(metering, "WRITE_S", 0.0)
    one = member(tmp_path, 0, namespace=1)
    made.rank_of(one)
    made.tick([one])
    made.finish(30)

    found = read_host_metrics(one.writer.folder)
    assert (len(found.of(m.SYSTEM_MEMORY_LIMIT)) > 0, len(found.of(m.PROCESS_MEMORY_USAGE))) == (True, 0)


@pytest.mark.parametrize(
    ("step", "ms", "period"),
    [
        pytest.param(-1, 0, OUTSIDE_S, id="before the first step, with a window later on"),
        pytest.param(4, 100, IN_WINDOW_S, id="two seconds before the window"),
        pytest.param(4, 1000, OUTSIDE_S, id="six seconds before it"),
        pytest.param(10, 1000, IN_WINDOW_S, id="inside"),
        pytest.param(12, 1000, OUTSIDE_S, id="after it"),
    ],
)
def test_it_samples_often_in_the_window_and_shortly_before(step, ms, period, made, tmp_path):
    """The drain reads of a step when it is over, so it looks ahead."""
    assert period_at(made, tmp_path, step, ms) == period


def test_it_looks_as_far_ahead_as_steps_are_read_late(tmp_path):
    """Rings are read every five seconds: a window that begins and ends between two reads has its samples."""
    made = Metering(None, samples=True, window=WINDOW, quota=1 << 30, lag=5.0)
    assert period_at(made, tmp_path, step=4, ms=1000) == IN_WINDOW_S


def period_at(made: Metering, folder: Path, step: int, ms: float) -> float:
    """Return how often is sampled when a rank has done *step*, in *ms*."""
    one = member(folder, 0)
    rank = made.rank_of(one)
    if step >= 0:
        batch = Rank().step(step, 0, ms).batch()
        rank.take(batch.rows, Descriptors.of(batch.descriptors))
    made.tick([one])
    seen = made._sampler.period
    made.finish(30)
    return seen


def test_the_run_s_last_line_says_what_was_not_sampled():
    """Where the user looks, and not in a log."""
    figures = {"spans": 4, "metrics": {"trouble": ["no metrics of GPUs: NVML says no"]}}

    assert summary_line(figures) == "4 spans recorded, none lost; no metrics of GPUs: NVML says no"


def test_what_fails_while_it_is_opened_is_told_and_the_rest_is_sampled(made, monkeypatch):
    """A file of /proc that is not there, in a strange container."""

    def broken() -> None:
        raise FileNotFoundError("/proc/diskstats")

    monkeypatch.setattr(host, "Disks", broken)
    monkeypatch.setattr(gpu, "open_gpus", lambda: (_ for _ in ()).throw(NoGpuError("")))
    sources = made._open_sources()

    assert ([source.name for source in sources], made.trouble) == (
        ["CPU and memory", "network"],
        ["no metrics of disks: /proc/diskstats"],
    )

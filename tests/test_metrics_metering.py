"""The drain's metering, run by hand: who is sampled for which run, and what is written when all ends."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from otel_dltrace.export.metric_reader import read_host_metrics
from otel_dltrace.export.metrics import gpu, host, metering
from otel_dltrace.export.metrics.gpu import NoGpuError
from otel_dltrace.export.metrics.metering import Metering
from otel_dltrace.export.metrics.process import pid_namespace
from otel_dltrace.export.metrics.sampler import IN_WINDOW_S, OUTSIDE_S
from otel_dltrace.model import metrics as m
from otel_dltrace.model.identity import Bind
from otel_dltrace.model.metric_batch import HOST
from otel_dltrace.model.plan import Window
from otel_dltrace.model.spans import Descriptors, Process
from otel_dltrace.model.summary import summary_line
from tests.runs import Rank
from tests.servers import wait_until

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
    assert made.close(30)


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
    one = member(tmp_path, 0)
    rank = made.rank_of(one)
    if step >= 0:
        batch = Rank().step(step, 0, ms).batch()
        rank.take(batch.rows, Descriptors.of(batch.descriptors))
    made.tick([one])
    seen = made._sampler.period
    made.finish(30)

    assert seen == period


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
